"""The operations of sampling that exist twice: as Triton kernels, and for the CPU in numpy, PyTorch and C++."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.rows.row_fields import RowFields
from compiled_engine.sampling import edits, filters
from compiled_engine.sampling.gumbel import fastest_sample


@dataclass(frozen=True)
class SamplingOperations:
    """In the order of sampling. Arguments are those of edits.py and gumbel.sample; `choose` may take a Best as well on
    the CPU, and a VocabularySlice on a GPU, where it ends with the choice of all ranks.
    """

    add_: Callable[..., None]
    forbid_: Callable[..., None]
    penalise_: Callable[..., None]
    thresholds: Callable[[torch.Tensor, torch.Tensor, RowFields], torch.Tensor]
    choose: Callable[..., None]
    record_: Callable[..., None]


def sampling_operations(triton: bool) -> SamplingOperations:
    if not triton:
        return SamplingOperations(
            edits.add_,
            edits.forbid_,
            edits.penalise_,
            _thresholds_on_cpu,
            fastest_sample(),
            edits.record_,
        )
    # Triton is not installed everywhere.
    from compiled_engine.sampling import edits_triton, filters_triton, gumbel_triton

    def thresholds(logits_SV: torch.Tensor, row_index_S: torch.Tensor, rows: RowFields) -> torch.Tensor:
        return filters_triton.thresholds(logits_SV, row_index_S, *(rows[name] for name in filters.FIELDS))

    return SamplingOperations(
        edits_triton.add_,
        edits_triton.forbid_,
        edits_triton.penalise_,
        thresholds,
        gumbel_triton.sample,
        edits_triton.record_,
    )


def _thresholds_on_cpu(logits_SV: torch.Tensor, row_index_S: torch.Tensor, rows: RowFields) -> torch.Tensor:
    row_index = row_index_S.numpy()
    fields = {name: rows[name].numpy() for name in filters.FIELDS}
    present = np.flatnonzero(row_index >= 0)
    if len(present) == len(row_index):
        return filters.thresholds(logits_SV, filters.Filters.from_fields(fields, row_index))
    threshold_S = torch.full((len(row_index),), -torch.inf)
    of_rows = filters.Filters.from_fields(fields, row_index[present])
    threshold_S[present] = filters.thresholds(logits_SV[present], of_rows)
    return threshold_S
