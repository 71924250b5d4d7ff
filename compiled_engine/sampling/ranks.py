"""Slices of logits: a rank's columns of a divided vocabulary, and chunks of rows.

Each rank samples from its own columns, and the ranks exchange each row's best score and token. Noise depends only on
seed, position and token id, so the best of the ranks' best tokens is the token that a single device would choose. Keys
order tokens by score, then by lowest token id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from compiled_engine.parallel.group import FakeGroup, Group
from compiled_engine.sampling.sampled_tokens import NOT_A_NUMBER, NOTHING_ALLOWED
from compiled_engine.sampling.token_mask import BITS, num_words
from compiled_engine.sampling.value_checks import FLOAT32_MAX

# float32 elements: 16 MB for each temporary tensor.
MAX_ELEMENTS = 1 << 22


def row_chunks(num_rows: int, vocab_size: int, max_elements: int = MAX_ELEMENTS) -> Iterator[slice]:
    """Return slices that cover num_rows rows of vocab_size elements, each of at most max_elements or a single row."""
    step = max(1, max_elements // vocab_size)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


# Most logits of a row that each rank contributes for top-k; for a larger k whole rows are gathered.
CANDIDATES = 1024
_SIGN_MASK = 2**31 - 1


class Best(NamedTuple):
    """Receives the score of each row's best token among one rank's tokens. `gumbel.sample` writes it."""

    first_token: int  # token id of the rank's first column
    # float32 [S], output: score of the best token; NaN if any is NaN, minus infinity if none is allowed
    scores_S: torch.Tensor


@dataclass(frozen=True)
class VocabularySlice:
    """A rank's tokens: `size` token ids from `first` on. All ranks of the group have equally many tokens."""

    first: int
    size: int
    group: Group

    @classmethod
    def of(cls, vocab_size: int, group: Group | None) -> VocabularySlice:
        """Return this rank's slice of a vocabulary that the group divides; without a group, all of it."""
        group = group or FakeGroup()
        size = vocab_size // group.size
        return cls(group.rank * size, size, group)

    @property
    def whole_size(self) -> int:
        return self.size * self.group.size

    @cached_property
    def is_divided(self) -> bool:
        return self.group.size > 1

    def own(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the token ids that are in the slice, int64, relative to the slice's first token."""
        ids = np.asarray(token_ids, dtype=np.int64) - self.first
        return ids[(ids >= 0) & (ids < self.size)]

    def own_words(self, words_MW: np.ndarray) -> np.ndarray:
        """Return the part of masks (see TokenMask) for the slice's tokens: int32 [M, num_words(size)]."""
        if not self.is_divided:
            return words_MW
        start, shift = divmod(self.first, BITS)
        count = num_words(self.size)
        words = np.zeros((len(words_MW), count + 1), np.uint64)
        have = words_MW[:, start : start + count + 1].view(np.uint32)
        words[:, : have.shape[1]] = have
        found = (words[:, :-1] >> np.uint64(shift)) | (words[:, 1:] << np.uint64(BITS - shift))
        return found.astype(np.uint32).view(np.int32)

    def gathered(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return logits with the columns of all ranks, [R, whole size], from this rank's columns."""
        return self.group.gather_columns(logits_RV) if self.is_divided else logits_RV

    def of_whole(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns, as a view, of logits with the columns of all ranks."""
        return logits_RV[:, self.first : self.first + self.size]


def choose_of_ranks(
    choose: Callable[..., None],
    vocabulary: VocabularySlice,
    row_index_S: torch.Tensor,
    token_ids_S: torch.Tensor,
) -> None:
    """Choose each row's best token of all ranks, and write it to token_ids_S. All ranks call this together.

    choose: gumbel.sample with all arguments except the last, `best`, already given; it must write to token_ids_S too.
    row_index_S: -1 for padding, which gets token 0.
    """
    scores_S = torch.empty(len(token_ids_S), dtype=torch.float32, device=token_ids_S.device)
    choose(Best(vocabulary.first, scores_S))
    marked_S = torch.where(scores_S.isnan(), torch.inf, scores_S.clamp(max=FLOAT32_MAX))
    keys_SR = vocabulary.group.gather_columns(keys_of(marked_S, token_ids_S)[:, None])
    token_ids_S.copy_(tokens_of(keys_SR.amax(1), row_index_S))


def keys_of(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return int64 keys, which order tokens by score, then by lowest token id. A score of infinity stands for NaN."""
    bits = (scores + 0.0).view(torch.int32)  # minus zero equals zero
    ordered = torch.where(bits < 0, bits ^ _SIGN_MASK, bits).long()
    return (ordered << 32) | (_SIGN_MASK - token_ids.clamp(min=0).long())


def tokens_of(keys_S: torch.Tensor, row_index_S: torch.Tensor) -> torch.Tensor:
    """Return the token ids that keys stand for, or error codes (sampled_tokens.py); 0 for padding rows."""
    ordered_S = (keys_S >> 32).int()
    scores_S = torch.where(ordered_S < 0, ordered_S ^ _SIGN_MASK, ordered_S).view(torch.float32)
    token_ids_S = _SIGN_MASK - (keys_S & _SIGN_MASK)
    token_ids_S = torch.where(scores_S == torch.inf, NOT_A_NUMBER, token_ids_S)
    token_ids_S = torch.where(scores_S == -torch.inf, NOTHING_ALLOWED, token_ids_S)
    return torch.where(row_index_S >= 0, token_ids_S, 0)


def filter_candidates(
    logits_SV: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray, vocabulary: VocabularySlice
) -> torch.Tensor:
    """Return logits [S, C] that suffice to compute the thresholds of top-k, top-p and min-p.

    top_k, top_p: values of the rows with filters. If the vocabulary is divided among ranks, the result has the k
    largest logits of each rank, gathered from all ranks; they include the k largest of all. k is the largest top_k, or
    1 if all rows have min-p alone. The whole vocabulary is returned if it is not divided, if k exceeds CANDIDATES, or
    if a row has top-p without top-k, which may need any number of logits.
    """
    if not vocabulary.is_divided:
        return logits_SV
    count = int(top_k.max(initial=1))
    if count > CANDIDATES or ((top_k == 0) & (top_p < 1)).any():
        return vocabulary.gathered(logits_SV)
    largest_SK = logits_SV.topk(min(count, logits_SV.shape[1]), dim=1).values
    return vocabulary.gathered(largest_SK)
