"""An exception as plain data, on its way from the process that raised it to the one that asked."""

from __future__ import annotations

import builtins
import traceback

import msgspec

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
        """What was raised: if it is no exception of Python's own, a RuntimeError with its name.

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
