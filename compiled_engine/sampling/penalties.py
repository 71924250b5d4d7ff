"""Repetition, frequency and presence penalties, from counts of each row's tokens that are kept up to date.

Repetition penalty: Keskar et al., "CTRL" (2019), in the form of transformers: the logit of a token in the prompt or
the output is divided if positive, multiplied if negative. Frequency and presence penalties: those of OpenAI's API,
for tokens in the output.
"""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.sampling.history import MAX_COUNT
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.row_table import RowTable


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def penalise_(logits_RV: torch.Tensor, row_index_R: torch.Tensor, counts_NV: torch.Tensor, table: RowTable) -> None:
    """Apply each row's penalties in place, on the CPU; only the logits of tokens that occurred are touched.

    logits_RV: float32 [R, V]. row_index_R: int32 [R], rows of the table and of counts_NV (int16 [N, V], see
    history.py), none of them padding.
    """
    for logits_V, row in zip(logits_RV.numpy(), row_index_R.tolist(), strict=True):
        repetition, frequency, presence = (
            table.host[name][row] for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
        )
        if repetition == 1 and frequency == 0 and presence == 0:
            continue  # of another request before, the row may still have counts
        words_V = counts_NV[row].numpy()
        token_ids = np.flatnonzero(words_V)
        counts = (words_V[token_ids] & MAX_COUNT).astype(np.float32)
        logits = logits_V[token_ids]
        with np.errstate(over="ignore"):  # to infinity, as on the device
            logits = np.where(logits > 0, logits / repetition, logits * repetition)
        logits_V[token_ids] = logits - (frequency * counts + presence * (counts > 0))
