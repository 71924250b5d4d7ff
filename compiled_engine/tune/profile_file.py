"""A device's profile as a file: what was measured joins what there is of other shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

LISTS = ("linears", "hopper_linears", "hopper_products")


def profile_text(profile: Mapping[str, Any]) -> str:
    """As JSON with a line for each linear."""
    head = json.dumps({name: profile[name] for name in ("device", "noise_us", "gains_us")})
    lines = {name: ",\n  ".join(map(json.dumps, profile.get(name, ()))) for name in LISTS}
    return head[:-1] + "".join(f',\n "{name}": [\n  {rows}\n]' for name, rows in lines.items()) + "}\n"


def merged(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The new profile, and of an old one of the same device the linears of other shapes. A pass gains the least of
    both: what it gains is of every shape."""
    measured = {_shape(row) for name in LISTS for row in new.get(name, ())}
    lists = {
        name: [*(row for row in old.get(name, ()) if _shape(row) not in measured), *new.get(name, ())] for name in LISTS
    }
    gains = {name: dict(by_tokens) for name, by_tokens in old["gains_us"].items()}
    for name, by_tokens in new["gains_us"].items():
        for tokens, gain in by_tokens.items():
            known = gains.setdefault(name, {})
            known[str(tokens)] = min(gain, known.get(str(tokens), gain))
    return {**new, "gains_us": gains, **lists}


def _shape(row: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Of a linear's weight; a run measures it for all numbers of tokens."""
    return row["num_rows"], row["k"], row["silu_mul"]
