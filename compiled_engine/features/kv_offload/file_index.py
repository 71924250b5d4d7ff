"""Tracks which KV cache blocks have files, and decides which files are removed to make room for others.

Snapshots of recurrent states have files too, named by the hash of the block that ends there and a suffix. A snapshot is
larger than a block, so it counts as several.

Each model has a folder whose name is a digest of all that keys and values depend on, see resolve/host_blocks.py. In
it, each replica has a numbered folder, which it locks while it runs, with a folder for each rank. The replicas of a
later start take the same folders again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from compiled_engine.features.kv_offload.block_files import PARTIAL

LOCK = "lock"
STATE_SUFFIX = "-state"  # of the names of snapshots


class FileIndex:
    """The names of blocks that have files, at most `limit`; beyond that, the least recently used ones are removed.

    folder: the model's folder, in a subfolder of the user's. most_bytes: limit on the files of all models; when the
    index is made, files of models that are not running are removed to meet the limit. state_weight: number of blocks
    that a snapshot counts as.
    """

    def __init__(self, folder: Path, limit: int, num_ranks: int, most_bytes: int, *, state_weight: int = 1) -> None:
        self._limit, self._state_weight = limit, state_weight
        descriptor, self.folder = _lock_folder(folder)
        self.close = weakref.finalize(self, os.close, descriptor)  # lets another replica have the folder
        found = [_files_of(self.folder / str(rank)) for rank in range(num_ranks)]
        # Each rank has a part of a block, so a block without one of them is useless.
        known = set.intersection(*({*each} for each in found))
        self._names = OrderedDict.fromkeys(sorted(known, key=lambda name: found[0][name][0]))
        self._weight = sum(map(self._weight_of, self._names))  # in blocks
        surplus = {*self._remove_surplus()}
        for files in found:
            for name, (_, path) in files.items():
                if name not in known or name in surplus:
                    path.unlink(missing_ok=True)
        _remove_others(folder, most_bytes)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def use(self, name: str) -> None:
        """Make a block the most recently used one."""
        self._names.move_to_end(name)

    def add(self, name: str) -> list[str]:
        """Add a block that gets files. Return the names of the blocks whose files must be removed for it."""
        self._names[name] = None
        self._weight += self._weight_of(name)
        return self._remove_surplus()

    def drop(self, name: str) -> None:
        """Forget a block that has no files, if the index has it."""
        if name in self._names:
            del self._names[name]
            self._weight -= self._weight_of(name)

    def _remove_surplus(self) -> list[str]:
        removed = []
        while self._weight > self._limit:
            name, _ = self._names.popitem(last=False)
            self._weight -= self._weight_of(name)
            removed.append(name)
        return removed

    def _weight_of(self, name: str) -> int:
        return self._state_weight if name.endswith(STATE_SUFFIX) else 1


def _lock_folder(folder: Path) -> tuple[int, Path]:
    """Lock the first numbered folder within `folder` that no replica has locked; create it if it is missing.

    Returns (descriptor that holds the lock, locked folder). Raises ValueError if the folder cannot be used.
    """
    number = 0
    while True:
        own = folder / str(number)
        try:
            own.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = _lock(own)
        except OSError as error:
            raise ValueError(
                f"kv_offloading_folder is {str(folder.parents[1])!r}, which cannot be used: {error}; "
                "allowed: a folder to write to"
            ) from error
        if descriptor is not None:
            return descriptor, own
        number += 1


def _lock(folder: Path) -> int | None:
    """Lock a folder and return the lock's descriptor; None if another process has locked it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _files_of(folder: Path) -> dict[str, tuple[float, Path]]:
    """Return (time of the last use, path) of each file in a rank's folder, by block name. Removes partial files."""
    found = {}
    for path in folder.glob("*/*"):
        if path.name.endswith(PARTIAL):
            path.unlink(missing_ok=True)
        else:
            found[path.name] = path.stat().st_mtime, path
    return found


def _remove_others(folder: Path, most_bytes: int) -> None:
    """Remove folders of other models, the longest unused first, until all models' files have at most `most_bytes`."""
    found = {each: _size_and_last_use(each) for each in folder.parent.iterdir() if each.is_dir()}
    surplus = sum(size for size, _ in found.values()) - most_bytes
    for other in sorted(found.keys() - {folder}, key=lambda each: found[each][1]):
        if surplus > 0 and _remove_unlocked(other):
            surplus -= found[other][0]


def _size_and_last_use(folder: Path) -> tuple[int, float]:
    """Return the bytes of a folder's files, and the time of the last change or use of any. Files may come and go."""
    size, last = 0, 0.0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            stat = path.stat()
            size, last = size + stat.st_size * path.is_file(), max(last, stat.st_mtime)
    return size, last


def _remove_unlocked(folder: Path) -> bool:
    """Remove a model's folder unless a process has locked a part of it. Returns whether it was removed."""
    locks = [_lock(each.parent) for each in folder.glob(f"*/{LOCK}")]
    is_free = bool(locks) and None not in locks  # without a lock it is no folder of blocks
    if is_free:
        shutil.rmtree(folder, ignore_errors=True)
    for descriptor in locks:
        if descriptor is not None:
            os.close(descriptor)
    return is_free
