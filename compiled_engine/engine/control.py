"""Control calls, which an engine serves between two steps, and errors on their way between processes.

A call is a question, or changes the engine itself. It goes from an API process to the core, or to the cores of all
replicas, and from there to every rank that it concerns, in the order in which calls, requests and steps were sent.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from compiled_engine.engine.messages import ControlCall


def apply(call: ControlCall, calls: Mapping[str, Callable[..., Any]]) -> Any:
    """Call the function that a control call names; returns its result, which is plain data.

    calls: the allowed functions, by name. Raises ControlError if the name is not among them or the function raises;
    FatalError passes through.
    """
    if call.name not in calls:
        raise ControlError(f"call is {call.name!r}; allowed: {', '.join(calls)}")
    try:
        return calls[call.name](**call.arguments)
    except (FatalError, ControlError):
        raise
    except Exception as error:
        raise ControlError(f"{call.name}: {type(error).__name__}: {error}") from error


class ControlError(RuntimeError):
    """A control call was refused or failed, for the reason in the message. The engine continues."""


class FatalError(RuntimeError):
    """The engine cannot continue: its requests are lost, and a new engine is needed."""


KINDS = ValueError | TypeError | OSError | RuntimeError | MemoryError


class Failed(msgspec.Struct, tag=True, frozen=True):
    """An exception that ended another process, or kept it from starting."""

    kind: str  # name of the exception's type
    text: str
    where: str  # traceback

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def as_exception(self, place: str, prefix: str = "") -> Exception:
        """Return the exception, as a RuntimeError unless its type is one of KINDS.

        place: name of the other process, for a note with its traceback. prefix: put before the message.
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
