"""Find the methods that classes override, so that only these are called as hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

F = TypeVar("F")
P = ParamSpec("P")
R = TypeVar("R")


def overriding(features: Sequence[F], hook: Callable[Concatenate[F, P], R]) -> tuple[Callable[P, R], ...]:
    """Return the bound methods of the features whose class overrides a hook, in the order of the features.

    hook: a method of their base class, such as `StepFeature.begin`.
    """
    name = hook.__name__
    return tuple(getattr(each, name) for each in features if getattr(type(each), name) is not hook)
