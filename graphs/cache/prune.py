"""Prunes the compile cache: deletes entries by the time of their last use, or until the cache is small enough.

Damaged entries, and work folders that killed processes left, are deleted in any case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compiled_engine.graphs.cache.folder import CacheFolder
from compiled_engine.graphs.cache.report import EntryReport, folder_bytes, reports


@dataclass(frozen=True)
class Pruned:
    """An entry or folder that `prune` deleted, or would delete without `dry_run`, and the reason."""

    key: str
    path: Path
    reason: str
    size_bytes: int
    removed: bool = True  # False: another process is looking the entry up or building it


def prune(
    cache: CacheFolder,
    *,
    now: float,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    dry_run: bool = False,
) -> list[Pruned]:
    """Delete old entries, and others until the cache is small enough. Return the entries and folders deleted.

    older_than_s: entries last used before `now - older_than_s` are deleted. max_bytes: then the least recently used
    entries are deleted until all others together have at most this size. None: no limit. now: in seconds since the
    epoch. dry_run: delete nothing, and return what would be deleted. Damaged entries and leftover work folders are
    deleted, too. Keys whose lock another process holds are skipped; their entries are returned with `removed` False if
    they should be deleted. Engines that run with an entry are not affected, since they use a copy.
    """
    doomed = dict(_doomed(reports(cache), now, older_than_s, max_bytes))
    done = []
    for key in cache.all_keys():
        try:
            with cache.locked(key, wait=False):
                is_entry = os.path.lexists(cache.entry(key))
                if key in doomed:
                    done.append(_pruned(key, cache.entry(key), doomed[key]))
                done += [_pruned(key, path, "set aside as damaged") for path in cache.set_aside(key)]
                done += [_pruned(key, path, "left by a killed process") for path in cache.abandoned(key)]
                if dry_run:
                    continue
                if key in doomed or not is_entry:
                    cache.remove(key)
                else:
                    cache.remove_set_aside(key)
                    cache.remove_abandoned(key)
        except BlockingIOError:
            if key in doomed:
                done.append(Pruned(key, cache.entry(key), doomed[key], 0, removed=False))
    return done


def _doomed(
    entries: list[EntryReport], now: float, older_than_s: float | None, max_bytes: int | None
) -> Iterator[tuple[str, str]]:
    kept = []
    for entry in sorted(entries, key=lambda entry: entry.last_used):
        if entry.damage is not None:
            yield entry.key, f"damaged: {entry.damage}"
        elif older_than_s is not None and entry.last_used < now - older_than_s:
            yield entry.key, "not used for so long"
        else:
            kept.append(entry)
    total = sum(entry.size_bytes for entry in kept)
    for entry in kept:
        if max_bytes is None or total <= max_bytes:
            return
        total -= entry.size_bytes
        yield entry.key, "the longest unused, to come down to the size"


def _pruned(key: str, path: Path, reason: str) -> Pruned:
    return Pruned(key, path, reason, folder_bytes(path))
