"""Makes lists of file names and tensor names for error messages."""

from __future__ import annotations

from pathlib import Path

PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")


def pickle_names(folder: Path) -> list[str]:
    """Return the sorted names of a folder's pickle files. The files are never read, since unpickling can run code."""
    return sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern))


def name_some(names: list[str], most: int = 10) -> str:
    """Join the first `most` names with commas. If there are more names, their total number follows."""
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")
