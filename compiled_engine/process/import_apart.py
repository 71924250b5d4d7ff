"""Imports of torch and its compiler, whose modules keep the frames of whoever imports them first.

These frames would keep what is under construction there, an engine with its KV cache, until the garbage collector runs.
"""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def import_apart(name: str) -> Any:
    """The module, imported by a thread of its own. Raises what the import raises."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(importlib.import_module, name).result()
