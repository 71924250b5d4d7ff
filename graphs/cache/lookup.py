"""Looks up a compiled model in the compile cache by its factors, or builds it and stores it there.

All files of an entry are checked before it is used. A damaged entry is reported, set aside and rebuilt. If the cache
folder cannot be used, the model is compiled into a temporary folder and not stored.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_engine.graphs.cache.diff import DAMAGED, FOUND, NOT_KEPT, SWITCHED_OFF, UNUSABLE, why_absent
from compiled_engine.graphs.cache.entry import DamagedEntry, copy_entry, factors_key
from compiled_engine.graphs.cache.folder import CacheFolder, open_cache
from compiled_engine.graphs.cache.work_folder import WorkFolder

log = logging.getLogger("compiled_engine")  # log texts only: a record with an exception would keep folders alive

# With less free space, compile in the temporary folder; the entry itself may still fit.
_ENOUGH_BYTES = 256 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Lookup:
    """The result of a lookup: a compiled model that was found or built, and has been loaded."""

    folder: Path  # the entry; if off, the temporary folder
    key: str
    status: str  # hit, miss (built now and kept) or off (built now, not kept)
    loaded: Any  # result of `load` on the files in `work`
    work: WorkFolder  # lives as long as this object
    why: str = FOUND  # the reason, in a few words


def find_or_build(
    root: Path | None,
    factors: dict[str, Any],
    build: Callable[[Path], None],
    load: Callable[[Path], Any] = lambda folder: None,
    *,
    uid: int | None = None,
    notice_after_s: float = 5.0,
) -> Lookup:
    """Find the compiled model for `factors` in the cache, or build it and store it; then load and return it.

    build, load: called with a folder that only this process uses, and may write to later. `build` puts files there,
        `load` reads them. An entry that `load` fails on counts as damaged.
    root: the folder that contains the cache; None: build without a cache.
    uid: the user who must own the cache; None: this process's user.

    If another process is building the same entry, waits for it, and logs this after `notice_after_s` seconds. Raises
    what `build` raises, and what `load` raises on a new build.
    """
    try:
        return _look_up(root, factors, build, load, uid, notice_after_s, None)
    except DamagedEntry as damage:
        return _look_up(root, factors, build, load, uid, notice_after_s, damage)


def _look_up(
    root: Path | None,
    factors: dict[str, Any],
    build: Callable[[Path], None],
    load: Callable[[Path], Any],
    uid: int | None,
    notice_after_s: float,
    distrust: DamagedEntry | None,
) -> Lookup:
    """Do the work of `find_or_build`, but raise DamagedEntry for an intact entry that cannot be loaded.

    distrust: the error of an earlier attempt to load the entry, which is then treated as damaged; None: first attempt.
    """
    key = factors_key(factors)
    cache, why = None, SWITCHED_OFF
    with ExitStack() as held:
        if root is not None:
            try:
                cache = open_cache(root, uid)
                held.enter_context(cache.locked(key, notice_after_s=notice_after_s))
                was_there = os.path.lexists(cache.entry(key))
                work = _copy_of_entry(cache, key, factors, distrust)
                if work is not None:
                    held.close()
                    return Lookup(cache.entry(key), key, "hit", _load_copy(work, load), work)
                why = DAMAGED if was_there else why_absent(cache, factors)
            except OSError as error:
                log.warning("compile cache %s cannot be used (%s); compiling without one", root, str(error))
                cache, why = None, UNUSABLE
        work = _build(build, cache, key)
        loaded = load(work.path)
        if cache is not None and _keep(cache, key, work, factors):
            return Lookup(cache.entry(key), key, "miss", loaded, work, why)
        return Lookup(work.path, key, "off", loaded, work, why if cache is None else NOT_KEPT)


def _copy_of_entry(
    cache: CacheFolder, key: str, factors: dict[str, Any], distrust: DamagedEntry | None
) -> WorkFolder | None:
    """Return a work folder with a copy of the entry. Returns None if there is no entry or if it is damaged.

    A damaged entry is moved aside. distrust: see `_look_up`; if given, an intact entry is moved aside too.
    """
    entry = cache.entry(key)
    cache.remove_abandoned(key)
    if not os.path.lexists(entry):
        return None
    work = _work_folder(cache, key)
    try:
        if distrust is not None:
            raise distrust
        copy_entry(entry, work.path, factors, cache.uid)
    except DamagedEntry as damage:
        work.close()
        cache.remove_set_aside(key)
        aside = cache.move_aside(key)
        log.warning(
            "compile cache entry %s is damaged (%s); set aside as %s, building it again", entry, str(damage), aside
        )
        return None
    cache.mark_used(key)
    return work


def _load_copy(work: WorkFolder, load: Callable[[Path], Any]) -> Any:
    try:
        return load(work.path)
    except Exception as error:
        raise DamagedEntry(f"it cannot be loaded: {error}") from error


def _build(build: Callable[[Path], None], cache: CacheFolder | None, key: str) -> WorkFolder:
    """Call `build` with a new work folder and return the folder.

    If this fails because the cache's disk is full, build once more in the system's temporary folder.
    """
    work = _work_folder(cache, key)
    try:
        build(work.path)
        return work
    except Exception as error:
        work.close()
        if cache is None or not work.path.is_relative_to(cache.path) or not _is_no_space(error):
            raise
        log.warning("there is no space to compile in %s; compiling in %s", cache.path, tempfile.gettempdir())
    return _build(build, None, key)


def _keep(cache: CacheFolder, key: str, work: WorkFolder, factors: dict[str, Any]) -> bool:
    try:
        cache.store(key, work.path, factors)
    except OSError as error:
        log.warning("compile cache %s cannot keep what was compiled (%s)", cache.path, str(error))
        return False
    cache.mark_used(key)
    return True


def _work_folder(cache: CacheFolder | None, key: str) -> WorkFolder:
    """Return a new work folder in the cache, or in the system's temporary folder.

    The temporary folder is used without a cache, and if the cache is read-only or has less than _ENOUGH_BYTES free.
    """
    if cache is not None:
        try:
            if shutil.disk_usage(cache.path).free >= _ENOUGH_BYTES:
                return cache.work_folder(key)
        except OSError as error:
            log.debug("working in %s, not in %s (%s)", tempfile.gettempdir(), cache.path, str(error))
    return WorkFolder(None, "compiled_engine_")


def _is_no_space(error: BaseException) -> bool:
    """Return whether the error, or an exception that caused it, says that the disk is full."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _NO_SPACE)
        or any(os.strerror(number) in str(cause) for number in _NO_SPACE)
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
