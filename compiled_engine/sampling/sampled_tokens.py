"""The sampler's results for each row: a token or an error code, and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NOT_A_NUMBER = -2
NOTHING_ALLOWED = -3

WHY_NO_TOKEN = {
    NOT_A_NUMBER: "the logits of the next token are NaN: an overflow in the model (dtype float16 overflows sooner than "
    "bfloat16 and float32), NaN in its weights, or a logits processor's work",
    NOTHING_ALLOWED: "no token may come next: all logits are minus infinity, after what allowed_token_ids, bad_words, "
    "min_tokens, token_mask and logits processors forbid",
}
"""Error message of a request for each error code."""

NO_TOKENS = frozenset(WHY_NO_TOKEN)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the chosen token first, then the top k, most likely first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int  # the chosen token's rank in the vocabulary; 1: most likely


def row_width(num_top: int) -> int:
    """Return how many numbers a row of LogprobRows has for the chosen token and the top `num_top` tokens."""
    return 3 + 2 * num_top


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of 1 + k tokens at each of `num_rows` positions. Iteration yields a TokenLogprobs per position.

    `data` is int32 [num_rows, 3 + 2 * k], little-endian: the chosen token's rank, then pairs of a token id and its
    log-probability as float32, the chosen token first. So a row of fewer tokens is a prefix of a row of more.
    """

    num_rows: int
    data: bytes

    @classmethod
    def of_array(cls, rows_RW: np.ndarray) -> LogprobRows:
        """Return LogprobRows with a copy of rows_RW, int32 [R, 3 + 2 * k]."""
        return cls(len(rows_RW), rows_RW.tobytes())

    @classmethod
    def of(cls, entries: Iterable[TokenLogprobs]) -> LogprobRows:
        """Return LogprobRows with an entry for each position, see TokenLogprobs.

        Raises ValueError unless all entries have the same number of tokens.
        """
        rows = []
        for token_ids, logprobs, rank in entries:
            row = np.full(row_width(len(token_ids) - 1), rank, np.int32)
            row[1::2], row[2::2] = token_ids, np.array(logprobs, np.float32).view(np.int32)
            rows.append(row)
        return cls.of_array(np.stack(rows)) if rows else cls(0, b"")

    @property
    def row_bytes(self) -> int:
        return len(self.data) // self.num_rows if self.num_rows else 4 * row_width(0)

    def array(self) -> np.ndarray:
        """Return `data` as an array, int32 [num_rows, 3 + 2 * k], read-only."""
        return np.frombuffer(self.data, np.int32).reshape(self.num_rows, self.row_bytes // 4)

    def select(self, rows: slice | Sequence[bool] | Sequence[int]) -> LogprobRows:
        """Return LogprobRows with some of the rows. rows: a slice, a bool for each row, or the rows' indices."""
        return LogprobRows.of_array(self.array()[rows])

    def __len__(self) -> int:
        return self.num_rows

    def columns(self) -> tuple[list[int], list[list[int]], list[list[float]]]:
        """Return (ranks of the chosen tokens, token ids, log-probabilities), lists with an entry for each row."""
        rows_RW = self.array()
        return rows_RW[:, 0].tolist(), rows_RW[:, 1::2].tolist(), rows_RW[:, 2::2].view(np.float32).tolist()

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for rank, token_ids, logprobs in zip(*self.columns(), strict=True):
            yield TokenLogprobs(tuple(token_ids), tuple(logprobs), rank)
