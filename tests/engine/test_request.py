"""A request by itself: what the scheduler makes of what was asked for, and what it says of its tokens."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.engine.messages import ROOT, EngineRequest, NewRequest
from compiled_engine.engine.request import Request, RequestStatus, check_requests
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import NO_TOKENS


def made(
    params: SamplingParams | None = None,
    prompt: tuple[int, ...] = (1, 2, 3),
    *,
    order: tuple[int, int] = (0, 0),
    longest: int = 100,
    max_new_tokens_per_step: int = 1,
    **rest: Any,
) -> Request:
    request = EngineRequest("r", prompt, params or SamplingParams(), **rest)
    return Request.of(request, order, longest, max_new_tokens_per_step)


@pytest.mark.parametrize(
    ("params", "most"),
    [
        (SamplingParams(), 4),
        (SamplingParams(temperature=0, logprobs=3), 4),
        (SamplingParams(presence_penalty=0.5), 1),
        (SamplingParams(bad_words_token_ids=[[1]]), 1),
        (SamplingParams(disable_spec_decode=True), 1),
    ],
    ids=["sampled", "greedy", "penalty", "bad words", "no drafts wanted"],
)
def test_the_tokens_that_a_step_may_yield(params: SamplingParams, most: int) -> None:
    request = made(params, max_new_tokens_per_step=4)
    assert request.max_new_tokens_per_step == request.most_when_admitted == most
    assert made(params).max_new_tokens_per_step == 1


def test_it_has_what_was_asked_for() -> None:
    params = SamplingParams(stop_token_ids=[4], min_tokens=2, max_tokens=20)
    request = made(
        params,
        order=(3, 7),
        eos_token_ids=frozenset({5}),
        prefix_root=b"root",
        output_token_ids=(8, 9),
        extras={"f": 3},
    )
    assert (request.request_id, request.order, request.sampling_params) == ("r", (3, 7), params)
    assert (request.token_ids, request.num_prompt_tokens, request.num_tokens) == ([1, 2, 3, 8, 9], 3, 5)
    assert (request.prefix_root, request.asked.extras, request.extras) == (b"root", {"f": 3}, {})
    assert (request.samples_late, request.returns_tokens, request.computes_every_token) == (False, True, False)
    assert request.eos_token_ids == {5}
    assert request.ending_ids == {4, 5} | NO_TOKENS
    assert (request.stop_rule.min_tokens, request.stop_rule.max_tokens, request.max_num_tokens) == (2, 20, 23)
    assert (request.status, request.num_computed_tokens, request.has_sampled) == (RequestStatus.WAITING, 0, False)
    assert request.num_cached_tokens is request.scheduled_time is None
    assert (request.steady_until_computed, request.steady_until_known) == (0, 22)  # its next token is not the first


@pytest.mark.parametrize(("max_tokens", "length"), [(None, 100), (5, 8), (97, 100), (98, 100), (500, 100)])
def test_the_length_at_which_it_ends(max_tokens: int | None, length: int) -> None:
    assert made(SamplingParams(max_tokens=max_tokens)).max_num_tokens == length


def test_end_of_sequence_tokens_that_are_ignored_end_nothing() -> None:
    assert made(SamplingParams(ignore_eos=True), eos_token_ids=frozenset({5})).ending_ids == NO_TOKENS


@pytest.mark.parametrize(("most", "limit"), [(None, 5), (9, 5), (4, 4)])
def test_a_step_computes_a_part_of_a_prompt(most: int | None, limit: int) -> None:
    """The part has at most the allowed number of tokens, and ends where a step must end."""
    request = made()
    assert request.step_limit > 1 << 40
    if most is not None:
        request.max_step_tokens = most
        assert request.step_limit == most
    request.step_ends, request.num_computed_tokens = (8, 16), 3
    assert request.step_limit == limit


def test_the_runner_gets_all_that_it_needs() -> None:
    params = SamplingParams(max_tokens=20)
    plain = made(params, eos_token_ids=frozenset({5}), output_token_ids=(8,))
    blocks = ((3, 4), (5,))
    new = NewRequest("r", (1, 2, 3, 8), 3, params, frozenset({5}), blocks)
    assert plain.as_new(blocks, {}) == new
    late = made(params)
    late.samples_late = True
    new = NewRequest("r", (1, 2, 3), 3, params, frozenset(), blocks, samples_late=True, extras={"f": 7})
    assert late.as_new(blocks, {"f": 7}) == new


def test_it_runs_from_its_first_admission_on() -> None:
    request = made(max_new_tokens_per_step=4)
    before = time.perf_counter()
    request.start()
    first = request.scheduled_time
    assert first is not None
    assert before <= first <= time.perf_counter()
    assert (request.status, request.is_limited_to_single_tokens) == (RequestStatus.RUNNING, False)
    request.has_sampled, request.num_slots, request.num_tokens, request.num_computed_tokens = True, 8, 4, 3
    request.limit_to_single_tokens()
    assert (request.max_new_tokens_per_step, request.is_limited_to_single_tokens) == (1, True)
    assert request.steady_until_computed == 8
    request.start()
    assert (request.max_new_tokens_per_step, request.is_limited_to_single_tokens, request.scheduled_time) == (
        4,
        False,
        first,
    )


def test_tokens_in_flight() -> None:
    request = made()
    assert (request.num_unknown_tokens, request.awaits_token) == (0, False)
    request.num_tokens += 2
    assert (request.num_unknown_tokens, request.awaits_token) == (2, True)
    request.token_ids.append(8)
    assert (request.num_unknown_tokens, request.awaits_token) == (1, True)
    request.status = RequestStatus.FINISHED
    assert request.num_unknown_tokens == 0


@pytest.mark.parametrize(("status", "computed"), [(RequestStatus.RUNNING, 8), (RequestStatus.PREEMPTED, 10)])
def test_a_step_may_yield_fewer_tokens_than_was_assumed(status: RequestStatus, computed: int) -> None:
    """The blocks of a request that was preempted are gone: nothing of it counts as computed."""
    request = made(max_new_tokens_per_step=4)
    request.status, request.num_tokens, request.num_computed_tokens = status, 11, 10
    request.correct_counts(4, 2)
    assert (request.num_tokens, request.num_computed_tokens) == (9, computed)


@given(
    num_known=st.integers(3, 12),
    num_tokens=st.integers(3, 12),
    num_computed=st.integers(0, 12),
    num_slots=st.integers(0, 16),
    max_num_tokens=st.integers(3, 16),
    most=st.integers(1, 4),
    has_sampled=st.booleans(),
    failure=st.sampled_from([None, None, "why"]),
    status=st.sampled_from([RequestStatus.RUNNING, RequestStatus.RUNNING, RequestStatus.FINISHED]),
)
def test_what_is_ordinary_of_a_request(
    num_known: int,
    num_tokens: int,
    num_computed: int,
    num_slots: int,
    max_num_tokens: int,
    most: int,
    has_sampled: bool,
    failure: str | None,
    status: RequestStatus,
) -> None:
    """A share: it decodes, not for the first time, in slots that it has, and stays below the length whatever comes. A
    token: it is not the first, and with it the request is below the length."""
    request = made(max_new_tokens_per_step=most)
    request.token_ids += [0] * (num_known - 3)
    request.num_tokens, request.num_computed_tokens, request.num_slots = num_tokens, num_computed, num_slots
    request.max_num_tokens, request.has_sampled = max_num_tokens, has_sampled
    request.failure, request.status = failure, status
    until_computed, until_known = request.steady_limits()
    goes_on = failure is None and status is RequestStatus.RUNNING
    fits = num_computed + most <= num_slots and num_tokens + most < max_num_tokens
    decodes = num_computed == num_tokens - 1 and has_sampled
    assert (num_computed < until_computed) == (goes_on and decodes and fits)
    assert (num_known < until_known) == (goes_on and num_known > 3 and num_known + 1 < max_num_tokens)


def running(order: int) -> Request:
    request = made(order=(0, order))
    request.start()
    return request


def test_requests_are_accounted_for() -> None:
    first, second, third, waiting = (running(order) for order in range(4))
    third.status = RequestStatus.ENDING
    check_requests([first, second, third, waiting], [first, second], 1)
    for running_ones, num_waiting in (([first], 1), ([first, second], 0), ([first, second], 2)):
        with pytest.raises(RuntimeError, match="4 requests are known, but"):
            check_requests([first, second, third, waiting], running_ones, num_waiting)
    for running_ones in ([second, first], [first, first]):
        with pytest.raises(RuntimeError, match="running requests are not in order"):
            check_requests([first, second], running_ones, 0)
    for limits in ((1, 0), (0, 1)):
        first.steady_until_computed, first.steady_until_known = limits
        with pytest.raises(RuntimeError, match="'r' has fast-path limits"):
            check_requests([first], [first], 0)


def test_two_requests_are_never_equal() -> None:
    """An id may be used again while the first one is still known."""
    first, second = made(), made()
    assert all(getattr(first, field.name) == getattr(second, field.name) for field in fields(Request))
    assert first != second
    assert len({first, second}) == 2
    assert first.prefix_root == ROOT
