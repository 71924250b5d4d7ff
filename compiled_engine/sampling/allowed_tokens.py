"""allowed_token_ids: for each row that has them a mask that stays on the device, unlike a token mask's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compiled_engine.sampling.async_copies import upload
from compiled_engine.sampling.row_table import RowTable
from compiled_engine.sampling.step_masks import StepMasks
from compiled_engine.sampling.token_mask import BITS, num_words
from compiled_engine.sampling.vocabulary_slice import VocabularySlice


def mask_of(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """The mask (see TokenMask) that allows these tokens: int32 [num_words]."""
    bits = np.zeros(num_words(vocab_size) * BITS, np.uint8)
    bits[np.asarray(token_ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


class AllowedTokens:
    """The masks are allocated, an eighth of a byte for each row and token, when the first request needs one."""

    def __init__(self, num_rows: int, vocabulary: VocabularySlice, table: RowTable, device: torch.device) -> None:
        self._num_rows, self._vocabulary, self._device = num_rows, vocabulary, device
        self._table = table
        self._masks_NW: torch.Tensor | None = None

    def set_row(self, row: int, token_ids: Sequence[int] | None) -> None:
        """What a row may sample from now on; None for all."""
        self._table.set_row(row, allowed_mask=-1 if token_ids is None else row)
        if token_ids is None:
            return
        if self._masks_NW is None:
            shape = (self._num_rows, num_words(self._vocabulary.size))
            self._masks_NW = torch.zeros(shape, dtype=torch.int32, device=self._device)
        mask_W = mask_of(self._vocabulary.own(token_ids), self._vocabulary.size)
        self._masks_NW[row].copy_(upload(mask_W, self._device))

    def of(self, row_index_R: torch.Tensor) -> StepMasks:
        """The masks of these rows (int32 [R], on the device, none of them padding), at least one of which has one."""
        assert self._masks_NW is not None
        return StepMasks(self._masks_NW, self._table.device["allowed_mask"].index_select(0, row_index_R))
