"""Headless Chromium on a local page: its screenshot, its document once scripts have run, its console."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.image import imread

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
    """A page in a window of a given width. Picture and document are loaded once each, in new browser profiles."""

    page: Path
    fragment: str = ""
    dark: bool = False
    width: int = WIDTH

    @cached_property
    def dom(self) -> str:
        """The document as HTML, after its scripts have run."""
        return self._run("--dump-dom")[0]

    @property
    def console(self) -> list[str]:
        """The lines that the page printed on its console, errors included."""
        return re.findall(r":CONSOLE[:(].*", self._opened[1])

    @cached_property
    def pixels(self) -> np.ndarray:
        """The screenshot, [height, width, 3]."""
        return _pixels(self._opened[0])

    @cached_property
    def _opened(self) -> tuple[bytes, str]:
        """Open the page. Returns the screenshot as PNG, and the text that Chromium wrote."""
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / "page.png"
            _, errors = self._run(f"--screenshot={picture}")
            return picture.read_bytes(), errors

    def _run(self, action: str) -> tuple[str, str]:
        with tempfile.TemporaryDirectory() as profile:
            scheme = f"--blink-settings=preferredColorScheme={0 if self.dark else 1}"
            address = f"{self.page.absolute().as_uri()}#{self.fragment}"
            size = f"--window-size={self.width},{HEIGHT}"
            command = [*CHROMIUM, size, f"--user-data-dir={profile}", scheme, action, address]
            result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return result.stdout, result.stderr


def _pixels(png: bytes) -> np.ndarray:
    """Return the red, green and blue values of a PNG of 8 bits, [height, width, 3]."""
    return (imread(BytesIO(png))[:, :, :3] * 255).round().astype(np.uint8)
