"""Stores log-probabilities for users as a few numbers per token, and builds the entries on access."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, TypeVar, overload

import numpy as np

from compiled_engine.frontend.detokenizer import REPLACEMENT, Detokenizer
from compiled_engine.frontend.outputs import Logprob
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows, row_width

Entry = TypeVar("Entry")
"""dict[int, Logprob], or None for a prompt's first token."""


class GrowingLogprobs:
    """Collects the log-probabilities of a completion or a prompt, one row per token.

    `num_top` is the requested number of most likely tokens, -1 for the whole vocabulary. `context` has the preceding
    tokens, which affect the first token's text. A prompt's first token has no row: its id is given as `context`, and
    its entry as `first`.
    """

    def __init__(
        self,
        num_top: int,
        tokenizer: Tokenizer | None,
        context: Sequence[int],
        params: SamplingParams,
        first: Sequence[dict[int, Logprob] | None] = (),
    ) -> None:
        self._row_bytes = 0 if num_top == -1 else 4 * row_width(num_top)
        self._tokenizer = tokenizer if params.detokenize else None
        self._context, self._params = context, params
        self._data = bytearray()
        self._first = list(first)
        self._texts: TokenTexts | None = None
        self._decoded: list[tuple[str, ...]] = []  # the tokens' texts of each row read so far
        self._ended = self._text_is_complete = False

    def __len__(self) -> int:
        return len(self._first) + self._num_rows

    @property
    def _num_rows(self) -> int:
        return len(self._data) // max(1, self._row_bytes)

    def add(self, rows: LogprobRows) -> None:
        """Append the rows of the next tokens."""
        for index in range(rows.num_rows):
            self.add_row(rows.data, index * rows.row_bytes, rows.row_bytes)

    def add_row(self, data: bytes, start: int, row_bytes: int) -> None:
        """Append the next token's row, keeping only the requested entries."""
        size = self._row_bytes = self._row_bytes or row_bytes
        self._data += data[start : start + size]

    def end(self) -> None:
        """Record that no token follows, so that the last token gets the held-back text."""
        self._ended = True

    def sum_of_chosen(self) -> float:
        """Return the sum of the chosen tokens' log-probabilities."""
        values_R = np.frombuffer(self._data, np.float32)[2 :: max(1, self._row_bytes // 4)]
        return float(values_R.sum(dtype=np.float64))

    def snapshot(self) -> LogprobList[Any]:
        """Return the entries so far as a sequence that no longer grows."""
        return LogprobList(self, len(self))

    def since(self, first: int) -> list[Any]:
        """Return the entries from the index `first` to the last."""
        return list(self.entries(first, len(self)))

    def entries(self, start: int, stop: int) -> Iterator[Any]:
        """Build the entries from `start` to before `stop`. They are not cached, since most are read once."""
        yield from self._first[start:stop]
        start, stop = (max(0, index - len(self._first)) for index in (start, stop))
        if start >= stop:
            return
        self._decode(stop)
        rows = LogprobRows(stop - start, bytes(self._data[start * self._row_bytes : stop * self._row_bytes]))
        nothing: Iterator[Sequence[str | None]] = repeat((None,) * (self._row_bytes // 8))
        texts = nothing if self._tokenizer is None else iter(self._decoded[start:stop])
        for rank, token_ids, logprobs, decoded in zip(*rows.columns(), texts, strict=False):
            yield _entry(rank, token_ids, logprobs, decoded)

    def arrays(self, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and log-probabilities of the first `stop` entries, see `LogprobList.arrays`."""
        count = max(0, stop - len(self._first))
        rows_RW = LogprobRows(count, bytes(self._data[: count * self._row_bytes])).array()
        return rows_RW[:, 1::2], rows_RW[:, 2::2].view(np.float32)

    def _decode(self, count: int) -> None:
        """Decode the tokens of the first `count` rows in order, since a token's text depends on previous tokens."""
        if self._tokenizer is None or self._text_is_complete:
            return
        done = len(self._decoded)
        if self._texts is None:
            self._texts = _token_texts(self._tokenizer, () if self._first else self._context, self._params)
            if self._first:
                self._texts.push(self._context)
        if count > done:
            rows = LogprobRows(count - done, bytes(self._data[done * self._row_bytes : count * self._row_bytes]))
            self._decoded += [tuple(self._texts.push(token_ids)) for token_ids in rows.columns()[1]]
        if self._ended and count == self._num_rows:
            chosen, *others = self._decoded[-1]
            self._decoded[-1] = (self._texts.flush() + chosen, *others)
            self._text_is_complete = True


class LogprobList(Sequence[Entry]):
    """A lazy list of entries, equal to a list of the same entries. Pickling or copying yields a plain list.

    An entry has the chosen token first, then the most likely ones.
    """

    __slots__ = ("_growing", "_length")

    def __init__(self, growing: GrowingLogprobs, length: int) -> None:
        self._growing, self._length = growing, length

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids [N, 1 + k], int32, and their log-probabilities, fp32, without building entries.

        Each of the N rows has the chosen token, then the k most likely ones. A prompt's first token has no row.
        """
        return self._growing.arrays(self._length)

    def _list(self) -> list[Entry]:
        return list(self)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return self._list()[index]
        place = range(self._length)[index]
        (entry,) = self._growing.entries(place, place + 1)
        return entry

    def __iter__(self) -> Iterator[Entry]:
        return self._growing.entries(0, self._length)

    def __add__(self, other: Sequence[Entry]) -> list[Entry]:
        return [*self, *other] if isinstance(other, LogprobList | list) else NotImplemented

    def __radd__(self, other: list[Entry]) -> list[Entry]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LogprobList):
            other = other._list()
        return self._list() == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._list())

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self._list(),)


def first_text(tokenizer: Tokenizer, token_ids: Sequence[int], params: SamplingParams) -> str:
    """Return the text of a prompt's first token, decoded like the texts of the other tokens."""
    texts = _token_texts(tokenizer, (), params)
    (text,) = texts.push(token_ids[:1])
    return text if len(token_ids) > 1 else text + texts.flush()


def _token_texts(tokenizer: Tokenizer, context: Sequence[int], params: SamplingParams) -> TokenTexts:
    return TokenTexts(
        tokenizer,
        context,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


def _entry(
    rank: int, token_ids: Sequence[int], logprobs: Sequence[float], texts: Sequence[str | None]
) -> dict[int, Logprob]:
    """Build an entry: the chosen token with the rank `rank`, then the most likely tokens, ranked from 1."""
    chosen = Logprob(logprobs[0], rank, texts[0])
    found = dict(zip(token_ids, map(Logprob, logprobs, range(len(token_ids)), texts), strict=True))
    found[token_ids[0]] = chosen  # also where it is among the most likely
    return found


# Texts of single tokens for log-probabilities. Texts of consecutive tokens join to the whole text.


class TokenTexts:
    """Returns the text of each token of a completion or prompt. The arguments are those of Detokenizer.

    A token that ends within a character has the text "", and the token that completes the character has all of it. A
    run of byte tokens is decoded as a whole once it has ended; its characters belong to the text of the next token, or
    to the result of `flush`. A skipped special token has text and does not end a run.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """Add the token `token_ids[0]`. Return its text, and the texts that the other ids would have in its place."""
        chosen, *others = token_ids
        texts = list(map(self._as_next, others))
        if self._detokenizer.leaves_no_text(chosen):
            return [self._tokenizer.decode_token(chosen), *texts]
        return [self._detokenizer.push([chosen]), *texts]

    def flush(self) -> str:
        """Return the last token's remaining text, such as U+FFFD for an incomplete character."""
        return self._detokenizer.flush()

    def _as_next(self, token_id: int) -> str:
        text = self._tokenizer.decode_token(token_id)
        return self._detokenizer.peek(token_id) if REPLACEMENT in text else text
