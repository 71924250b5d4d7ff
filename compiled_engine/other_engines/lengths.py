"""Reads numbers of tokens with units such as "4k", as vLLM's command line accepts them."""

from __future__ import annotations

import re
from typing import Any

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def read_length(value: Any) -> Any:
    """Return text with a unit as a number: "4k" is 4,000, "4K" 4,096, "1.5k" 1,500. Return other values unchanged."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", value) if isinstance(value, str) else None
    if match is None or ("." in match[1] and match[2].isupper()):
        return value
    return int(float(match[1]) * UNITS[match[2]])
