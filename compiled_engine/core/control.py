"""Calls that an engine takes between two steps: questions, and changes of the engine itself.

A call goes one way: from an API process to the core, or to the cores of all replicas, and from there to every rank
where it concerns them. It is taken in the order in which calls, requests and steps were sent; steps that were launched
before it run as they are. It comes back as a value or as an error.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from compiled_engine.failure import FatalError
from compiled_engine.messages import ControlCall


class ControlError(RuntimeError):
    """A call was refused or has failed, as the text says. The engine goes on."""


def apply(call: ControlCall, target: object, names: Collection[str]) -> Any:
    """Call the target's method that the call names, one of `names`; return its result, which is plain data.

    Raises ControlError if there is no such call or if the method raises; FatalError passes as it is.
    """
    if call.name not in names:
        raise ControlError(f"call is {call.name!r}; allowed: {', '.join(names)}")
    try:
        return getattr(target, call.name)(**call.arguments)
    except (FatalError, ControlError):
        raise
    except Exception as error:
        raise ControlError(f"{call.name}: {type(error).__name__}: {error}") from error
