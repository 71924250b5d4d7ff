"""The folder with the entries of the compile cache: only its user can access it, and each key has a lock.

<root>/compiled/                mode 0700
  <key>/                        an entry
  <key>.lock                    held while the entry is looked up, built or removed; touched on each use
  work_<key>_<random>/          files of an engine that is running or compiling
  damaged_<key>_<random>/       a damaged entry, set aside
  <key>_graphs_<key>.json       predicted memory of the entry's CUDA graphs
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_engine.graphs.cache.entry import write_entry
from compiled_engine.graphs.cache.work_folder import WorkFolder, is_in_use
from compiled_engine.process.cache_root import private_folder

log = logging.getLogger("compiled_engine")

# Entries have their own folder, as the root may be any folder of the user's.
ENTRIES = "compiled"
_KEY = re.compile(r"[0-9a-f]{32}")
_POLL_S = 0.05


@dataclass(frozen=True)
class CacheFolder:
    """The folder with the entries of a compile cache, which only the user `uid` can change. See `open_cache`."""

    path: Path
    uid: int

    def entry(self, key: str) -> Path:
        return self.path / key

    def entry_keys(self) -> list[str]:
        """Return the keys of all entries, damaged or not."""
        return sorted(name for name in os.listdir(self.path) if _KEY.fullmatch(name))

    def all_keys(self) -> list[str]:
        """Return each key that has an entry, a damaged entry, a lock file, a work folder or predicted memory."""
        return sorted({_key_in(name) for name in os.listdir(self.path)} - {""})

    def set_aside(self, key: str) -> list[Path]:
        """Return the folders into which `move_aside` has moved damaged entries of this key."""
        return sorted(self.path.glob(f"damaged_{key}_*"))

    def abandoned(self, key: str) -> list[Path]:
        """Return the work folders that killed processes left for this key.

        The caller must hold the key's lock. Otherwise a work folder that another process has just created, and not yet
        locked, could be among them.
        """
        return [path for path in sorted(self.path.glob(f"work_{key}_*")) if not is_in_use(path)]

    def leftovers(self) -> list[Path]:
        """Return the folders of damaged entries and the work folders that killed processes left, for all keys.

        Without the keys' locks, a work folder that was just created may be among them, see `abandoned`.
        """
        return [path for key in self.all_keys() for path in (*self.set_aside(key), *self.abandoned(key))]

    def last_used(self, key: str) -> float:
        """Return the time at which an engine last found or built the entry, in seconds since the epoch."""
        try:
            return self._lock(key).stat().st_mtime
        except FileNotFoundError:
            return self.entry(key).lstat().st_mtime

    def mark_used(self, key: str) -> None:
        try:
            os.utime(self._lock(key))
        except OSError as error:
            log.debug("compile cache %s: the use of %s is not recorded (%s)", self.path, key, str(error))

    @contextmanager
    def locked(self, key: str, *, wait: bool = True, notice_after_s: float = 5.0) -> Iterator[None]:
        """Hold the lock of a key within a block. The key need not have an entry.

        The lock is also released when the process ends. If another process holds the lock, waits for it, and logs this
        after `notice_after_s` seconds; with `wait` False, raises BlockingIOError instead.
        """
        path, entry = self._lock(key), self.entry(key)
        noticed_at = time.monotonic() + notice_after_s
        while True:
            is_new = not path.exists()
            handle = _open_lock(path)
            try:
                while not _try_lock(handle):
                    if not wait:
                        raise BlockingIOError(errno.EAGAIN, "another process uses it", str(path))
                    if time.monotonic() > noticed_at:
                        noticed_at = float("inf")
                        log.warning("waiting for another process that compiles the same model (it holds %s)", path)
                    time.sleep(_POLL_S)
                if _is_same_file(handle, path):  # and was not removed while we waited
                    if is_new and entry.exists():  # to take the lock is no use, see last_used
                        os.utime(handle, (time.time(), entry.stat().st_mtime))
                    yield
                    return
            finally:
                os.close(handle)

    def work_folder(self, key: str) -> WorkFolder:
        return WorkFolder(self.path, f"work_{key}_")

    def store(self, key: str, source: Path, factors: dict[str, Any]) -> None:
        """Copy the build in the folder `source` to the entry of `key`, completely or not at all.

        The caller must hold the key's lock.
        """
        work = self.work_folder(key)
        try:
            write_entry(source, work.path / key, factors)
            os.rename(work.path / key, self.entry(key))
        finally:
            work.close()

    def move_aside(self, key: str) -> Path:
        """Move an entry into a new folder damaged_*, for inspection, and return that folder.

        The caller must hold the key's lock.
        """
        aside = Path(tempfile.mkdtemp(prefix=f"damaged_{key}_", dir=self.path))
        os.rename(self.entry(key), aside / key)
        return aside

    def remove_abandoned(self, key: str) -> None:
        """Delete the work folders that killed processes left for this key. The caller must hold the key's lock."""
        for path in self.abandoned(key):
            shutil.rmtree(path, ignore_errors=True)

    def remove_set_aside(self, key: str) -> None:
        """Delete the damaged entries of this key that were moved aside. The caller must hold the key's lock."""
        for path in self.set_aside(key):
            shutil.rmtree(path, ignore_errors=True)

    def remove(self, key: str) -> None:
        """Delete all files of a key: entry, damaged entries, abandoned work folders, predicted memory, lock file.

        The caller must hold the key's lock. Engines that run with the entry are not affected, since they use copies.
        """
        if os.path.lexists(self.entry(key)):
            self.move_aside(key)  # so that a kill half-way leaves no partial entry
        self.remove_set_aside(key)
        self.remove_abandoned(key)
        for path in self.path.glob(f"{key}_*"):
            path.unlink(missing_ok=True)
        self._lock(key).unlink(missing_ok=True)

    def _lock(self, key: str) -> Path:
        return self.path / f"{key}.lock"


def open_cache(root: Path, uid: int | None = None) -> CacheFolder:
    """Return the cache in the subfolder ENTRIES of `root`; create the subfolder if it does not exist.

    uid: the user who must own the subfolder; None: this process's user. Raises OSError with the reason if the subfolder
    cannot be created, or if other users could change it.
    """
    uid = os.geteuid() if uid is None else uid
    return CacheFolder(private_folder(root, ENTRIES, uid), uid)


def _key_in(name: str) -> str:
    """Return the key that is part of the name of a file or folder in the cache; "" for a name without one."""
    found = re.fullmatch(rf"(?:work_|damaged_)?({_KEY.pattern})(?:\.lock|_.*)?", name)
    return found[1] if found else ""


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS or not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False
