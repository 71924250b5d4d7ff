"""Pieces of a model's parsed output: content, reasoning, and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call."""

    index: int  # counts an answer's calls from 0
    name: str
    id: str | None = None  # as the model wrote it; None if its format has no ids


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments: JSON as the model wrote it, or converted from the model's own syntax.

    The joined parts are an object, unless the call is cut off or invalid.
    """

    index: int
    text: str


Piece: TypeAlias = Content | Reasoning | CallStart | CallArguments


class TextParser(Protocol):
    """Parses text that arrives in chunks. The pieces, joined, do not depend on how the text is divided into chunks."""

    def push(self, text: str) -> list[Piece]:
        """Add text. Return the pieces that are now certain."""
        ...

    def finish(self) -> list[Piece]:
        """Return the pieces of the held-back text at the end of the answer. Nothing may be pushed afterwards."""
        ...
