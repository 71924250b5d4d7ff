"""Log-probabilities where each rank has some columns of the logits, reduces them, and few numbers are exchanged.

First the chosen token's logit, which one rank has; then, of each rank, how many logits are above that, the logsumexp of
its columns, and its largest logits.
"""

from __future__ import annotations

import torch

from compiled_engine.rows.async_copies import download
from compiled_engine.sampling.row_chunks import row_chunks
from compiled_engine.sampling.token_logprobs import row_width
from compiled_engine.sampling.vocabulary_slice import VocabularySlice


def logprob_rows_of_ranks(
    logits_RV: torch.Tensor, token_ids_R: torch.Tensor, num_top: int, vocabulary: VocabularySlice
) -> torch.Tensor:
    """See logprobs.logprob_rows; every rank calls it with the same tokens, and has the same rows."""
    rows_RW = torch.empty(len(logits_RV), row_width(num_top), dtype=torch.int32, device=logits_RV.device)
    for rows in row_chunks(len(logits_RV), vocabulary.size):
        _fill(rows_RW[rows], logits_RV[rows].float(), token_ids_R[rows, None].long(), num_top, vocabulary)
    return download(rows_RW)


def _fill(
    rows_RW: torch.Tensor,
    logits_RV: torch.Tensor,
    token_ids_R1: torch.Tensor,
    num_top: int,
    vocabulary: VocabularySlice,
) -> None:
    """token_ids_R1: int64."""
    gather, num_ranks = vocabulary.group.gather_columns, vocabulary.group.size
    column_R1 = token_ids_R1 - vocabulary.first
    is_here_R1 = (column_R1 >= 0) & (column_R1 < vocabulary.size)
    own_R1 = logits_RV.gather(1, torch.where(is_here_R1, column_R1, 0)).masked_fill_(~is_here_R1, -torch.inf)
    chosen_R1 = gather(own_R1).amax(1, keepdim=True)
    count = min(num_top, vocabulary.size)
    top = logits_RV.topk(count, dim=-1)
    parts = (
        (logits_RV > chosen_R1).sum(dim=-1, keepdim=True, dtype=torch.int32),
        logits_RV.logsumexp(-1, keepdim=True).view(torch.int32),
        top.values.view(torch.int32),
        (top.indices + vocabulary.first).int(),
    )
    found = gather(torch.cat(parts, 1)).unflatten(1, (num_ranks, -1)).split([1, 1, count, count], dim=2)
    above_Rr, sums_Rr, values_RC, ids_RC = (each.flatten(1).contiguous() for each in found)
    logsumexp_R1 = sums_Rr.view(torch.float32).logsumexp(-1, keepdim=True)
    # Stable: of equal logits that of the lower rank, whose ids are lower, comes first.
    values_RC, order_RC = values_RC.view(torch.float32).sort(dim=1, descending=True, stable=True)
    ids_RC = ids_RC.gather(1, order_RC)
    rows_RW[:, 0] = above_Rr.sum(1, dtype=torch.int32) + 1
    rows_RW[:, 1::2] = torch.cat([token_ids_R1.int(), ids_RC[:, :num_top]], dim=1)
    rows_RW[:, 2::2] = (torch.cat([chosen_R1, values_RC[:, :num_top]], dim=1) - logsumexp_R1).view(torch.int32)
