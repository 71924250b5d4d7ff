"""Control calls, which an engine serves between steps, and the transport of errors between processes.

Calls ask something of the engine or change it. A call goes from an API process to the core, or to all replicas' cores,
and from there to every rank concerned. Calls, requests and steps are handled in the order in which they were sent;
steps launched before a call are not affected. A call returns a value or an error.
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
    """The engine cannot go on. Its requests are lost, and a new engine is needed."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """An exception of another process, which cannot start or go on."""

    kind: str  # name of the exception's type
    text: str
    where: str  # traceback

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def as_exception(self, place: str, prefix: str = "") -> Exception:
        """Return the exception if its type is one of KINDS, otherwise a RuntimeError with its name.

        place: of the other process, for a note. prefix: of the text.
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
    """A call was refused or failed, with the reason. The engine continues."""


def apply(call: ControlCall, calls: Mapping[str, Callable[..., Any]]) -> Any:
    """Serve a call by the function of its name; return its result, which is plain data.

    Raises ControlError if the call is none of `calls` or its function raises; FatalError passes through.
    """
    if call.name not in calls:
        raise ControlError(f"call is {call.name!r}; allowed: {', '.join(calls)}")
    try:
        return calls[call.name](**call.arguments)
    except (FatalError, ControlError):
        raise
    except Exception as error:
        raise ControlError(f"{call.name}: {type(error).__name__}: {error}") from error
