"""Finds which features override a hook of their base class, so that hooks are called only where they do something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

F = TypeVar("F")
P = ParamSpec("P")
R = TypeVar("R")


def having(features: Sequence[F], hook: Callable[..., Any]) -> tuple[F, ...]:
    """Return the features whose class overrides a hook, in the order of `features`.

    hook: a method of the features' base class, such as `StepFeature.begin`.
    """
    return tuple(each for each in features if getattr(type(each), hook.__name__) is not hook)


def overriding(features: Sequence[F], hook: Callable[Concatenate[F, P], R]) -> tuple[Callable[P, R], ...]:
    """Return the bound methods with which features override a hook, in the order of `features`. hook: see `having`."""
    return tuple(getattr(each, hook.__name__) for each in having(features, hook))


def sole(features: Sequence[F], hook: Callable[..., Any]) -> F | None:
    """Return the only feature that overrides a hook; None if no feature overrides it. hook: see `having`.

    Raises ValueError that names the classes if several features override the hook.
    """
    found = having(features, hook)
    if len(found) > 1:
        names = " and ".join(type(each).__name__ for each in found)
        raise ValueError(f"{names} override {hook.__qualname__}; allowed: one feature at most")
    return found[0] if found else None


def by_name(named: Iterable[tuple[str, F]]) -> dict[str, F]:
    """Return a mapping from names to features. named: pairs of a name and a feature.

    Raises ValueError that names the classes if two features have the same name.
    """
    found: dict[str, F] = {}
    for name, feature in named:
        if name in found:
            both = f"{type(found[name]).__name__} and {type(feature).__name__}"
            raise ValueError(f"{both} have the name {name!r}; allowed: one feature at most")
        found[name] = feature
    return found


def sole_overriding(features: Sequence[F], hook: Callable[Concatenate[F, P], R]) -> Callable[P, R] | None:
    """Return the bound method with which the only feature overrides a hook; None if no feature overrides it.

    Raises ValueError as `sole` does.
    """
    feature = sole(features, hook)
    return None if feature is None else getattr(feature, hook.__name__)
