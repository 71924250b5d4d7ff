"""Repetition, frequency and presence penalties, from counts of each row's tokens that are kept up to date.

Only the logits of tokens that occur are touched: the cost goes with the length of the sequences, not with the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from compiled_engine.sampling.params import SamplingParams


class TokenCounts:
    """The different tokens of a sequence, and how often each was generated (0: it is in the prompt alone)."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int], capacity: int) -> None:
        """capacity: how many different tokens there may come to be; memory is taken as they come."""
        self._token_ids = np.empty(capacity, dtype=np.int64)
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self.token_ids[:] = list(self._slots)
        for token_id in output_ids:
            self.add(token_id)

    @property
    def token_ids(self) -> np.ndarray:
        return self._token_ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._slots)]

    def add(self, token_id: int) -> None:
        """Count one more generated token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        self._token_ids[slot] = token_id
        self._counts[slot] += 1


class RowPenalties(NamedTuple):
    """One row's penalties and what they apply to."""

    repetition: float
    frequency: float
    presence: float
    tokens: TokenCounts


def row_penalties(
    params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int], capacity: int
) -> RowPenalties | None:
    """None if the request has no penalties. capacity: see TokenCounts."""
    if params.repetition_penalty == 1 and params.frequency_penalty == 0 and params.presence_penalty == 0:
        return None
    tokens = TokenCounts(prompt_ids, output_ids, capacity)
    return RowPenalties(params.repetition_penalty, params.frequency_penalty, params.presence_penalty, tokens)


def penalise_(logits_RV: torch.Tensor, penalties: Sequence[tuple[int, RowPenalties]]) -> None:
    """Apply (index of the row in logits_RV, its penalties) in place; logits_RV is float32 [R, V].

    Repetition penalty: Keskar et al., "CTRL" (2019), in the form of transformers: the logit of a token in the
    prompt or the output is divided if positive, multiplied if negative. Frequency and presence penalties:
    those of OpenAI's API, for tokens in the output.
    """
    token_ids_N = np.concatenate([row.tokens.token_ids for _, row in penalties])
    counts_N = np.concatenate([row.tokens.counts for _, row in penalties])
    lengths = [len(row.tokens.token_ids) for _, row in penalties]
    rows_N = np.repeat([index for index, _ in penalties], lengths)
    by_kind_3P = np.array([row[:3] for _, row in penalties], dtype=np.float32).T
    repetition_N, frequency_N, presence_N = np.repeat(by_kind_3P, lengths, axis=1)
    subtracted_N = frequency_N * counts_N + presence_N * (counts_N > 0)

    rows, token_ids, repetition, subtracted = (
        torch.from_numpy(array).to(logits_RV.device) for array in (rows_N, token_ids_N, repetition_N, subtracted_N)
    )
    logits = logits_RV[rows, token_ids]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits_RV[rows, token_ids] = logits - subtracted
