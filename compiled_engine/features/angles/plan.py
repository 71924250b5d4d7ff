"""Plans requests whose rotary angles depend on their length: which share blocks, and which are computed again.

Up to a border, a number of tokens, the angles of all requests are equal. Beyond it there are two kinds of angles, see
LengthAngles. LongRoPE has a second set of frequencies for longer requests: a request that grows over the border is
computed again with that set, and so is a preempted request. Dynamic NTK scales the frequencies of each token by the
length that the request had when the token was first computed: the length of the prompt, or for an output token its own
position. So nothing is computed again, and a preempted request gets the same angles.

A request's prefix root says which angles its keys have, so blocks are only shared between equal angles.
"""

from __future__ import annotations

import hashlib
import sys

from compiled_engine.config import LengthAngles
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request


class AnglesByLength(PlanFeature):
    """Keeps the keys of requests with different angles apart, and has requests that outgrow their angles recomputed."""

    def __init__(self, angles: LengthAngles) -> None:
        self._border, self._recomputes = angles.border, angles.recomputes

    def added(self, request: Request) -> None:
        if self._recomputes:
            request.outgrown_at = min(request.outgrown_at, self._border)
        elif request.num_prompt_tokens > self._border:
            _set_root(request, request.num_prompt_tokens)

    def outgrown(self, request: Request) -> None:
        """Give the request the angles that all requests of more than `border` tokens have (LongRoPE)."""
        request.outgrown_at = sys.maxsize
        _set_root(request, self._border + 1)


def _set_root(request: Request, length: int) -> None:
    """Change the root of the request's block hashes, so that only requests with the same angles share blocks.

    length: the length in tokens that determines the angles.
    """
    request.prefix_root = hashlib.sha256(request.prefix_root + b"angles %d" % length).digest()
    request.block_hashes.clear()
