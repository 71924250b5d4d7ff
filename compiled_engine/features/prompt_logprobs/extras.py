"""Defines the data of prompt log-probabilities in the `extras` of messages between the frontend and the engine core.

A row has the log-probabilities at a position p of the prompt: that of prompt token p given the tokens before it, and
those of the most likely tokens. So positions start at 1. A step's result and an EngineOutput have the position of the
first row, and the rows. An EngineRequest that continues in another replica has the first position whose row has not
been delivered.
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
    """Return EngineRequest.extras for a request that continues, of which the rows before `position` were delivered.

    A row has the log-probabilities of a position of the prompt.
    """
    return request.extras if position == FIRST else request.extras | {NAME: position}


def next_position(request: EngineRequest) -> int:
    """Return the first position of the prompt whose row of log-probabilities has not been delivered."""
    return request.extras.get(NAME, FIRST)


def rows_in(extras: dict[str, Any]) -> tuple[int, LogprobRows] | None:
    """Return the position of the first row of log-probabilities, and the rows; None if an output's extras have none."""
    found = extras.get(NAME)
    return None if found is None else as_rows(found)


def as_rows(found: Any) -> tuple[int, LogprobRows]:
    """Return the position of the first row of log-probabilities, and the rows, decoded if another process sent them."""
    return msgspec.convert(found, tuple[int, LogprobRows])
