"""Requests with a constraint as the scheduler meets them: what it is told of them, and how they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from token_masks import ByLastToken

from compiled_engine.engine.messages import EngineRequest
from compiled_engine.engine.request import Finish, Request
from compiled_engine.features.structured.extras import NAME, masks_in
from compiled_engine.features.structured.grammars.constraint import GrammarConstraint
from compiled_engine.features.structured.plan import Structured
from compiled_engine.sampling.params import SamplingParams

VOCABULARY = 11


def added(structured: Structured, name: str, mask: Any = None) -> Request:
    """A request that is added at once, in an engine whose steps may yield four tokens."""
    asked = EngineRequest(name, (1, 2), SamplingParams())
    assert not structured.holds_back(asked, mask)
    request = Request.of(asked, (0, 0), 100, 4)
    structured.added(request)
    return request


def test_a_request_with_a_mask_samples_late_and_a_token_at_a_time() -> None:
    structured = Structured(2, VOCABULARY)
    masked, plain = added(structured, "masked", ByLastToken(VOCABULARY)), added(structured, "plain")
    assert (masked.samples_late, masked.max_new_tokens_per_step, masked.most_when_admitted) == (True, 1, 1)
    assert (plain.samples_late, plain.max_new_tokens_per_step, plain.most_when_admitted) == (False, 4, 4)
    news = [each.as_new(((0,),), {}) for each in (masked, plain)]
    assert [new.samples_late for new in news] == [True, False]


def test_who_has_ended_has_no_mask() -> None:
    structured = Structured(2, VOCABULARY)
    gone, other = (added(structured, name, ByLastToken(VOCABULARY)) for name in "ab")
    structured.ended(gone)
    structured.begin_late([gone, other])
    assert masks_in(structured.finish_late()[NAME]).request_ids == ["b"]


def test_a_mask_is_of_one_request_alone() -> None:
    """An id may be used again, also where its first request was never added."""
    structured = Structured(2, VOCABULARY)
    structured.ended(added(structured, "a", ByLastToken(VOCABULARY)))
    assert not added(structured, "a").samples_late
    structured.holds_back(EngineRequest("b", (1,), SamplingParams()), ByLastToken(VOCABULARY))
    structured.withdrawn("b")
    assert not added(structured, "b").samples_late


@pytest.mark.parametrize(("accepting", "finish"), [(True, Finish("stop", None)), (False, None)])
def test_a_text_that_is_complete_may_end_for_want_of_a_token(accepting: bool, finish: Finish | None) -> None:
    """Only an end-of-sequence token could come, and something else forbids it."""
    structured = Structured(2, VOCABULARY)
    matcher: Any = SimpleNamespace(is_accepting=lambda: accepting)
    executor: Any = None
    structured._given["a"] = GrammarConstraint(matcher, executor)
    assert structured.nothing_allowed(added(structured, "a")) == finish
    assert structured.nothing_allowed(added(structured, "b", ByLastToken(VOCABULARY))) is None
    assert structured.nothing_allowed(added(structured, "c")) is None
