"""Serves control calls, which query or change an engine between two steps, and passes errors between processes.

A call goes from an API process to the core, or to the cores of all replicas, and from there to the ranks that it
concerns. Calls, requests and steps arrive in the order in which they were sent.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from compiled_engine.engine.messages import ControlCall

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests when steps are paused, see EngineCore.pause."""


def apply(call: ControlCall, calls: Mapping[str, Callable[..., Any]]) -> Any:
    """Call the function that a control call names, and return its result, which is plain data.

    calls: the allowed functions, by name. Raises ControlError if the name is not among them, or if the function raises
    any exception but FatalError, which is raised unchanged.
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
    """Raised if a control call was refused or failed. The message has the reason. The engine continues."""


class FatalError(RuntimeError):
    """Raised if the engine cannot continue. Its requests are lost, and a new engine is needed."""


KINDS = ValueError | TypeError | OSError | RuntimeError | MemoryError


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Describes an exception that ended another process or kept it from starting, as plain data."""

    kind: str  # name of the exception's type
    text: str
    where: str  # traceback

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def as_exception(self, place: str, prefix: str = "") -> Exception:
        """Return an exception to raise in this process, with the original's traceback in a note.

        It has the original's type if that is a built-in subclass of one of KINDS, except UnicodeError and its
        subclasses; otherwise it is a RuntimeError. place: name of the other process, for the note. prefix: put before
        the message.
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
