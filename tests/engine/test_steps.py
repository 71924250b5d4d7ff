"""Steps under construction and in flight, and what becomes of the runner's results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from compiled_engine.engine.messages import EngineOutput, EngineRequest, RunnerOutput
from compiled_engine.engine.request import Finish, Request, RequestStatus
from compiled_engine.engine.steps import (
    StepBuilder,
    StepInFlight,
    StepsInFlight,
    all_but,
    extra_outputs,
    no_token,
    step_outputs,
    tokens_output,
)
from compiled_engine.features.pooling.extras import Vectors
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import (
    NOT_A_NUMBER,
    NOTHING_ALLOWED,
    WHY_NO_TOKEN,
    LogprobRows,
    TokenLogprobs,
)


def request(name: str, *, samples_late: bool = False, prompt: int = 3, **params: Any) -> Request:
    asked = EngineRequest(name, tuple(range(prompt)), SamplingParams(**params))
    made = Request.of(asked, (0, ord(name)), 100)
    made.samples_late = samples_late
    return made


def rows(*tokens: int) -> LogprobRows:
    return LogprobRows.of([TokenLogprobs((token,), (-float(token),), 1) for token in tokens])


def in_flight(builder: StepBuilder, *, any_late: bool = True, number: int = 7) -> StepInFlight:
    return StepInFlight.of(number, builder, ("gone",), [[5], [6]], any_late=any_late)


def test_a_mask_of_indices() -> None:
    assert all_but([3, 0], 5) == [False, True, True, False, True]
    assert all_but([], 2) == [True, True]


@pytest.mark.parametrize("any_late", [True, False])
def test_a_step_has_its_decodes_first(any_late: bool) -> None:
    """The order does not depend on the order in which shares are added."""
    late = request("m", samples_late=True)
    other, prompt, chunk, unsampled = (request(name) for name in "opcu")
    builder = StepBuilder(decode_tokens=2, single=True)
    builder.new_block_ids["m"] = ((4,),)
    builder.bounds[late] = 1
    builder.add(prompt, 0, 3, True)
    builder.add(other, 5, 2, True)
    builder.add(unsampled, 0, 2, False)
    builder.add(chunk, 4, 5, False)
    builder.add(late, 8, 2, True)
    step = in_flight(builder, any_late=any_late)
    output = step.output
    assert (output.request_ids, output.starts) == (["o", "u", "m", "p", "c"], [5, 0, 8, 0, 4])
    assert (output.counts, output.samples) == ([2, 2, 2, 3, 5], [True, False, True, True, False])
    assert (output.step, output.removed, output.new) == (7, ("gone",), ())
    assert (output.new_block_ids, output.extras) == ({"m": ((4,),)}, {})
    assert (output.single, output.samples_late) == (True, any_late)
    assert step.requests == [other, unsampled, late, prompt, chunk]
    assert (step.sampling, step.sampling_ids) == ([other, late, prompt], ["o", "m", "p"])
    assert step.late == ([late] if any_late else [])
    assert (step.registered, step.bounds, step.decode_tokens) == ([[5], [6]], {late: 1}, 2)


def test_a_step_samples_late_only_what_it_samples() -> None:
    builder = StepBuilder()
    builder.add(request("m", samples_late=True), 0, 3, False)
    step = in_flight(builder)
    assert (step.late, step.output.samples_late) == ([], False)


@pytest.mark.parametrize(("most", "taken", "room"), [(None, 5, 9), (20, 5, 9), (8, 5, 3), (8, 8, 0)])
def test_the_room_for_prompts(most: int | None, taken: int, room: int) -> None:
    assert StepBuilder(max_prefill_tokens=most, num_prefill_tokens=taken).room_for_prompts(9) == room


def test_steps_are_taken_in_in_order() -> None:
    steps = StepsInFlight(2)
    first, second, third = (in_flight(StepBuilder(), number=number) for number in range(3))
    with pytest.raises(RuntimeError, match="step 0 is not the oldest one in flight"):
        steps.oldest(first.output)
    for step in (first, second):
        steps.require_room()
        steps.append(step)
    with pytest.raises(RuntimeError, match="step 0 is in flight"):
        steps.require_room()
    assert steps.oldest(first.output) is first
    assert (steps.find(first.output), steps.find(second.output)) == (first, second)
    with pytest.raises(RuntimeError, match="step 1 is not the oldest one in flight"):
        steps.oldest(second.output)
    for unknown in (third.output, replace(first.output)):
        with pytest.raises(RuntimeError, match="is not in flight"):
            steps.find(unknown)


def two_sampling() -> StepInFlight:
    builder = StepBuilder()
    for name in "abc":
        builder.add(request(name), 4, 1, True)
    return in_flight(builder)


def test_outputs_that_are_as_all_others_stay_in_columns() -> None:
    step, other = two_sampling(), EngineOutput("b", (6,), finish_reason="stop")
    result = RunnerOutput([5, 6, 7], rows(5, 6, 7))
    found = step_outputs(step, result, [], [])
    assert (found.request_ids, found.token_ids, found.logprobs) == (["a", "b", "c"], [5, 6, 7], rows(5, 6, 7))
    found = step_outputs(step, result, [1], [other])
    assert (found.request_ids, found.token_ids, found.logprobs) == (["a", "c"], [5, 7], rows(5, 7))
    assert list(found.others) == [other]
    assert step_outputs(step, RunnerOutput([5, 6, 7]), [1], []).logprobs is None
    result = RunnerOutput([5, 6, 7], columns={"f": [1, 2, 3]})
    assert step_outputs(step, result, [], []).columns == {"f": [1, 2, 3]}
    assert step_outputs(step, result, [1], [other]).columns == {"f": [1, 3]}


def vectors_of(asked: Request, extras: dict[str, Any]) -> dict[str, Any]:
    """A feature that has a vector for some."""
    found = extras.get("f", {}).get(asked.request_id)
    return {} if found is None else {"f": found}


def rows_of(asked: Request, extras: dict[str, Any]) -> dict[str, Any]:
    """Another feature, that has rows for some."""
    found = extras.get("g", {}).get(asked.request_id)
    return {} if found is None else {"g": found}


TAKEN = (vectors_of, rows_of)


def test_what_a_chunk_of_a_prompt_yields() -> None:
    """For those that have not come to the end of it, and have not ended."""
    one, other, nothing, ended, sampling = (request(name, prompt=9) for name in "abcde")
    one.num_cached_tokens = 4
    ended.status = RequestStatus.FINISHED
    builder = StepBuilder()
    for each in (one, other, nothing, ended):
        builder.add(each, 0, 4, False)
    builder.add(sampling, 0, 9, True)
    vectors, found = Vectors(0, 1, bytes(16)), (1, rows(1, 2, 3))
    result = RunnerOutput([7], extras={"f": {"b": vectors}, "g": dict.fromkeys("abde", found)})
    assert extra_outputs(in_flight(builder), result, TAKEN) == [
        EngineOutput("a", (), num_cached_tokens=4, extras={"g": found}),
        EngineOutput("b", (), num_cached_tokens=0, extras={"f": vectors, "g": found}),
    ]


class TestTokensOutput:
    RESULT = RunnerOutput([4, 5, 6], rows(4, 5, 6), many_logprobs={"m": rows(7, 8)})

    def test_it_has_what_the_request_asked_for(self) -> None:
        asked = request("a", logprobs=0)
        asked.num_cached_tokens, asked.scheduled_time = 2, 1.5
        extras = {"g": (1, rows(1, 2))}
        output = tokens_output(asked, slice(1, 3), Finish("stop", 6), self.RESULT, extras)
        assert output == EngineOutput("a", (5, 6), rows(5, 6), "stop", 6, 2, 1.5, extras)

    def test_it_has_nothing_else(self) -> None:
        output = tokens_output(request("b"), slice(0, 1), None, self.RESULT, {})
        assert output == EngineOutput("b", (4,), num_cached_tokens=0)

    def test_rows_of_many_tokens_are_as_many_as_it_got(self) -> None:
        asked = request("m", logprobs=5)
        assert tokens_output(asked, slice(0, 1), None, self.RESULT, {}).logprobs == rows(7)
        assert tokens_output(asked, slice(0, 2), None, self.RESULT, {}).logprobs == rows(7, 8)

    def test_without_a_token_there_are_no_log_probabilities(self) -> None:
        for name in "am":
            output = tokens_output(request(name, logprobs=0), slice(1, 1), Finish("error", "why"), self.RESULT, {})
            assert (output.new_token_ids, output.logprobs, output.stop_reason) == ((), None, "why")

    def test_a_token_may_be_no_output(self) -> None:
        asked, vectors = request("v", logprobs=0), Vectors(0, 1, bytes(4))
        asked.returns_tokens = False
        output = tokens_output(asked, slice(0, 1), Finish("length", None), self.RESULT, {"f": vectors})
        assert (output.new_token_ids, output.logprobs, output.extras) == ((), None, {"f": vectors})


@pytest.mark.parametrize("token_id", [0, 5, -1])
def test_a_token_ends_nothing(token_id: int) -> None:
    assert no_token(request("a"), token_id, ()) is None


@pytest.mark.parametrize("why", [NOT_A_NUMBER, NOTHING_ALLOWED])
def test_without_a_token_a_request_ends_with_the_reason(why: int) -> None:
    for nothing_allowed in ((), (lambda asked: None,)):
        assert no_token(request("a"), why, nothing_allowed) == Finish("error", WHY_NO_TOKEN[why])


def test_where_no_token_is_allowed_a_feature_may_know_of_a_better_end() -> None:
    stop = Finish("stop", None)
    assert no_token(request("a"), NOTHING_ALLOWED, (lambda asked: None, lambda asked: stop)) == stop
    assert no_token(request("a"), NOT_A_NUMBER, (lambda asked: stop,)) == Finish("error", WHY_NO_TOKEN[NOT_A_NUMBER])
