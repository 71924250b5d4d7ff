"""The columns of the logits that a rank has, where the vocabulary is divided among ranks: each samples from its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from compiled_engine.collectives.group import Group, StandIn
from compiled_engine.sampling.token_mask import BITS, num_words


class Best(NamedTuple):
    """What the choice of a rank begins with and leaves: its tokens are those from `first_token` on.

    scores_S: float32 [S], written: the score of each row's best token, NaN if one of them is, minus infinity if none
    may be chosen.
    """

    first_token: int
    scores_S: torch.Tensor


@dataclass(frozen=True)
class VocabularySlice:
    """`size` tokens from `first` on, of `size` times as many as there are ranks; group: the ranks."""

    first: int
    size: int
    group: Group

    @classmethod
    def of(cls, vocab_size: int, group: Group | None) -> VocabularySlice:
        """Of the rank that `group` is, which divides the vocabulary; None has all of it."""
        group = group or StandIn()
        size = vocab_size // group.size
        return cls(group.rank * size, size, group)

    @property
    def whole_size(self) -> int:
        return self.size * self.group.size

    @property
    def is_divided(self) -> bool:
        return self.group.size > 1

    def own(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Those of these tokens that are here, int64, counted from the first one here."""
        ids = np.asarray(token_ids, dtype=np.int64) - self.first
        return ids[(ids >= 0) & (ids < self.size)]

    def own_words(self, words_MW: np.ndarray) -> np.ndarray:
        """The part of masks (see TokenMask) that is about the tokens here: int32 [M, num_words(size)]."""
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
        """The columns of all ranks: [R, whole size]."""
        return self.group.gather_columns(logits_RV) if self.is_divided else logits_RV

    def of_whole(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """This rank's columns of gathered ones, a view."""
        return logits_RV[:, self.first : self.first + self.size]
