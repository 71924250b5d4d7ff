"""Converts images from users (PIL images, arrays, paths and bytes) to plain data for the processes that decode them."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from compiled_engine.features.images.frontend.bounds import MOST_FILE_BYTES, check_pixels
from compiled_engine.frontend.image_parts import SCHEMES

if TYPE_CHECKING:
    import PIL.Image

ALLOWED = "a PIL image, a uint8 array of 3 channels, a path, or the bytes of an image file"


class MediaSource(NamedTuple):
    """An image or a clip of audio that is not decoded yet."""

    # "file": `data` is an image or audio file; "pixels": pixels of a PIL image, `mode` is its mode and `shape` its
    # width and height; "array": an array of uint8, `shape` is its shape; "samples": fp32, `mode` is their rate.
    kind: str
    data: bytes
    mode: str = ""
    shape: tuple[int, ...] = ()

    def digest(self, settings: str) -> str:
        """Return a hex digest of the content and of the processor's settings."""
        head = repr((self.kind, self.mode, self.shape, settings, len(self.data)))
        found = hashlib.sha256(head.encode())
        found.update(self.data)
        return found.hexdigest()


def read_source(name: str, image: Any, max_pixels: int) -> MediaSource:
    """Return the source of an image that a caller in Python gives.

    name: the image's name in errors. Raises TypeError, ValueError or OSError, whose messages begin with it, for a value
    that is no image, cannot be read, or is out of bounds.
    """
    try:
        if isinstance(image, bytes | bytearray | memoryview):
            return file_source(bytes(image))
        if isinstance(image, str) and image.lower().startswith(SCHEMES):
            raise ValueError(f"{_shown(image)} is a URL, which only messages may have; allowed: {ALLOWED}")
        if isinstance(image, str | Path):
            return file_source(read_file(Path(image)))
        if is_pil_image(image):
            return _of_pil(image, max_pixels)
        if hasattr(image, "__array__"):
            return _of_array(np.asarray(image), max_pixels)
    except OSError as error:
        raise OSError(f"{name}: {error.strerror or error}: {str(error.filename)!r}") from error
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    raise TypeError(f"{name} must be {ALLOWED}, got {_shown(image)}")


def file_source(data: bytes) -> MediaSource:
    """Return the source of an image or audio file. Raises ValueError if it is empty or too long."""
    if not 0 < len(data) <= MOST_FILE_BYTES:
        raise ValueError(f"the file has {len(data)} bytes; allowed: 1 to {MOST_FILE_BYTES}")
    return MediaSource("file", data)


Opener = Callable[[str, int], int]
"""Opens a file, as the argument of `open` does: path and flags to a descriptor."""


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting. `open` alone would wait for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def opener_within(folder: Path) -> Opener:
    """Return a function that opens files by their paths relative to a folder. It raises OSError for symbolic links."""

    def opened(path: str, flags: int) -> int:
        *parents, name = Path(path).parts
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in parents:
                outer, place = place, os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
                os.close(outer)
            return os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=place)
        finally:
            os.close(place)

    return opened


def read_file(path: Path, opener: Opener = _without_waiting) -> bytes:
    """Return a file's content. Raises OSError, or ValueError for a file that is not regular or is too long."""
    with open(path, "rb", opener=opener) as file:
        if not stat.S_ISREG((found := os.fstat(file.fileno())).st_mode):
            raise ValueError(f"{str(path)!r} is no regular file")
        if found.st_size > MOST_FILE_BYTES:
            raise ValueError(f"{str(path)!r} has {found.st_size} bytes; allowed: 1 to {MOST_FILE_BYTES}")
        return file.read(MOST_FILE_BYTES + 1)


def is_pil_image(value: Any) -> bool:
    """Return whether the value is a PIL image, without importing Pillow."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def _of_pil(image: PIL.Image.Image, max_pixels: int) -> MediaSource:
    """Return the source of a PIL image. Raises ValueError as check_pixels does.

    Modes besides RGB and RGBA are converted as processors do it: images with transparency to RGBA, all others to RGB.
    """
    check_pixels(image.width, image.height, max_pixels)
    if image.mode not in ("RGB", "RGBA"):
        has_alpha = "A" in image.getbands() or image.info.get("transparency") is not None
        image = image.convert("RGBA" if has_alpha else "RGB")
    return MediaSource("pixels", image.tobytes(), image.mode, image.size)


def _of_array(array: np.ndarray[Any, Any], max_pixels: int) -> MediaSource:
    if array.ndim != 3 or 3 not in (array.shape[0], array.shape[-1]) or array.dtype != np.uint8:
        raise ValueError(
            "an array must be uint8 of shape [height, width, 3] or [3, height, width], got "
            f"{array.dtype} of shape {list(array.shape)}; embeddings are not taken in place of images"
        )
    height, width = array.shape[:2] if array.shape[-1] == 3 else array.shape[1:]
    check_pixels(width, height, max_pixels)
    return MediaSource("array", np.ascontiguousarray(array).tobytes(), shape=tuple(array.shape))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
