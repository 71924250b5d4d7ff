"""Hooks of features: the methods that override one are called, in order, and no others."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from plain_config import BASE

from compiled_engine.core.control import ControlError
from compiled_engine.core.hooks import PlanFeature, PlanHooks
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
    assert [name for name in hook_names() if len(getattr(hooks, name)) > 0] == ["metrics"]


def test_features_are_asked_in_their_order() -> None:
    hooks = PlanHooks([Further("b"), PlanFeature(), Named("a")])
    assert [metrics() for metrics in hooks.metrics] == [{"b": 1}, {"a": 1}]
    (failed,) = hooks.failed
    with pytest.raises(ControlError, match="b"):
        failed()


def test_an_engine_without_features_in_use_makes_no_call_for_them_in_a_step() -> None:
    """What may come with a request is heard of when it does."""
    hooks = PlanHooks(plan_features(BASE, executor=None))  # type: ignore[arg-type]
    each_step = ("divide", "decode_tokens", "built", "planned", "updated", "reconsiders")
    assert [name for name in each_step if getattr(hooks, name)] == []
