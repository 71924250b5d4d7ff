"""The operations of sampling that exist twice: as Triton kernels, and for the CPU in numpy, PyTorch and C++."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.sampling import filters, history, logit_additions, penalties, step_masks
from compiled_engine.sampling.gumbel_cpp import fastest_sample
from compiled_engine.sampling.row_table import RowTable


@dataclass(frozen=True)
class SamplingOperations:
    """In the order of sampling: arguments are those of logit_additions.add_, step_masks.forbid_, penalties.penalise_,
    gumbel.sample and history.record_; `thresholds` takes logits, row indices and the table. `choose` may take
    a Best as well on the CPU, and a VocabularySlice on a GPU, where it ends with the choice of all ranks.
    """

    add_: Callable[..., None]
    forbid_: Callable[..., None]
    penalise_: Callable[..., None]
    thresholds: Callable[[torch.Tensor, torch.Tensor, RowTable], torch.Tensor]
    choose: Callable[..., None]
    record_: Callable[..., None]


def sampling_operations(triton: bool) -> SamplingOperations:
    if not triton:
        return SamplingOperations(
            logit_additions.add_,
            step_masks.forbid_,
            penalties.penalise_,
            _thresholds_on_cpu,
            fastest_sample(),
            history.record_,
        )
    # Triton is not installed everywhere.
    from compiled_engine.sampling import edits_triton, filters_triton, gumbel_triton

    def thresholds(logits_SV: torch.Tensor, row_index_S: torch.Tensor, table: RowTable) -> torch.Tensor:
        fields = (table.device[name] for name in filters.FIELDS)
        return filters_triton.thresholds(logits_SV, row_index_S, *fields)

    return SamplingOperations(
        edits_triton.add_,
        edits_triton.forbid_,
        edits_triton.penalise_,
        thresholds,
        gumbel_triton.sample,
        edits_triton.record_,
    )


def _thresholds_on_cpu(logits_SV: torch.Tensor, row_index_S: torch.Tensor, table: RowTable) -> torch.Tensor:
    row_index = row_index_S.numpy()
    present = np.flatnonzero(row_index >= 0)
    if len(present) == len(row_index):
        return filters.thresholds(logits_SV, filters.Filters.from_table(table.host, row_index))
    threshold_S = torch.full((len(row_index),), -torch.inf)
    of_rows = filters.Filters.from_table(table.host, row_index[present])
    threshold_S[present] = filters.thresholds(logits_SV[present], of_rows)
    return threshold_S
