"""The copies of a step between the KV cache and host memory, in the extras of SchedulerOutput. The plan writes them."""

from __future__ import annotations

from typing import Any

import msgspec

NAME = "kv_offload"


class Copies(msgspec.Struct, frozen=True, array_like=True):
    """The copies that precede a step: all saves are made before any load."""

    saves: dict[int, int]  # slot of the host -> block of the KV cache
    loads: dict[int, int]  # block -> slot


def copies_in(extras: dict[str, Any]) -> Copies | None:
    """Return the copies of a step, if it has any."""
    given = extras.get(NAME)
    return given if given is None or isinstance(given, Copies) else msgspec.convert(given, Copies)
