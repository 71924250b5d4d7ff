"""Hooks of features: the methods that override one are called, in order, and no others."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from plain_config import BASE

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.plan_hooks import PlanFeature, PlanHooks
from compiled_engine.features.registry import plan_features


class Named(PlanFeature):
    def __init__(self, name: str) -> None:
        self.name = name

    def metrics(self) -> dict[str, Any]:
        return {self.name: 1}


class Further(Named):
    """Has a hook by inheritance, and one of its own."""

    def failed(self) -> None:
        raise ControlError(self.name)


def hook_names() -> list[str]:
    """All that the core collects; `resources` is asked for once, while it is built."""
    return [name for name, _ in inspect.getmembers(PlanFeature, inspect.isfunction) if name != "resources"]


def test_a_hook_that_nobody_overrides_costs_no_call() -> None:
    hooks = PlanHooks([PlanFeature(), Named("a")])
    assert hook_names()
    assert [name for name in hook_names() if getattr(hooks, name)] == ["metrics"]


def test_features_are_asked_in_their_order() -> None:
    hooks = PlanHooks([Further("b"), PlanFeature(), Named("a")])
    assert [metrics() for metrics in hooks.metrics] == [{"b": 1}, {"a": 1}]
    (failed,) = hooks.failed
    with pytest.raises(ControlError, match="b"):
        failed()


class Divides(PlanFeature):
    """Overrides all hooks that only one feature may override."""

    def divide(self, running: Any, waiting: Any, num_in_flight: int) -> Any:
        return ((running, 0),)

    def decode_tokens(self, running: Any, num_waiting: int) -> int:
        return 1


@pytest.mark.parametrize("hook", ["divide", "decode_tokens"])
def test_a_hook_of_one_feature_is_refused_to_a_second(hook: str) -> None:
    first = Divides()
    second: PlanFeature = type("Second", (PlanFeature,), {hook: getattr(Divides, hook)})()
    assert getattr(PlanHooks([PlanFeature(), first]), hook) == getattr(first, hook)
    with pytest.raises(ValueError, match=rf"^Second and Divides override PlanFeature\.{hook}; allowed: one feature"):
        PlanHooks([second, first])


def test_a_control_call_is_answered_by_one_feature() -> None:
    class Answers(PlanFeature):
        calls = ("count", "stop")

    class AnswersToo(PlanFeature):
        calls = ("stop",)

    answers = Answers()
    assert PlanHooks([answers, PlanFeature()]).answering == {"count": answers, "stop": answers}
    with pytest.raises(ValueError, match=r"^Answers and AnswersToo have the name 'stop'; allowed: one feature"):
        PlanHooks([answers, AnswersToo()])


def test_an_engine_without_features_in_use_makes_no_call_for_them_in_a_step() -> None:
    """A feature that a request may use gets calls only when such a request comes."""
    executor: Any = SimpleNamespace(call=None)
    hooks = PlanHooks(plan_features(BASE, executor))
    each_step = ("divide", "decode_tokens", "built", "planned", "updated", "reconsiders")
    assert [name for name in each_step if getattr(hooks, name)] == []
