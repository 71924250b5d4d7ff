"""Log-probabilities of prompts: how much of a prompt a step computes for them, and that each is delivered once."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from compiled_engine.engine.messages import EngineRequest
from compiled_engine.engine.request import Request
from compiled_engine.features.prompt_logprobs.extras import resumed
from compiled_engine.features.prompt_logprobs.plan import PromptLogprobs
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs


def added(feature: PromptLogprobs, prompt_logprobs: int | None, prompt: int = 3, first: int = 1) -> Request:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    asked = EngineRequest("r", tuple(range(prompt)), params)
    asked = structs.replace(asked, extras=resumed(asked, first))
    request = Request.of(asked, (0, 0), 100)
    feature.added(request)
    return request


@pytest.mark.parametrize(
    ("prompt_logprobs", "vocab_size", "most"),
    [(None, 11, None), (-1, 1 << 16, 1 << 8), (0, 1 << 16, 1 << 24), (3, 1 << 16, 1 << 22), (-1, 1 << 25, 1)],
)
def test_a_step_computes_as_much_of_a_prompt_as_host_memory_holds(
    prompt_logprobs: int | None, vocab_size: int, most: int | None
) -> None:
    """16 Mi log-probabilities."""
    request = added(PromptLogprobs(vocab_size), prompt_logprobs)
    assert request.max_step_tokens > 1 << 40 if most is None else request.max_step_tokens == most


@pytest.mark.parametrize(
    ("prompt_logprobs", "first", "owes"), [(None, 1, False), (0, 1, True), (0, 2, True), (0, 3, False)]
)
def test_a_prompt_is_computed_as_long_as_some_are_missing(prompt_logprobs: int | None, first: int, owes: bool) -> None:
    assert added(PromptLogprobs(11), prompt_logprobs, first=first).computes_every_token == owes


@pytest.mark.parametrize("crosses", [False, True])
def test_prompt_logprobs_are_delivered_once(crosses: bool) -> None:
    """A prompt may be computed again, in other chunks. crosses: the rows come as other processes send them."""
    feature = PromptLogprobs(11)
    request = added(feature, 0, prompt=9)
    rows = LogprobRows.of([TokenLogprobs((token,), (-float(token),), 1) for token in range(8)])

    def computed(first: int, end: int) -> tuple[int, list[int]] | None:
        part: Any = rows.select(slice(first - 1, end - 1))
        sent = [first, {"num_rows": part.num_rows, "data": part.data}] if crosses else (first, part)
        fields = feature.output_extras(request, {"prompt_logprobs": {"r": sent, "other": sent}})
        found = fields.get("prompt_logprobs")
        return None if found is None else (found[0], [row.token_ids[0] + 1 for row in found[1]])

    assert computed(1, 4) == (1, [1, 2, 3])
    assert computed(1, 3) is None
    assert computed(1, 4) is None
    assert computed(2, 5) == (4, [4])
    assert computed(5, 6) == (5, [5])
    with pytest.raises(RuntimeError, match="prompt_logprobs of 'r' start at 7, but 6 is next"):
        computed(7, 9)
    assert request.computes_every_token
    assert computed(6, 9) == (6, [6, 7, 8])
    assert not request.computes_every_token
    assert feature.output_extras(request, {"pooling": {"r": 1}}) == {}
