"""Locates the engine's cache folder, and creates subfolders in it that no other user can change."""

from __future__ import annotations

import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def default_root() -> Path:
    """Return the cache folder: $COMPILED_ENGINE_CACHE_DIR, or else `compiled_engine` in the XDG cache folder.

    The folder need not exist. Raises RuntimeError if the user has no home folder.
    """
    if override := os.environ.get("COMPILED_ENGINE_CACHE_DIR"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compiled_engine"


def private_folder(root: Path, name: str, uid: int | None = None) -> Path:
    """Return the folder `name` in `root`, which only its owner can read or change. Create both if they do not exist.

    uid: the user who must own the folder; None: this process's user. Raises OSError with the reason if a folder cannot
    be created, is a symbolic link, or could be changed by other users.
    """
    uid = os.geteuid() if uid is None else uid
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    _require_plain(root, status)
    if status.st_uid not in (uid, 0):
        raise PermissionError(f"{root} belongs to another user")
    if status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise PermissionError(f"other users can write to {root}; allowed: at most 0755, as chmod go-w makes it")
    path = root / name
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    _require_plain(path, status)
    if status.st_uid != uid:
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & OTHERS_WRITE:  # its files may be other users'
        raise PermissionError(f"other users can write to {path}; remove it")
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def _require_plain(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path} is a symbolic link; name the folder itself")
