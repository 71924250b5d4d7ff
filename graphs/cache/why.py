"""Why what is looked for is not in the compile cache, in a few words for metrics."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from compiled_engine.graphs.cache.diff import differences
from compiled_engine.graphs.cache.entry import DamagedEntry, read_factors
from compiled_engine.graphs.cache.folder import CacheFolder

FOUND = "found"
SWITCHED_OFF = "switched off"
DAMAGED = "the entry was damaged"
UNUSABLE = "the folder cannot be used"
NOT_KEPT = "it could not be kept"
_SHOWN = 3


def why_absent(cache: CacheFolder, factors: dict[str, Any]) -> str:
    """Names of a few factors in which the most similar entry differs."""
    found = []
    for key in cache.entry_keys():
        with suppress(DamagedEntry):
            found.append([each.factor for each in differences(factors, read_factors(cache.entry(key)))])
    if not found:
        return "the cache is empty"
    names = min(found, key=len)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"no entry of the same {', '.join(names[:_SHOWN])}{more}"
