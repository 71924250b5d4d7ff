"""The data of KV offload that steps and control calls carry from planning to the ranks."""

from __future__ import annotations

from typing import Any

NAME = "kv_offload"

# Control calls, methods of StepHostBlocks.
SAVE, LOAD, ARRIVED, OPEN = "save", "load", "arrived", "open_files"


def copies_before(extras: dict[str, Any]) -> int | None:
    """Return the number of the save that a step follows, since it reuses a block of it; None if it reuses none."""
    return extras.get(NAME)
