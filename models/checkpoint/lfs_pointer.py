"""Git LFS pointers: the short text that a checkout without Git LFS has in the place of a large file."""

from __future__ import annotations

from pathlib import Path

_FIRST_BYTES = b"version https://git-lfs.github.com/spec/"


def is_lfs_pointer(path: Path) -> bool:
    """Return whether the file is a pointer; False if it does not exist."""
    try:
        with path.open("rb") as file:
            return file.read(len(_FIRST_BYTES)) == _FIRST_BYTES
    except OSError:
        return False


def describe_lfs_pointer(path: Path) -> str:
    """The error message for a pointer file."""
    return (
        f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, or download the file anew"
    )
