"""The pieces of a model's text once its markup is parsed: content, reasoning, and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself, before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a tool; `index` counts the calls of an answer from 0. id: as the model wrote it; None if its
    format has no ids."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments: JSON as the model wrote it, an object once all parts are joined."""

    index: int
    text: str


Piece: TypeAlias = Content | Reasoning | CallStart | CallArguments


class TextParser(Protocol):
    """Reads text that arrives in chunks. The joined output depends on the whole text, not on the chunks."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain once `text` has followed what came before."""
        ...

    def finish(self) -> list[Piece]:
        """Return the text that was held back, at the end. Nothing may be pushed afterwards."""
        ...
