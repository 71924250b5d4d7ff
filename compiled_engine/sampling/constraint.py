"""What decides token by token what a request may generate: a grammar, or a user's token mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Constraint(Protocol):
    """The state of one request: the tokens that it has been told of.

    It outlives a preemption, and no token is ever taken back. Called on the host while the step that computes the
    logits runs on the device.
    """

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take in the next output tokens. Raises ValueError, saying what is wrong: the request ends with it."""
        ...

    def fill(self, words_W: np.ndarray) -> None:
        """Write the mask for the next token: int32 [ceil(vocabulary / 32)], as TokenMask has it.

        Raises ValueError as `accept` does.
        """
        ...
