"""Log-probabilities in the shapes of OpenAI's completions and chats, and of vLLM's prompt_logprobs."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from compiled_engine.frontend.outputs import CompletionOutput, Logprob
from compiled_engine.server.parsers.answer import AnswerParser
from compiled_engine.server.parsers.pieces import Content, Piece

# Stands for minus infinity, which JSON lacks; below any possible token's value.
LOWEST = -9999.0
# Most characters of a prompt's text that the search for a token skips. As many more are skipped for each character of
# preceding tokens that were not found.
MOST_SKIPPED = 4
Entries: TypeAlias = "Sequence[dict[int, Logprob] | None]"


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of a completion, one element per token.

    For the first token of a prompt, `token_logprobs` and `top_logprobs` have null. `text_offset` is in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def __add__(self, after: CompletionLogprobs) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=self.tokens + after.tokens,
            token_logprobs=self.token_logprobs + after.token_logprobs,
            top_logprobs=self.top_logprobs + after.top_logprobs,
            text_offset=self.text_offset + after.text_offset,
        )


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """The chosen token at a position, with the most likely tokens there."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of /v1/chat/completions, one entry per token."""

    content: list[TokenLogprob]


# Encoded once, since all completions of a prompt share them.
PromptLogprobs = Annotated[
    msgspec.Raw, Meta(extra_json_schema={"type": "array", "items": {"type": ["object", "null"]}})
]


class PromptLogprob(msgspec.Struct):
    """One of the likely tokens at a position of the prompt. Rank 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str | None


def completion_logprobs(
    entries: Entries, token_ids: Sequence[int], offset: int = 0, left_out: Container[int] = (), *, as_ids: bool = False
) -> tuple[CompletionLogprobs, int]:
    """Return (log-probabilities of consecutive tokens, offset at which their text ends).

    `entries` has one entry per token. The text of the tokens begins at `offset`, in characters. `left_out` has the ids
    of tokens that the text omits. With `as_ids`, tokens are written as "token_id:5".
    """
    shaped = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for entry, token_id in zip(entries, token_ids, strict=True):
        assert entry is not None
        token = entry[token_id].decoded_token or ""
        _append(shaped, token_id, token, offset, entry, as_ids)
        offset += 0 if token_id in left_out else len(token)
    return shaped, offset


def echoed_logprobs(
    entries: Entries, token_ids: Sequence[int], text: str, first_text: str, special: Container[int], *, as_ids: bool
) -> CompletionLogprobs:
    """Return the log-probabilities of a prompt's tokens, with the offset of each token in the prompt's text.

    `text` is the prompt's text. It may lack tokens whose ids are in `special`, and may differ from the tokens where the
    tokenizer normalises. `entries` has one entry per token, None for the first; `first_text` is the text of the first
    token. With `as_ids`, tokens are written as "token_id:5".
    """
    shaped = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    place = missing = 0  # `missing`: characters of tokens not found
    for index, (entry, token_id) in enumerate(zip(entries, token_ids, strict=True)):
        token = first_text if index == 0 else (entry or {})[token_id].decoded_token or ""
        is_exact = token_id in special or token.isspace()  # possibly added by the tokenizer
        within = 0 if is_exact else MOST_SKIPPED + MOST_SKIPPED * missing
        found = text.find(token, place, place + len(token) + within)
        if found != -1:
            place, missing = found, 0
        _append(shaped, token_id, token, place, entry, as_ids)
        if found != -1:
            place += len(token)
        elif not is_exact:
            missing += len(token)
    return shaped


def _append(
    shaped: CompletionLogprobs, token_id: int, token: str, offset: int, entry: dict[int, Logprob] | None, as_ids: bool
) -> None:
    shaped.tokens.append(_as_id(token_id) if as_ids else token)
    shaped.text_offset.append(offset)
    shaped.token_logprobs.append(None if entry is None else finite(entry[token_id].logprob))
    shaped.top_logprobs.append(None if entry is None else _by_text(entry, as_ids))


def chat_logprobs(entries: Entries, top: int, *, as_ids: bool = False) -> ChatLogprobs:
    """Return log-probabilities in the chat shape, each with its `top` most likely tokens; all of them if `top` is -1.

    With `as_ids`, tokens are written as "token_id:5", but `bytes` still has their text.
    """
    content = []
    most = sys.maxsize if top == -1 else top
    for entry in entries:
        assert entry is not None
        token_id, chosen = next(iter(entry.items()))
        best = sorted(
            ((key, each) for key, each in entry.items() if _rank(each) <= most), key=lambda item: _rank(item[1])
        )
        shown = [TopLogprob(_written(key, each, as_ids), finite(each.logprob), _bytes(each)) for key, each in best]
        text = _written(token_id, chosen, as_ids)
        content.append(TokenLogprob(text, finite(chosen.logprob), _bytes(chosen), shown))
    return ChatLogprobs(content)


def prompt_logprobs(entries: Entries) -> PromptLogprobs:
    """Return JSON with one element per token, null for the first token.

    An element maps the ids of likely tokens at that position to their PromptLogprob.
    """
    shaped = [
        None
        if entry is None
        else {str(key): PromptLogprob(finite(one.logprob), _rank(one), one.decoded_token) for key, one in entry.items()}
        for entry in entries
    ]
    return msgspec.Raw(msgspec.json.encode(shaped))


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _as_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _written(token_id: int, entry: Logprob, as_ids: bool) -> str:
    return _as_id(token_id) if as_ids else entry.decoded_token or ""


def _by_text(entry: dict[int, Logprob], as_ids: bool) -> dict[str, float]:
    """Return the log-probabilities of an entry by token text. Of several tokens with one text, the highest counts."""
    best: dict[str, float] = {}
    for token_id, each in entry.items():
        text = _written(token_id, each, as_ids)
        best[text] = max(finite(each.logprob), best.get(text, LOWEST))
    return best


def _rank(entry: Logprob) -> int:
    assert entry.rank is not None
    return entry.rank


def _bytes(entry: Logprob) -> list[int] | None:
    return None if entry.decoded_token is None else list(entry.decoded_token.encode(errors="replace"))


class TextLogprobs:
    """Selects the tokens that belong to an answer's text, not to reasoning, calls or markup.

    `parser` locates each piece. It is fed one character at a time, and must not be the parser that reads the answer.
    `top` is the number of most likely tokens shown. `hidden` returns whether the answer's text omits a token with the
    given text; None if it omits no tokens.
    """

    def __init__(self, parser: AnswerParser, top: int, hidden: Callable[[str], bool] | None) -> None:
        self._parser = parser
        self._top = top
        self._hidden = hidden
        self._is_text = bytearray()  # whether each parsed character is text
        self._undecided = ""  # characters not yet attributed
        self._tokens: deque[tuple[int, int, TokenLogprob]] = deque()  # start, end, entry
        self._num_characters = 0  # in all tokens so far

    def push(self, completion: CompletionOutput) -> list[TokenLogprob]:
        """Add an output. Return the log-probabilities of tokens now known to belong to the answer's text.

        They may be returned before the parser of the answer returns that text.
        """
        if completion.logprobs is None:
            return []
        for entry in chat_logprobs(completion.logprobs, self._top).content:
            if self._hidden is None or not self._hidden(entry.token):
                start, self._num_characters = self._num_characters, self._num_characters + len(entry.token)
                # A token that ends within a character belongs to the character that begins there.
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
            if isinstance(piece, Content):  # markup precedes it, and possible markup follows it
                start = self._undecided.rfind(piece.text)
                if start < 0:  # a line break that the parser has put between two texts
                    continue
                end = min(end, start + len(piece.text))
            self._is_text += bytes(start) + b"\x01" * (end - start)
            self._undecided = self._undecided[end:]
