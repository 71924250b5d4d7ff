"""top-k, top-p and min-p as one threshold per row: tokens with smaller logits are not sampled.

Each filter keeps the most likely tokens down to some logit. So all three together keep the tokens down to the highest
of these logits. A threshold treats equal logits equally: the kept set does not depend on the order of a sort, and only
kept tokens need noise. Filters apply in vLLM's order: temperature, min-p, top-k, and top-p over the remaining
probabilities. The Triton kernel is in filters_triton.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.rows.row_fields import RowField
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import row_chunks

FIELDS = ("inverse_temperature", "top_k", "top_p", "min_p")
ROW_FIELDS = (
    RowField("inverse_temperature", torch.float32),
    RowField("top_k"),
    RowField("top_p", torch.float32, initial=1),
    RowField("min_p", torch.float32),
)


def filter_fields(params: SamplingParams) -> dict[str, float]:
    """Return the values of FIELDS for a row. Greedy rows have inverse temperature 0 and are not filtered."""
    if params.greedy:
        return dict(zip(FIELDS, (0, 0, 1, 0), strict=True))
    top_k = min(max(params.top_k, 0), 2**31 - 1)
    return dict(zip(FIELDS, (1 / params.temperature, top_k, params.top_p, params.min_p), strict=True))


def has_filters(params: SamplingParams) -> bool:
    return not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


@dataclass(frozen=True)
class Filters:
    """Temperature and filters by row, on the host: float32, except top_k, which is int64.

    inverse_temperature is 0 for greedy rows, which are not filtered. top_k 0, top_p 1 and min_p 0 keep all tokens.
    """

    inverse_temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray

    @classmethod
    def from_fields(cls, fields: Mapping[str, np.ndarray], rows: np.ndarray) -> Filters:
        """Return the filters of the rows with these indices. fields: FIELDS by name, on the host, for all rows."""
        inverse_temperature, top_k, top_p, min_p = (fields[name][rows] for name in FIELDS)
        return cls(inverse_temperature, top_k.astype(np.int64), top_p, min_p)

    def of(self, rows: np.ndarray) -> Filters:
        return Filters(self.inverse_temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def thresholds(logits_RV: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return the smallest kept logit of each row, or a value that keeps the same tokens: float32 [R].

    It is minus infinity in a row without filters. logits_RV: float32, before division by the temperature. filters: the
    filters of these R rows.
    """
    limited = (filters.top_k > 0) & (filters.top_k < logits_RV.shape[1])
    summed = ~limited & (filters.top_p < 1)
    relative = ~limited & ~summed & (filters.min_p > 0)
    threshold_R = logits_RV.new_full((len(logits_RV),), -torch.inf)
    for chosen, compute in ((limited, _by_largest), (summed, _by_largest), (relative, _by_maximum)):
        rows = np.flatnonzero(chosen)
        for chunk in row_chunks(len(rows), logits_RV.shape[1]):
            part = rows[chunk]
            if len(part) == len(chosen):
                return compute(logits_RV, filters)
            index = torch.from_numpy(part)
            threshold_R[index] = compute(logits_RV[index], filters.of(part))
    return threshold_R


def _by_maximum(logits_RV: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return the thresholds [R] of min-p alone: the row's largest logit + log(min_p) * temperature.

    From this logit on, a token's probability is at least min_p times the largest probability.
    """
    margin_R1 = _column(np.log(filters.min_p) / filters.inverse_temperature)
    return logits_RV.amax(dim=1) + margin_R1[:, 0]


def _by_largest(logits_RV: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return, for each row, the lowest logit that top-k, top-p and min-p together keep.

    Each row's largest logits are sorted in ascending order: as many as the largest top_k of the rows, or all if a row
    has no top_k. Each filter gives the index from which it keeps tokens, and the largest index applies.
    """
    vocab_size = logits_RV.shape[1]
    top_k = np.where(filters.top_k > 0, np.minimum(filters.top_k, vocab_size), vocab_size)
    k = int(top_k.max())
    logits_RK = _largest(logits_RV, k)
    first_R1 = _column(k - top_k)
    has_min_p, has_top_p = (filters.min_p > 0).any(), (filters.top_p < 1).any()
    if has_min_p or has_top_p:
        scaled_RK = (logits_RK - logits_RK[:, -1:]).mul_(_column(filters.inverse_temperature))
        weights_RK = scaled_RK.exp_()
    if has_min_p:
        by_min_p_R1 = torch.searchsorted(weights_RK, _column(filters.min_p))
        first_R1 = torch.maximum(first_R1, by_min_p_R1)
    if has_top_p:
        # Remove the least likely of the remaining tokens as long as they sum to at most 1 - top_p.
        sums_RK = weights_RK.cumsum_(dim=1)
        before_R1 = sums_RK.gather(1, (first_R1 - 1).clamp_(0, k - 1)).masked_fill_(first_R1 == 0, 0)
        limit_R1 = torch.lerp(before_R1, sums_RK[:, -1:], _column(1 - filters.top_p))
        by_top_p_R1 = torch.searchsorted(sums_RK, limit_R1, right=True)
        first_R1 = torch.maximum(first_R1, by_top_p_R1)
    return logits_RK.gather(1, first_R1.clamp_(max=k - 1))[:, 0]


def _largest(logits_RV: torch.Tensor, k: int) -> torch.Tensor:
    """Return each row's k largest elements in ascending order: [R, k]. numpy sorts, much faster than torch."""
    values, vocab_size = logits_RV.numpy(), logits_RV.shape[-1]
    if k < vocab_size:
        values = np.partition(values, vocab_size - k, axis=-1)[:, vocab_size - k :]
    return torch.from_numpy(np.sort(values, axis=-1))


def _column(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values)[:, None]
