"""Headless Chromium on a local page: its screenshot, its document once scripts have run, its console."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WIDTH, HEIGHT = 1280, 1600
CHROMIUM = [
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
    ),
    *("--enable-logging=stderr", "--v=0"),
]


@dataclass(frozen=True)
class Visit:
    """`pixels` [height, width, 3] of the screenshot; `dom` as HTML; `console`: what was printed there, errors too."""

    pixels: np.ndarray
    dom: str
    console: list[str]


def visit(page: Path, fragment: str = "", *, dark: bool = False, width: int = WIDTH) -> Visit:
    """Open a page twice in new profiles: for its screenshot, and for its document. width: of the window in pixels."""
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "page.png"
        errors = _run(page, fragment, dark, width, f"--screenshot={picture}")[1]
        dom, _ = _run(page, fragment, dark, width, "--dump-dom")
        return Visit(_pixels(picture.read_bytes()), dom, re.findall(r":CONSOLE[:(].*", errors))


def _run(page: Path, fragment: str, dark: bool, width: int, action: str) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as profile:
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        address = f"{page.absolute().as_uri()}#{fragment}"
        size = f"--window-size={width},{HEIGHT}"
        command = [*CHROMIUM, size, f"--user-data-dir={profile}", scheme, action, address]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return result.stdout, result.stderr


def _pixels(png: bytes) -> np.ndarray:
    """An 8-bit RGB or RGBA PNG that is not interlaced, as Chromium writes them; RGB alone is returned."""
    width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", png[16:29])
    assert (depth, colour in (2, 6)) == (8, True)
    channels = 3 if colour == 2 else 4
    data, position = b"", 8
    while position < len(png):
        (length,) = struct.unpack(">I", png[position : position + 4])
        if png[position + 4 : position + 8] == b"IDAT":
            data += png[position + 8 : position + 8 + length]
        position += length + 12
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    image = np.zeros((height, width * channels), np.uint8)
    above = np.zeros(width * channels, np.int64)
    for y, line in enumerate(lines):
        image[y] = above = _unfiltered(int(line[0]), line[1:].astype(np.int64), above, channels)
    return image.reshape(height, width, channels)[:, :, :3]


def _unfiltered(kind: int, line: np.ndarray, above: np.ndarray, channels: int) -> np.ndarray:
    """A line of a PNG before its filter (none, left, above, average of both, or Paeth's predictor)."""
    if kind in (0, 2):
        return (line + above * (kind == 2)) & 255
    pixels, upper = line.reshape(-1, channels).tolist(), above.reshape(-1, channels).tolist()
    left, corner = [0] * channels, [0] * channels
    for pixel, up in zip(pixels, upper, strict=True):
        for c in range(channels):
            guesses = {1: left[c], 3: (left[c] + up[c]) // 2, 4: _paeth(left[c], up[c], corner[c])}
            pixel[c] = (pixel[c] + guesses[kind]) & 255
        left, corner = pixel, up
    return np.array(pixels).reshape(-1)


def _paeth(left: int, above: int, corner: int) -> int:
    guess = left + above - corner
    return min((left, above, corner), key=lambda value: abs(guess - value))
