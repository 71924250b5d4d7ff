"""Folders for results, made before the work: afterwards is too late to hear that they cannot be."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(name: str, folder: Path) -> None:
    """Raises ValueError, naming the option, for a file in its place or way, and where it cannot be written to."""
    given = f"{name} is {str(folder)!r}"
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            raise ValueError(f"{given}, {'a file' if part == folder else f'but {part} is a file'}; allowed: a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{given}, a folder that cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{given}; allowed: a folder that can be written to")
