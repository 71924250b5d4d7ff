"""The log-probabilities of an answer's text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from compiled_engine.frontend.outputs import CompletionOutput
from compiled_engine.server.logprob_shapes import TokenLogprob, chat_logprobs
from compiled_engine.server.parsers.answer import AnswerParser
from compiled_engine.server.parsers.pieces import Content, Piece


class TextLogprobs:
    """Finds the tokens of an answer that are of its text: not of reasoning, of calls, or of the markup around them.

    parser: one of its own, which reads a character at a time, so that each piece comes where it ends. top: how many of
    the most likely tokens are shown. hidden: whether a token with this text is in no answer; None if all are there.
    """

    def __init__(self, parser: AnswerParser, top: int, hidden: Callable[[str], bool] | None) -> None:
        self._parser = parser
        self._top = top
        self._hidden = hidden
        self._is_text = bytearray()  # of each character that was read, whether it is text
        self._undecided = ""  # the characters after those
        self._tokens: deque[tuple[int, int, TokenLogprob]] = deque()  # where each begins and ends
        self._num_characters = 0  # of all tokens

    def push(self, completion: CompletionOutput) -> list[TokenLogprob]:
        """The next ones, once what an answer goes on with has come. Text may come later than its tokens."""
        if completion.logprobs is None:
            return []
        for entry in chat_logprobs(completion.logprobs, self._top).content:
            if self._hidden is None or not self._hidden(entry.token):
                start, self._num_characters = self._num_characters, self._num_characters + len(entry.token)
                # One that ends within a character is of the character that begins there.
                self._tokens.append((start, max(start + 1, self._num_characters), entry))
        for character in completion.text:
            self._undecided += character
            self._decide(self._parser.push(character))
        ended = completion.finish_reason is not None
        if ended:
            self._decide(self._parser.finish())
        found = []
        while self._tokens:
            start, end, entry = self._tokens[0]
            if any(self._is_text[start:end]):
                found.append(entry)
            elif end > len(self._is_text) and not ended:
                break
            self._tokens.popleft()
        return found

    def _decide(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            start = end = len(self._undecided)
            if isinstance(piece, Content):  # markup stands before it, and after it what may become some
                start = max(0, self._undecided.rfind(piece.text))
                end = min(end, start + len(piece.text))
            self._is_text += bytes(start) + b"\x01" * (end - start)
            self._undecided = self._undecided[end:]
