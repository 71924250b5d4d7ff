"""Log-probabilities as users see them, made when someone looks at them: until then a token's are a few numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from compiled_engine.frontend.outputs import Logprob
from compiled_engine.frontend.token_texts import TokenTexts
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.token_logprobs import LogprobRows, TokenLogprobs, row_width

Entry = TypeVar("Entry")
"""dict[int, Logprob]; of a prompt, None where nothing precedes a token."""


class GrowingLogprobs:
    """Those of one completion, or of one prompt; grows by a row a token.

    num_top: most likely tokens that were asked for; -1 for the whole vocabulary. context: the tokens that come before,
    which decide how the first one reads. first: entries that come before the rows.
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
        self._tokenizer, self._context, self._params = tokenizer, context, params
        self._data = bytearray()
        self._entries: list[Any] = list(first)
        self._num_first = len(self._entries)
        self._texts: TokenTexts | None = None
        self._text_is_complete = False
        self._ended = False

    def __len__(self) -> int:
        return self._num_first + self._num_rows

    @property
    def _num_rows(self) -> int:
        return len(self._data) // max(1, self._row_bytes)

    def add(self, rows: LogprobRows) -> None:
        """The next tokens' rows."""
        for index in range(rows.num_rows):
            self.add_row(rows.data, index * rows.row_bytes, rows.row_bytes)

    def add_row(self, data: bytes, start: int, row_bytes: int) -> None:
        """The next token's row, of which only what was asked for is kept."""
        size = self._row_bytes = self._row_bytes or row_bytes
        self._data += data[start : start + size]

    def end(self) -> None:
        """No more come: the last token has the text that was held back."""
        self._ended = True

    def sum_of_chosen(self) -> float:
        """Of the chosen tokens' log-probabilities."""
        values_R = np.frombuffer(self._data, np.float32)[2 :: max(1, self._row_bytes // 4)]
        return float(values_R.sum(dtype=np.float64))

    def snapshot(self) -> LogprobList[Any]:
        """What there is now."""
        return LogprobList(self, len(self))

    def since(self, first: int) -> list[Any]:
        """Entries from `first` on, as they are now."""
        return self.entries(len(self))[first:] if first < len(self) else []

    def entries(self, count: int) -> list[Any]:
        """The first `count`, or more."""
        made = len(self._entries) - self._num_first
        missing = count - len(self._entries)
        if missing > 0:
            if self._texts is None and self._tokenizer is not None:
                self._texts = _token_texts(self._tokenizer, self._context, self._params)
            part = bytes(self._data[made * self._row_bytes : (made + missing) * self._row_bytes])
            self._entries += [_entry(row, self._texts) for row in LogprobRows(missing, part)]
        if self._ended and count == len(self) and not self._text_is_complete:
            self._complete_last_text()
        return self._entries

    def _complete_last_text(self) -> None:
        self._text_is_complete = True
        rest = self._texts.flush() if self._texts is not None else ""
        last = self._entries[-1] if self._entries else None
        if last and rest:
            (token_id, chosen), *others = last.items()
            text = rest + (chosen.decoded_token or "")
            self._entries[-1] = {token_id: Logprob(chosen.logprob, chosen.rank, text), **dict(others)}


class LogprobList(Sequence[Entry]):
    """A list of entries in all but its type: equal to a list of the same entries, and one once it is pickled or copied.

    An entry has the chosen token first, then the most likely ones.
    """

    __slots__ = ("_growing", "_length")

    def __init__(self, growing: GrowingLogprobs, length: int) -> None:
        self._growing, self._length = growing, length

    def _list(self) -> list[Entry]:
        return self._growing.entries(self._length)[: self._length]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        return self._list()[index]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._list())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LogprobList):
            other = other._list()
        return self._list() == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._list())

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self._list(),)


def _token_texts(tokenizer: Tokenizer, context: Sequence[int], params: SamplingParams) -> TokenTexts:
    return TokenTexts(
        tokenizer,
        context,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


def _entry(row: TokenLogprobs, texts: TokenTexts | None) -> dict[int, Logprob]:
    """The chosen token with its rank, then the most likely ones, ranked from 1."""
    ranks = (row.rank, *range(1, len(row.token_ids)))
    decoded: Sequence[str | None] = [None] * len(ranks) if texts is None else texts.push(row.token_ids)
    found: dict[int, Logprob] = {}
    for token_id, logprob, rank, text in zip(row.token_ids, row.logprobs, ranks, decoded, strict=True):
        found.setdefault(token_id, Logprob(logprob, rank, text))
    return found
