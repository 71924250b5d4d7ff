"""Turn what a user gave as logits processors into objects and factories, or into an error that says what is allowed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from compiled_engine.sampling.logits_processor import (
    METHODS,
    LogitsProcessor,
    LogitsProcessorFactory,
    has_methods,
    is_processor,
)

ALLOWED = f"objects with {', '.join(METHODS)}, classes or functions that make one, and 'package.module:Name'"


def resolve_logits_processors(given: tuple[Any, ...]) -> tuple[LogitsProcessor | LogitsProcessorFactory, ...]:
    """Strings are imported. Raises TypeError or ValueError naming the entry."""
    return tuple(_resolve(f"logits_processors[{index}]", entry) for index, entry in enumerate(given))


def _resolve(name: str, given: Any) -> Any:
    found = _imported(name, given) if isinstance(given, str) else given
    usable = is_processor(found) or callable(found)
    if isinstance(found, type):
        usable = has_methods(found)
    if not usable:
        what = f"{given!r}, which is {found!r}" if isinstance(given, str) else repr(given)
        raise TypeError(f"{name} is {what}; allowed: {ALLOWED}")
    return found


def _imported(name: str, given: str) -> Any:
    module_name, colon, path = given.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"{name} is {given!r}; allowed: 'package.module:Name'")
    try:
        found: Any = import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ValueError(
            f"{name} is {given!r}, which cannot be imported ({type(error).__name__}: {error}); "
            "allowed: 'package.module:Name' of a module on Python's path"
        ) from error
    return found
