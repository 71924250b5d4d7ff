"""The masks of a step, made while it runs: its requests' constraints are told of their newest tokens and asked."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from compiled_engine.grammars.fill import fill_masks
from compiled_engine.messages import TokenMasks
from compiled_engine.sampling.token_mask import Constraint, num_words
from compiled_engine.scheduling.request import Request, RequestStatus


class MaskMaker:
    """Owns the array that masks are written to, a row for each request that may run, once there is a constraint; and
    the thread that waits for grammars to fill it."""

    def __init__(self, max_num_requests: int, vocab_size: int) -> None:
        self._shape = (max_num_requests, num_words(vocab_size))
        self._words_NW: np.ndarray | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")  # it begins with the first grammar
        self._asked: list[Request] = []
        self._failures: Future[dict[int, str]] | None = None

    def begin(self, requests: Sequence[Request]) -> None:
        """Have the masks made of those that have not ended; all their tokens are known.

        Masks that were begun and never taken are dropped.
        """
        if self._words_NW is None:
            self._words_NW = np.zeros(self._shape, np.int32)
        if self._failures is not None:
            self._failures.result()
        self._asked = [request for request in requests if request.status is not RequestStatus.FINISHED]
        words_MW = self._words_NW[: len(self._asked)]
        self._failures = fill_masks([_with_new_tokens(request) for request in self._asked], words_MW, self._thread)

    def take(self) -> TokenMasks:
        """Those begun last, once they are made. Valid until the next call of `begin`.

        A request whose constraint fails gets a `failure`. Raises RuntimeError if none were begun.
        """
        if self._failures is None or self._words_NW is None:
            raise RuntimeError("no masks are being made: begin must be called first")
        failures, self._failures = self._failures.result(), None
        asked, words_MW = self._asked, self._words_NW[: len(self._asked)]
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
