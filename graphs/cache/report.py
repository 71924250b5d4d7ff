"""Reports on the compile cache: the size, age and state of each entry, and the entry most similar to given factors."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_engine.graphs.cache.diff import Difference, differences
from compiled_engine.graphs.cache.entry import DamagedEntry, factors_key, read_entry, read_factors
from compiled_engine.graphs.cache.folder import ENTRIES, CacheFolder, open_cache

# Passes for several ranks only; a copy of their names, as importing passes would import PyTorch.
PASSES_OF_RANKS = frozenset({"all_reduce_residual_rms_norm", "sequence_parallel"})


def short(key: str) -> str:
    """Return the first 12 digits of a cache entry's key, for display."""
    return key[:12]


@dataclass(frozen=True)
class EntryReport:
    """The state of an entry of the compile cache. Times are in seconds since the epoch."""

    key: str
    path: Path
    factors: dict[str, Any]  # empty unless they match the key
    passes_off: list[str]  # disabled passes
    size_bytes: int
    created: float
    last_used: float
    damage: str | None  # why the entry must not be used; None if it may


@dataclass(frozen=True)
class Nearest:
    """The entry whose factors differ least from given factors, and these differences."""

    entry: EntryReport
    differences: list[Difference]


def existing_cache(root: Path) -> CacheFolder | None:
    """Return the cache in the folder `root`; None if there is none. Raises OSError as `open_cache` does."""
    return open_cache(root) if os.path.lexists(root / ENTRIES) else None


def report(cache: CacheFolder, key: str) -> EntryReport:
    """Return the state of an entry. To find damage, its files are compared with their digests."""
    entry = cache.entry(key)
    factors: dict[str, Any] = {}
    damage = None
    try:
        stored = read_factors(entry)
        if factors_key(stored) != key:
            raise DamagedEntry("its factors are not those of its key")
        factors = stored
        for _ in read_entry(entry, cache.uid):
            pass
    except DamagedEntry as error:
        damage = str(error)
    created = entry.lstat().st_mtime
    size, off = folder_bytes(entry), _passes_off(entry, factors)
    return EntryReport(key, entry, factors, off, size, created, cache.last_used(key), damage)


def reports(cache: CacheFolder) -> list[EntryReport]:
    """Return the states of all entries. An entry that another process removes meanwhile is left out."""
    found = []
    for key in cache.entry_keys():
        with suppress(FileNotFoundError):
            found.append(report(cache, key))
    return found


def find_key(keys: Sequence[str], wanted: str) -> str:
    """Return the key that begins with `wanted`. Raises ValueError if no key or more than one does."""
    found = [key for key in keys if key.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(key[: len(wanted) + 4] for key in found)
        raise ValueError(f"KEY is {wanted!r}, but {len(found)} entries begin with it: {shown}")
    if not keys:
        raise ValueError(f"KEY is {wanted!r}, but the cache has no entries")
    length = max(len(wanted), 4)
    near = difflib.get_close_matches(wanted, [key[:length] for key in keys], n=3, cutoff=0)
    near_keys = [short(key) for start in near for key in keys if key.startswith(start)]
    raise ValueError(f"KEY is {wanted!r}, but no entry begins with it; the nearest: {', '.join(near_keys)}")


def nearest(entries: Sequence[EntryReport], factors: dict[str, Any]) -> Nearest | None:
    """Return the entry with the fewest factors that differ from `factors`; among equals, the most recently used.

    All changes of source code and passes count as one factor. Entries whose factors cannot be read, or do not match
    their key, are ignored. Returns None if no entry is left.
    """
    candidates = [Nearest(entry, differences(factors, entry.factors)) for entry in entries if entry.factors]
    return min(candidates, key=lambda found: (_distance(found.differences), -found.entry.last_used), default=None)


def _passes_off(entry: Path, factors: dict[str, Any]) -> list[str]:
    """Return the names of the passes that were disabled when the entry was built.

    Passes for several ranks are left out if the entry was built for one rank.
    """
    alone = factors.get("config", {}).get("parallel.tensor_parallel_size", 1) == 1
    unused = PASSES_OF_RANKS if alone else frozenset()
    for path in filter(Path.is_file, entry.rglob("passes.json")):
        try:
            off = [each["name"] for each in json.loads(path.read_bytes()) if not each["enabled"]]
            return [name for name in off if name not in unused]
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return []


def _distance(found: Sequence[Difference]) -> int:
    """Return the number of differing factors. All changes of source code and passes together count as one."""
    is_code = [difference.factor.startswith(("source.", "passes.")) for difference in found]
    return is_code.count(False) + any(is_code)


def folder_bytes(folder: Path) -> int:
    """Return the total size of all files below a folder, in bytes, without following links. Files may be removed."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size
