"""Describes how two entries of the compile cache differ, and why the cache has no entry for a model.

An entry's factors are the values that its content depends on; its key is their digest (key.py, environment.py).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from compiled_engine.graphs.cache.entry import DamagedEntry, read_factors
from compiled_engine.graphs.cache.folder import CacheFolder


@dataclass(frozen=True)
class Difference:
    """A factor, by dotted name, that has different values in two sets of factors.

    ours, theirs: its value in each set; None if the set lacks the factor.
    """

    factor: str
    ours: Any
    theirs: Any

    def in_words(self, here: str, there: str) -> str:
        """Return the difference as text, such as `scheduler.max_num_batched_tokens: 2048 here, 8192 in entry ab12`.

        here, there: the phrases that follow the values `ours` and `theirs`, such as `here` and `in entry ab12`.
        """
        section, _, name = self.factor.partition(".")
        if section == "source":
            return f"source code: compiled_engine/{name} {self._changed(here, there)}"
        if section == "passes":
            return f"pass {name} {self._changed(here, there)}"
        label = name if section in ("config", "settings") else self.factor
        words = f"{_shown(self.ours)} {here}, {_shown(self.theirs)} {there}"
        if isinstance(self.ours, list) and isinstance(self.theirs, list):
            words = self._lists_in_words(here, there) or words
        return f"{label}: {words}"

    def _changed(self, here: str, there: str) -> str:
        if self.ours is None or self.theirs is None:
            return f"is only {here if self.theirs is None else there}"
        return "was changed"

    def _lists_in_words(self, here: str, there: str) -> str:
        """Return text that names the items which only `ours` or only `theirs` has; "" if both have the same items.

        Both values of the factor must be lists.
        """
        sides = ((here, self.ours, self.theirs), (there, self.theirs, self.ours))
        only = [(where, [str(item) for item in mine if item not in other]) for where, mine, other in sides]
        return "; ".join(f"{', '.join(items)} only {where}" for where, items in only if items)


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[Difference]:
    """Return the differences between two sets of factors, sorted by the factors' dotted names."""
    flat_ours, flat_theirs = flatten(ours), flatten(theirs)
    return [
        Difference(name, flat_ours.get(name), flat_theirs.get(name))
        for name in sorted(flat_ours.keys() | flat_theirs.keys())
        if flat_ours.get(name) != flat_theirs.get(name) and not _is_said_by_the_list(name, flat_ours, flat_theirs)
    ]


def _is_said_by_the_list(name: str, *flat: dict[str, Any]) -> bool:
    """Return whether the factor `name` is the digest of a pass that is missing in one of the `flat` sets of factors.

    Such a difference is not reported, since a factor of the config differs too: the list of passes or the number of
    ranks.
    """
    return name.startswith("passes.") and any(name not in one for one in flat)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted names: {"a": {"b": 1}} becomes {"a.b": 1}.

    prefix: put before each name.
    """
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{prefix}{key}.")
    return flat


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return repr(value) if isinstance(value, str) else str(value)


# Why an entry is not in the compile cache, in a few words for metrics.

FOUND = "found"
SWITCHED_OFF = "switched off"
DAMAGED = "the entry was damaged"
UNUSABLE = "the folder cannot be used"
NOT_KEPT = "it could not be kept"
_SHOWN = 3


def why_absent(cache: CacheFolder, factors: dict[str, Any]) -> str:
    """Return why the cache has no entry for these factors, as text.

    The text names up to three factors in which the most similar entry differs, or says that the cache is empty. Entries
    whose factors cannot be read are ignored.
    """
    found = []
    for key in cache.entry_keys():
        with suppress(DamagedEntry):
            found.append([each.factor for each in differences(factors, read_factors(cache.entry(key)))])
    if not found:
        return "the cache is empty"
    names = min(found, key=len)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"no entry of the same {', '.join(names[:_SHOWN])}{more}"
