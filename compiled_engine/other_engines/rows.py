"""The kinds of rows in the tables of other engines' keywords."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Translate: TypeAlias = "Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]"
"""From a keyword's value, and all keywords given with it, to options of this engine. Raises ValueError saying what is
wrong with the value and what is allowed; the caller puts the keyword's name in front."""


@dataclass(frozen=True)
class Honoured:
    """The keyword has a meaning here. means: which one, as the documentation says it."""

    means: str
    translate: Translate


@dataclass(frozen=True)
class Only:
    """The engine does what these values ask for and nothing else. feature: what others ask for; instead: what to do."""

    values: tuple[Any, ...]
    feature: str
    instead: str


@dataclass(frozen=True)
class WithoutEffect:
    """The keyword may be given, and changes nothing. reason: why. anyway: values that ask for what is the case."""

    reason: str
    anyway: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Nested:
    """A dict with keys of its own. scalar: the key that an integer or a string stands for, if it may be one."""

    rows: Mapping[str, Row]
    scalar: str | None = None


Row: TypeAlias = "Honoured | Only | WithoutEffect | Nested"


def is_value(given: Any, value: Any) -> bool:
    """Whether they are equal, where True is not 1."""
    return isinstance(given, bool) == isinstance(value, bool) and bool(given == value)


def same(name: str) -> Honoured:
    """The option `name` of this engine takes the value as it is."""
    return Honoured(f"`{name}`", lambda value, given: {name: value})


def given_anyway(means: str) -> Honoured:
    """Whatever the value is, what it asks for is the case."""
    return Honoured(means, lambda value, given: {})


def choice(means: str, options: Mapping[Any, Mapping[str, Any]]) -> Honoured:
    """One of several values, each with the options that it stands for."""

    def translate(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        for allowed, found in options.items():
            if is_value(value, allowed):
                return found
        raise ValueError(f"is {value!r}; allowed: {', '.join(map(repr, options))}")

    return Honoured(means, translate)


def without_effect(reasons: Mapping[str, str]) -> dict[str, Row]:
    """Rows for {reason: names with spaces between them}."""
    return {name: WithoutEffect(reason) for reason, names in reasons.items() for name in names.split()}


def only(feature: str, instead: str, **values: Any) -> dict[str, Row]:
    """Rows for the keywords that ask for a feature, each with the value or the tuple of values that does not."""
    return {
        name: Only(value if isinstance(value, tuple) else (value,), feature, instead) for name, value in values.items()
    }
