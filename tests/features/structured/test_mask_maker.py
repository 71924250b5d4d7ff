"""Masks of a step: whose they are, which tokens their constraints are told of, and what a failure does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event

import numpy as np
import pytest

from compiled_engine.engine.messages import EngineRequest
from compiled_engine.engine.request import Request
from compiled_engine.features.structured.constraints import Constrained, MaskMaker
from compiled_engine.features.structured.extras import TokenMasks
from compiled_engine.sampling.params import SamplingParams

VOCAB_SIZE, NUM_WORDS = 70, 3


class Told:
    """A constraint that keeps what it is told; its mask has the number of tokens so far in each word."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.fails = False

    def accept(self, token_ids: Sequence[int]) -> None:
        self.heard.append(list(token_ids))

    def fill(self, words_W: np.ndarray) -> None:
        if self.fails:
            raise ValueError("injected")
        words_W[:] = sum(map(len, self.heard)) + 1


def constrained(name: str, output: tuple[int, ...] = ()) -> tuple[Request, Told, Constrained]:
    told = Told()
    asked = EngineRequest(name, (1, 2), SamplingParams(), output_token_ids=output)
    request = Request.of(asked, (0, 0), 100)
    request.start()
    return request, told, Constrained(told)


def words(masks: TokenMasks) -> dict[str, list[int]]:
    rows = np.frombuffer(masks.words, np.int32).reshape(-1, NUM_WORDS)
    return dict(zip(masks.request_ids, rows.tolist(), strict=True))


@pytest.fixture
def maker() -> Iterator[MaskMaker]:
    made = MaskMaker(4, VOCAB_SIZE)
    yield made
    made._thread.shutdown()


def test_each_constraint_is_told_of_each_output_token_once(maker: MaskMaker) -> None:
    (a, told_a, state_a), (b, told_b, state_b) = constrained("a"), constrained("b", (7, 8))
    maker.begin([(a, state_a), (b, state_b)])
    assert words(maker.finish()) == {"a": [1] * 3, "b": [3] * 3}
    a.token_ids += [5, 6]
    b.token_ids.append(9)
    maker.begin([(b, state_b), (a, state_a)])
    assert words(maker.finish()) == {"b": [4] * 3, "a": [3] * 3}
    assert (told_a.heard, told_b.heard) == ([[], [5, 6]], [[7, 8], [9]])


def test_what_fails_leaves_the_others_their_masks(maker: MaskMaker) -> None:
    made = [constrained(name, (0,) * index) for index, name in enumerate("abcd")]
    requests = [request for request, _, _ in made]
    for request in requests:
        request.num_tokens, request.num_computed_tokens, request.num_slots, request.has_sampled = 6, 5, 20, True
        request.set_steady_limits()
    made[1][1].fails = made[3][1].fails = True
    maker.begin([(request, state) for request, _, state in made])
    assert words(maker.finish()) == {"a": [1] * 3, "c": [3] * 3}
    assert [request.failure for request in requests] == [None, "injected", None, "injected"]
    assert [request.steady_until_computed > 0 for request in requests] == [True, False, True, False]


def test_masks_are_taken_once(maker: MaskMaker) -> None:
    request, _, state = constrained("a")
    with pytest.raises(RuntimeError, match="no masks are being made: begin must be called first"):
        maker.finish()
    maker.begin([(request, state)])
    maker.finish()
    with pytest.raises(RuntimeError, match="no masks are being made: begin must be called first"):
        maker.finish()


def test_masks_that_nobody_took_are_made_before_others_begin(maker: MaskMaker) -> None:
    """They are written to the same memory."""
    request, _, state = constrained("a")
    maker.begin([(request, state)])
    waited = Event()

    class Unmade:
        def result(self) -> dict[int, str]:
            waited.set()
            return {0: "of a step that was given up"}

    maker._failures = Unmade()  # type: ignore[assignment]
    maker.begin([(request, state)])
    assert waited.is_set()
    assert words(maker.finish()) == {"a": [1] * 3}
    assert request.failure is None
