"""Find the methods that classes override, so that only these are called as hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

F = TypeVar("F")
P = ParamSpec("P")
R = TypeVar("R")


def having(features: Sequence[F], hook: Callable[..., Any]) -> tuple[F, ...]:
    """Return the features whose class overrides a hook, in the order of the features.

    hook: a method of their base class, such as `StepFeature.begin`.
    """
    return tuple(each for each in features if getattr(type(each), hook.__name__) is not hook)


def overriding(features: Sequence[F], hook: Callable[Concatenate[F, P], R]) -> tuple[Callable[P, R], ...]:
    """Return the bound methods of the features that override a hook, in the order of the features."""
    return tuple(getattr(each, hook.__name__) for each in having(features, hook))


def sole(features: Sequence[F], hook: Callable[..., Any]) -> F | None:
    """Return the feature that overrides a hook that only one feature may override; None if there is none.

    Raises ValueError, naming the classes, if there are several.
    """
    found = having(features, hook)
    if len(found) > 1:
        names = " and ".join(type(each).__name__ for each in found)
        raise ValueError(f"{names} override {hook.__qualname__}; allowed: one feature at most")
    return found[0] if found else None


def by_name(named: Iterable[tuple[str, F]]) -> dict[str, F]:
    """Return features by names. Raises ValueError, naming the classes, if two have the same."""
    found: dict[str, F] = {}
    for name, feature in named:
        if name in found:
            both = f"{type(found[name]).__name__} and {type(feature).__name__}"
            raise ValueError(f"{both} have the name {name!r}; allowed: one feature at most")
        found[name] = feature
    return found


def sole_overriding(features: Sequence[F], hook: Callable[Concatenate[F, P], R]) -> Callable[P, R] | None:
    """Return the bound method of `sole`; None if no feature overrides the hook. Raises ValueError as `sole` does."""
    feature = sole(features, hook)
    return None if feature is None else getattr(feature, hook.__name__)
