"""Bounds on the size of an image, which are checked before the image is decoded."""

from __future__ import annotations

from compiled_engine.vision import MOST_ASPECT

# File formats that are decoded, by Pillow's names.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Bytes of an image's file from the network or the disk. A file within a request is bounded by the request's body.
MOST_FILE_BYTES = 64 << 20


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raise ValueError unless an image has 1 to `max_pixels` pixels and an aspect ratio of at most MOST_ASPECT."""
    if min(width, height) < 1:
        raise ValueError(f"the image has {width} x {height} pixels; allowed: at least 1 x 1")
    if width * height > max_pixels:
        raise ValueError(f"the image has {width} x {height} pixels; allowed: at most {max_pixels} (max_image_pixels)")
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise ValueError(
            f"the image has {width} x {height} pixels; allowed: a longer side of at most {MOST_ASPECT} times the other"
        )
