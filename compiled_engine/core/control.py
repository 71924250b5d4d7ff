"""Calls that an engine takes between two steps, and errors on their way between processes.

Calls are questions, and changes of the engine itself. A call goes one way: from an API process to the core, or to the
cores of all replicas, and from there to every rank where it concerns them. It is taken in the order in which calls,
requests and steps were sent; steps that were launched before it run as they are. It comes back as a value or as an
error.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from compiled_engine.messages import ControlCall

KINDS = ValueError | TypeError | OSError | RuntimeError | MemoryError


class FatalError(RuntimeError):
    """The engine is of no use any more. What was under way is lost, and a new engine is needed."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The other side cannot start, or cannot go on: the exception's type, its text, and where it was raised.

    kind is one of Python's own where the exception is one of KINDS.
    """

    kind: str
    text: str
    where: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def as_exception(self, place: str, prefix: str = "") -> Exception:
        """Return the exception that was raised, or a RuntimeError with its name if it is no exception of Python's own.

        place: where that was. prefix: what the text begins with.
        """
        kind = getattr(builtins, self.kind, None)
        error: Exception
        if isinstance(kind, type) and issubclass(kind, KINDS):
            text = prefix + self.text
            error = RuntimeError(text) if issubclass(kind, UnicodeError) else kind(text)
        else:
            error = RuntimeError(f"{prefix}{self.kind}: {self.text}")
        error.add_note(f"in {place}:\n{self.where}")
        return error


class ControlError(RuntimeError):
    """A call was refused or has failed, with the reason. The engine continues."""


def apply(call: ControlCall, calls: Mapping[str, Callable[..., Any]]) -> Any:
    """Answer a call by the function of its name; return its result, which is plain data.

    Raises ControlError if the call is none of `calls` or its function raises; FatalError is passed through.
    """
    if call.name not in calls:
        raise ControlError(f"call is {call.name!r}; allowed: {', '.join(calls)}")
    try:
        return calls[call.name](**call.arguments)
    except (FatalError, ControlError):
        raise
    except Exception as error:
        raise ControlError(f"{call.name}: {type(error).__name__}: {error}") from error
