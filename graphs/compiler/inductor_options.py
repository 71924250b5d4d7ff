"""The options that every piece is compiled with."""

from __future__ import annotations

from typing import Any

# On a CPU the number of threads is chosen for each step (runner/cpu_threads.py), not when a piece is compiled.
INDUCTOR_OPTIONS: dict[str, Any] = {"cpp.dynamic_threads": True}
