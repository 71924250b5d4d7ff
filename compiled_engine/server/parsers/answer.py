"""Parse a chat answer with a reasoning parser and a tool call parser, one after the other."""

from __future__ import annotations

from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece, TextParser

# Characters parsed at once. Each mark copies the text behind it, so longer parts cost more.
LONGEST_PART = 4096


class AnswerParser:
    """Splits an answer into pieces. The parser `reasoning` reads it first; the parser `tools` reads its content.

    `reasoning` is None if the answer cannot have reasoning. `tools` is None if there are no tools, or if `reasoning`
    reads calls too. With `one_call`, all calls but the first are dropped (parallel_tool_calls is false).
    """

    def __init__(self, reasoning: TextParser | None, tools: TextParser | None, *, one_call: bool = False) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call

    def push(self, text: str) -> list[Piece]:
        found: list[Piece] = []
        for start in range(0, max(len(text), 1), LONGEST_PART):
            part = text[start : start + LONGEST_PART]
            pieces: list[Piece] = [Content(part)] if self._reasoning is None else self._reasoning.push(part)
            found += self._of_tools(pieces)
        return self._counted(found)

    def finish(self) -> list[Piece]:
        pieces = [] if self._reasoning is None else self._of_tools(self._reasoning.finish())
        if self._tools is not None:
            pieces += self._tools.finish()
        return self._counted(pieces)

    def _of_tools(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._tools.push(piece.text) if isinstance(piece, Content) else [piece]
        return found

    def _counted(self, pieces: list[Piece]) -> list[Piece]:
        if not self._one_call:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, CallStart | CallArguments) or piece.index == 0]


def joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces, with adjacent pieces of one type merged. Call arguments are merged only within a call."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            result[-1] = CallArguments(piece.index, last.text + piece.text)
        elif not isinstance(piece, CallStart | CallArguments) and type(last) is type(piece):
            result[-1] = type(piece)(last.text + piece.text)  # type: ignore[union-attr]
        else:
            result.append(piece)
    return result
