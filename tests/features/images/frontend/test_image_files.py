"""Files of images: formats, damage and bounds. Each is refused in one line, before its pixels are decoded."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_folders import as_file, picture

from compiled_engine.features.images.frontend.sources import read_source
from compiled_engine.features.images.frontend.worker import decoded_file

MOST = 1 << 20


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG file that states a size and has hardly any data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats_that_are_read(kind: str) -> None:
    image = picture(20, 10)
    found = decoded_file(as_file(image, kind), MOST)
    assert found.size == (20, 10)
    if kind in ("PNG", "BMP"):
        assert np.array_equal(np.asarray(found.convert("RGB")), np.asarray(image))


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "PDF"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(
        ValueError, match=r"^the file is no image of a known format; allowed: PNG, JPEG, WEBP, GIF, BMP$"
    ):
        decoded_file(as_file(picture(32, 32), kind), MOST)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$"):
        decoded_file(data, MOST)


@settings(deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]), st.floats(0, 0.9))
def test_truncated_files_are_refused(kind: str, share: float) -> None:
    content = as_file(picture(40, 40), kind)
    with pytest.raises(ValueError, match=r"is damaged|no image of a known format|pixels"):
        decoded_file(content[: int(share * len(content))], MOST)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_read(kind: str) -> None:
    frames = [PIL.Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    content = as_file(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert decoded_file(content, MOST).convert("RGB").getpixel((8, 8)) == (255, 0, 0)


def test_an_image_is_turned_as_its_camera_was_held() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # orientation: turned by a quarter
    assert decoded_file(as_file(picture(20, 10), "JPEG", exif=exif), MOST).size == (10, 20)


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [
        (50_000, 50_000, "too many pixels; allowed: at most 1048576"),
        (1025, 1024, "has 1025 x 1024 pixels; allowed: at most 1048576"),
        (3000, 2, "a longer side of at most 200 times the other"),
        (1 << 30, 1 << 30, "too many pixels; allowed: at most 1048576"),
    ],
)
def test_sizes_are_refused_before_decoding(width: int, height: int, message: str) -> None:
    decoded_file(as_file(picture(8, 8)), MOST)  # imports Pillow's readers
    tracemalloc.start()
    with pytest.raises(ValueError, match=message):
        decoded_file(png_of_size(width, height), MOST)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: 5, TypeError, "^image must be a PIL image, a uint8 array"),
        (lambda: np.zeros((4, 4), np.uint8), ValueError, r"got uint8 of shape \[4, 4\]; embeddings are not taken"),
        (lambda: np.zeros((4, 4, 3), np.float32), ValueError, "got float32"),
        (lambda: np.zeros((2048, 2048, 3), np.uint8), ValueError, "has 2048 x 2048 pixels"),
        (lambda: np.zeros((0, 4, 3), np.uint8), ValueError, "has 4 x 0 pixels"),
        (lambda: PIL.Image.new("RGB", (2048, 2048)), ValueError, "has 2048 x 2048 pixels"),
        (lambda: "/no/such/file.png", OSError, "^image: No such file or directory: '/no/such/file.png'$"),
        (lambda: "/", OSError, "^image: Is a directory"),
        (lambda: b"", ValueError, "^image: the file has 0 bytes"),
    ],
)
def test_what_is_no_image_is_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_source("image", make(), MOST)
