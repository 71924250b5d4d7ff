"""Defines the data of prompt log-probabilities in the `extras` of messages between the frontend and the engine core.

In an EngineRequest that continues in another replica: the first position that has not been delivered. In a step's
result and an EngineOutput: the position of the first row, and the rows. The row of position p has the log-probability
of prompt token p given the tokens before it, so positions start at 1.
"""

from __future__ import annotations

from typing import Any

import msgspec

from compiled_engine.engine.messages import EngineRequest
from compiled_engine.sampling.sampled_tokens import LogprobRows

NAME = "prompt_logprobs"
# Most log-probabilities of a prompt per step: all of them are in host memory at once, 8 bytes each.
MOST_PROMPT_LOGPROBS = 1 << 24
FIRST = 1
"""Position of a prompt's first row."""


def resumed(request: EngineRequest, position: int) -> dict[str, Any]:
    """Return the extras with which a request continues after the rows before `position` have been delivered."""
    return request.extras if position == FIRST else request.extras | {NAME: position}


def next_position(request: EngineRequest) -> int:
    """Return the first position whose row has not been delivered."""
    return request.extras.get(NAME, FIRST)


def rows_in(extras: dict[str, Any]) -> tuple[int, LogprobRows] | None:
    """Return the position of the first row and the rows, read from the extras of an output; None if it has no rows."""
    found = extras.get(NAME)
    return None if found is None else as_rows(found)


def as_rows(found: Any) -> tuple[int, LogprobRows]:
    """Return the position of the first row of log-probabilities, and the rows, decoded if another process sent them."""
    return msgspec.convert(found, tuple[int, LogprobRows])
