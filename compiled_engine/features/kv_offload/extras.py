"""The data of KV offload that steps and control calls carry from planning to the ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

NAME = "kv_offload"

# Control calls, methods of StepHostBlocks.
SAVE, LOAD, ARRIVED, OPEN_FILES = "save", "load", "arrived", "open_files"


class Arrived(NamedTuple):
    """The loads and the writes of files that a rank has finished since the last call of `arrived`."""

    loads: list[tuple[int, list[int]]]  # number of a load, and slots whose files could not be read
    written: list[tuple[str, bool]]  # name of a block's file, and whether it is there


def copies_before(extras: dict[str, Any]) -> int | None:
    """Return the number of the save that a step follows, since it reuses a block of it; None if it reuses none."""
    return extras.get(NAME)
