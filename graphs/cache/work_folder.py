"""WorkFolder, a private folder for the files that a running engine compiles and loads.

The folder is deleted with its WorkFolder object, at the latest when the process ends. The process holds a lock on it
until then, so a folder without a lock was left by a killed process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from compiled_engine.process.forks import unless_forked

_LOCK = "lock"
_FILES = "files"


class WorkFolder:
    """Creates an empty folder `path` in a new folder in `parent`, and deletes both on `close` or with this object.

    parent: None for the system's temporary folder. prefix: the beginning of the new folder's name. Raises OSError if
    the folder cannot be created.
    """

    def __init__(self, parent: Path | None, prefix: str) -> None:
        outer = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = os.open(outer / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.path = outer / _FILES
            self.path.mkdir()
        except OSError:
            shutil.rmtree(outer, ignore_errors=True)
            raise
        self._remove = weakref.finalize(self, unless_forked(_remove), outer, lock)

    def close(self) -> None:
        self._remove()


def is_in_use(outer: Path) -> bool:
    """Return whether a running process holds the lock of a work folder. outer: the parent of `WorkFolder.path`."""
    try:
        lock = os.open(outer / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _remove(outer: Path, lock: int) -> None:
    shutil.rmtree(outer, ignore_errors=True)
    os.close(lock)
