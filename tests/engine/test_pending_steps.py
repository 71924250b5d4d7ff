"""The result of a launched step: tokens and log-probabilities in the step's order, whatever the order of its batch."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from compiled_engine.engine.input_batch import RING, InputBatch
from compiled_engine.engine.step_sampling import Deferred, LateStep, PendingStep
from compiled_engine.features.pooling.step_pooling import PooledRows
from compiled_engine.features.prompt_logprobs.step_prompt_logprobs import PromptRows
from compiled_engine.features.speculation.draft_rows import NO_ROW, NOT_TAKEN, DraftedRows
from compiled_engine.features.speculation.extras import VERIFIED_DRAFTS
from compiled_engine.process.profiling import StepClock
from compiled_engine.sampling.logprobs import BatchLogprobs
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs

NUMBER = 2 * RING + 5


def rows(*token_ids: int) -> torch.Tensor:
    made = LogprobRows.of([TokenLogprobs((token,), (-float(token),), 1) for token in token_ids])
    return torch.from_numpy(made.array().copy())


def row_tokens(found: LogprobRows | None) -> list[int]:
    return [] if found is None else [row.token_ids[0] for row in found]


def pending(
    tokens: list[int],
    request_ids: list[str],
    samples: list[bool],
    *,
    order: list[int] | None = None,
    combine: DraftedRows | None = None,
    logprobs: BatchLogprobs | None = None,
    **results: Deferred,
) -> PendingStep:
    ring_KR1 = np.zeros((RING, len(tokens) + 3), np.int32)
    ring_KR1[NUMBER % RING] = [NUMBER, *tokens, 88, 88]
    count = len(tokens)
    batch = InputBatch(
        request_ids,
        np.arange(count, dtype=np.int32),
        np.arange(count + 1, dtype=np.int32),
        [0] * count,
        np.array(samples),
        count,
        None,
        combine is None,
        count,
        count,
        (count, 1, 1),
        None if order is None else np.array(order),
        combine,
    )
    clock = StepClock(torch.device("cpu"))
    return PendingStep(ring_KR1, NUMBER, None, batch, logprobs, results, clock)


def test_tokens_of_those_that_sample() -> None:
    assert pending([5, 6, 7], ["a", "b", "c"], [True] * 3).result().token_ids == [5, 6, 7]
    assert pending([5, -1, 7], ["a", "b", "c"], [True, False, True]).result().token_ids == [5, 7]


@pytest.mark.parametrize("order", [None, [2, 0, 1]])
def test_log_probabilities_are_in_the_order_of_the_step(order: list[int] | None) -> None:
    """`order` says where the batch has each request of the step; the second one of the step does not sample."""
    places = order or [0, 1, 2]
    tokens, samples, names = [0] * 3, [True] * 3, [""] * 3
    for place, token, samples_one, name in zip(places, (5, -1, 7), (True, False, True), "abc", strict=True):
        tokens[place], samples[place], names[place] = token, samples_one, name
    many = {places[2]: rows(70, 71)}
    prompt = PromptRows({"b": (3, [rows(31), rows(32, 33)])})
    logprobs = BatchLogprobs(rows(*tokens), many)
    result = pending(tokens, names, samples, order=order, logprobs=logprobs, prompt_logprobs=prompt).result()
    assert (result.token_ids, row_tokens(result.logprobs)) == ([5, 7], [5, 7])
    assert {name: row_tokens(found) for name, found in result.many_logprobs.items()} == {"c": [70, 71]}
    first, found = result.extras["prompt_logprobs"]["b"]
    assert (first, row_tokens(found)) == (3, [31, 32, 33])
    few = pending(tokens, names, samples, order=order, logprobs=BatchLogprobs(None, many)).result()
    assert few.logprobs is None
    none = pending(tokens, names, samples, order=order, prompt_logprobs=prompt).result()
    assert (none.logprobs, none.many_logprobs, list(none.extras["prompt_logprobs"])) == (None, {}, ["b"])


def test_vectors() -> None:
    pooled = PooledRows(["b", "a"], [0, 4], [1, 2], torch.arange(6.0).view(3, 2))
    result = pending([5, -1], ["a", "b"], [True, False], pooling=pooled).result()
    vectors = result.extras["pooling"]
    found = {name: (each.first, each.width, np.frombuffer(each.data, "<f4")) for name, each in vectors.items()}
    assert result.token_ids == [5]
    assert found["b"][:2] == (0, 2)
    assert found["a"][:2] == (4, 2)
    assert [found[name][2].tolist() for name in "ba"] == [[0, 1], [2, 3, 4, 5]]


def test_tokens_behind_drafts() -> None:
    """Rows of requests c, a and b, in this order; the second draft of a is wrong, b has one of two, c is a prompt."""
    tokens = [9, 5, 6, NOT_TAKEN, 7, 8, NO_ROW]
    names = ["c", "a", "a", "a", "b", "b", "b"]
    drafted = DraftedRows(np.array([1, 2, 3, 4, 5, 6, 0]), np.array([0, 3, 6]), np.array([True, True, False]))
    tokens[0] = NOT_TAKEN
    samples = [False, *[True] * 5, False]
    many: dict[int, Any] = {place: rows(10 * place) for place in (1, 2, 3)}
    logprobs = BatchLogprobs(rows(*range(100, 107)), many)
    prompt = PromptRows({"c": (1, [rows(31)])})
    result = pending(tokens, names, samples, combine=drafted, logprobs=logprobs, prompt_logprobs=prompt).result()
    assert (result.token_ids, result.lengths, result.columns) == (
        [5, 6, 7, 8],
        [2, 2],
        {VERIFIED_DRAFTS: [(2, 1), (1, 1)]},
    )
    assert row_tokens(result.logprobs) == [101, 102, 104, 105]
    assert {name: row_tokens(found) for name, found in result.many_logprobs.items()} == {"a": [10, 20]}
    assert list(result.extras["prompt_logprobs"]) == ["c"]
    none = pending(tokens, names, samples, combine=drafted).result()
    assert (none.token_ids, none.logprobs, none.many_logprobs) == ([5, 6, 7, 8], None, {})


def test_a_step_whose_late_inputs_did_not_come_has_no_result() -> None:
    step, batch = pending([5], ["a"], [True]), cast(InputBatch, None)
    late = LateStep(batch, torch.zeros(1, 3), {})
    with pytest.raises(RuntimeError, match="the step was not sampled: its late inputs did not come"):
        late.result()
    late.sampled = step
    assert late.result().token_ids == [5]
