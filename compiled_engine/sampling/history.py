"""What sampling has to remember of each row's tokens, on the device: how often each came, and the last ones.

Both are allocated when the first request needs them: token counts for penalties, tails for bad words. They are
written from the host when a request takes a row, and from the sampled tokens by the device after each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compiled_engine.sampling.async_copies import upload
from compiled_engine.sampling.vocabulary_slice import VocabularySlice

# A count and, in the sign bit, whether the prompt has the token: int16. Counts stay at the largest once there.
IN_PROMPT = -(2**15)
MAX_COUNT = 2**15 - 1


def penalty_bytes(max_num_rows: int, vocab_size: int) -> int:
    """Device memory that the first request with penalties takes, to be set aside before the KV cache is sized."""
    return max_num_rows * vocab_size * torch.int16.itemsize


class History:
    """`counts_NV`: int16 [N, V], V columns of a rank; `tail_NL`: int32 [N, L], the last L generated tokens, -1 where
    there are fewer. None until a row needs it.
    """

    def __init__(self, num_rows: int, vocabulary: VocabularySlice, device: torch.device) -> None:
        self._num_rows, self._vocabulary, self._device = num_rows, vocabulary, device
        self.counts_NV: torch.Tensor | None = None
        self.tail_NL: torch.Tensor | None = None

    def start_counts(self, row: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Count a request's tokens so far; `penalty_bytes` are allocated the first time."""
        if self.counts_NV is None:
            shape = (self._num_rows, self._vocabulary.size)
            self.counts_NV = torch.zeros(shape, dtype=torch.int16, device=self._device)
        counts_V = np.zeros(self._vocabulary.size, dtype=np.int16)
        token_ids, counts = np.unique(self._vocabulary.own(output_ids), return_counts=True)
        counts_V[token_ids] = np.minimum(counts, MAX_COUNT)
        counts_V[self._vocabulary.own(prompt_ids)] |= np.int16(IN_PROMPT)
        self.counts_NV[row].copy_(upload(counts_V, self._device))

    def start_tail(self, row: int, output_ids: Sequence[int], length: int) -> None:
        """Remember at least `length` last generated tokens of a row from now on; longer tails make all longer."""
        have = 0 if self.tail_NL is None else self.tail_NL.shape[1]
        if self.tail_NL is None or have < length:
            longer_NL = torch.full((self._num_rows, length), -1, dtype=torch.int32, device=self._device)
            if self.tail_NL is not None:
                longer_NL[:, length - have :] = self.tail_NL
            self.tail_NL, have = longer_NL, length
        tail_L = np.full(have, -1, dtype=np.int32)
        last = list(output_ids[-have:])
        tail_L[have - len(last) :] = last
        self.tail_NL[row].copy_(upload(tail_L, self._device))


def record_(
    row_index_S: torch.Tensor,
    token_ids_S: torch.Tensor,
    counts_NV: torch.Tensor | None,
    tail_NL: torch.Tensor | None,
    first_token: int = 0,
) -> None:
    """Take each row's sampled token (int64 [S]) into its history, on the CPU.

    row_index_S: int32 [S]; -1 is padding, and no other row may come twice. What is no token (no_token.py) is left out.
    first_token: the id of the counts' first column.
    """
    taken_S = (row_index_S >= 0) & (token_ids_S >= 0)
    rows, token_ids = row_index_S[taken_S].long(), token_ids_S[taken_S]
    if counts_NV is not None:
        own = (token_ids >= first_token) & (token_ids < first_token + counts_NV.shape[1])
        places = rows[own], token_ids[own] - first_token
        words = counts_NV[places]
        counts_NV[places] = torch.where((words & MAX_COUNT) < MAX_COUNT, words + 1, words)
    if tail_NL is not None:
        tail_NL[rows] = torch.cat([tail_NL[rows, 1:], token_ids[:, None].int()], dim=1)
