"""What a model's text is made of once its markup is read: content, reasoning, and calls of tools."""

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
    """The model calls a tool; `index` counts the calls of an answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments: JSON as the model wrote it, an object once all parts are joined."""

    index: int
    text: str


Piece: TypeAlias = Content | Reasoning | CallStart | CallArguments


class TextParser(Protocol):
    """Reads text that arrives in chunks. What comes out, joined, depends on the whole text, not on the chunks."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain once `text` has followed what came before."""
        ...

    def finish(self) -> list[Piece]:
        """What was held back, when no more text comes. Nothing may be pushed after it."""
        ...
