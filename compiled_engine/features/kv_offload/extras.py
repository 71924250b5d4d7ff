"""The data of KV offload that steps and control calls carry from planning to the ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

NAME = "kv_offload"

# Control calls, methods of StepHostBlocks.
SAVE, LOAD, ARRIVED, OPEN_FILES, COPY_SECONDS = "save", "load", "arrived", "open_files", "copy_seconds"

# Kinds of rows: blocks of the KV cache, and snapshots of recurrent states.
BLOCKS, STATES = "blocks", "states"


class Copies(NamedTuple):
    """Copies between slots of host memory and rows on the device, of one kind (BLOCKS or STATES)."""

    slots: list[int]
    rows: list[int]  # one for each slot
    files: list[tuple[int, str]]  # slots that files are written from, or read into, and the files' names


class Arrived(NamedTuple):
    """The loads and the writes of files that a rank has finished since the last call of `arrived`."""

    loads: list[tuple[int, list[str]]]  # number of a load, and names of files that could not be read
    written: list[tuple[str, bool]]  # name of a file, and whether it is there


def copies_before(extras: dict[str, Any]) -> int | None:
    """Return the number of the save after which a step must run, because the step reuses rows that the save copies.

    Returns None if there is no such save. extras: those of the step's SchedulerOutput.
    """
    return extras.get(NAME)
