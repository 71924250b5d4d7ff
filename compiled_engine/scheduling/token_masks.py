"""The masks of a step, made while it runs: its requests' constraints are told of their newest tokens and asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compiled_engine.grammars.fill import fill_masks
from compiled_engine.messages import TokenMasks
from compiled_engine.sampling.constraint import Constraint
from compiled_engine.sampling.token_mask import num_words
from compiled_engine.scheduling.request import Request, RequestStatus


class MaskMaker:
    """Owns the array that masks are written to, a row for each request that may run, once there is a constraint."""

    def __init__(self, max_num_requests: int, vocab_size: int) -> None:
        self._shape = (max_num_requests, num_words(vocab_size))
        self._words_NW: np.ndarray | None = None

    def make(self, requests: Sequence[Request]) -> TokenMasks:
        """For those that have not ended; all their tokens are known. Valid until the next call.

        A request whose constraint fails gets a `failure`.
        """
        if self._words_NW is None:
            self._words_NW = np.zeros(self._shape, np.int32)
        asked = [request for request in requests if request.status is not RequestStatus.FINISHED]
        words_MW = self._words_NW[: len(asked)]
        failures = fill_masks([_with_new_tokens(request) for request in asked], words_MW)
        for index, why in failures.items():
            asked[index].failure = why
            asked[index].set_steady_limits()
        if failures:
            words_MW = words_MW[[index for index in range(len(asked)) if index not in failures]]
        request_ids = [request.request_id for request in asked if request.failure is None]
        return TokenMasks(request_ids, words_MW.reshape(-1).view(np.uint8).data)


def _with_new_tokens(request: Request) -> tuple[Constraint, list[int]]:
    """Its constraint, and the output tokens that this has not been told of."""
    assert request.constraint is not None
    start = request.num_prompt_tokens + request.num_accepted
    token_ids = request.token_ids[start:]
    request.num_accepted += len(token_ids)
    return request.constraint, token_ids
