"""Names of files and tensors, as errors have them."""

from __future__ import annotations

from pathlib import Path

PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")


def pickle_names(folder: Path) -> list[str]:
    """The names of the pickle files in a folder, which are never read: they can run code."""
    return sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern))


def name_some(names: list[str], most: int = 10) -> str:
    """The first names, and how many there are if that is more."""
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")
