"""Log-probabilities of chosen and most likely tokens, without a tensor of all log-probabilities.

A log-probability is a logit minus the row's logsumexp, so top-k is taken over the logits. Results are computed on the
device and copied to pinned memory on the current stream; the host never waits here.

With a divided vocabulary each rank reduces its own columns, and few numbers are exchanged: first the chosen token's
logit, which one rank has; then, from each rank, the number of logits above it, the logsumexp of its columns, and its
largest logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.rows.staged_writes import download, upload
from compiled_engine.sampling.ranks import VocabularySlice, row_chunks
from compiled_engine.sampling.sampled_tokens import row_width

# Value of `num_logprobs` for rows without log-probabilities; -1 is the whole vocabulary.
NO_LOGPROBS = -2
# Rows with more top tokens are computed in groups that have the same number of them. All other rows are computed
# together, each with the largest number of top tokens among these rows.
FEW_TOKENS = 64


def logprob_rows(
    logits_RV: torch.Tensor,
    token_ids_R: torch.Tensor,
    num_top: int,
    triton: bool | None = None,
    vocabulary: VocabularySlice | None = None,
) -> torch.Tensor:
    """Return log-probabilities of each row's chosen token and num_top most likely tokens, on the host.

    The rows are int32 [R, 3 + 2 * num_top], laid out as in LogprobRows, and readable once the current stream
    has reached this point. Temporary memory is bounded, see ranks.row_chunks.

    logits_RV: any floating dtype, contiguous within a row; computed in float32. token_ids_R: the chosen tokens, int32
    [R]. triton: whether Triton kernels may run, by default on CUDA; they serve num_top up to FEW_TOKENS, and undivided
    vocabularies. vocabulary: this rank's columns; None for all.
    """
    if vocabulary is not None and vocabulary.is_divided:
        return _rows_of_ranks(logits_RV, token_ids_R, num_top, vocabulary)
    num_rows, vocab_size = logits_RV.shape
    triton = logits_RV.device.type == "cuda" if triton is None else triton
    if triton and num_top <= FEW_TOKENS:
        from compiled_engine.sampling.logprobs_triton import launch  # Triton is not installed everywhere

        return launch(logits_RV, token_ids_R, num_top)
    rows_RW = torch.empty(num_rows, row_width(num_top), dtype=torch.int32, device=logits_RV.device)
    for rows in row_chunks(num_rows, vocab_size):
        logits, token_ids = logits_RV[rows].float(), token_ids_R[rows, None].long()
        chosen = logits.gather(1, token_ids)
        top = logits.topk(num_top, dim=-1)
        rows_RW[rows, 0] = (logits > chosen).sum(dim=-1, dtype=torch.int32) + 1
        rows_RW[rows, 1::2] = torch.cat([token_ids, top.indices], dim=1).int()
        values = torch.cat([chosen, top.values], dim=1) - _log_sums(logits)
        rows_RW[rows, 2::2] = values.view(torch.int32)
    return download(rows_RW)


def _log_sums(logits_RV: torch.Tensor) -> torch.Tensor:
    """Return the logsumexp of each row, [R, 1]. The order of a row's sum does not depend on the number of rows.

    PyTorch divides the sum of a lone row among threads, and on a GPU the sums of few rows among thread blocks.
    """
    if logits_RV.device.type != "cpu":
        return torch.cat([row_1V.logsumexp(-1, keepdim=True) for row_1V in logits_RV.split(1)])
    rows = logits_RV.expand(2, -1) if len(logits_RV) == 1 else logits_RV
    return rows.logsumexp(-1, keepdim=True)[: len(logits_RV)]


def _rows_of_ranks(
    logits_RV: torch.Tensor, token_ids_R: torch.Tensor, num_top: int, vocabulary: VocabularySlice
) -> torch.Tensor:
    """Return log-probabilities as logprob_rows does, for a vocabulary that is divided among ranks.

    Every rank must call this function with the same tokens, and gets the same rows.
    """
    rows_RW = torch.empty(len(logits_RV), row_width(num_top), dtype=torch.int32, device=logits_RV.device)
    for rows in row_chunks(len(logits_RV), vocabulary.size):
        _fill_of_ranks(rows_RW[rows], logits_RV[rows].float(), token_ids_R[rows, None].long(), num_top, vocabulary)
    return download(rows_RW)


def _fill_of_ranks(
    rows_RW: torch.Tensor,
    logits_RV: torch.Tensor,
    token_ids_R1: torch.Tensor,
    num_top: int,
    vocabulary: VocabularySlice,
) -> None:
    """Write the log-probabilities of the rows logits_RV to rows_RW, see `_rows_of_ranks`.

    logits_RV: float32, this rank's columns. token_ids_R1: the chosen tokens, int64.
    """
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
    # A stable sort orders equal logits by rank, and so by token id.
    values_RC, order_RC = values_RC.view(torch.float32).sort(dim=1, descending=True, stable=True)
    ids_RC = ids_RC.gather(1, order_RC)
    rows_RW[:, 0] = above_Rr.sum(1, dtype=torch.int32) + 1
    rows_RW[:, 1::2] = torch.cat([token_ids_R1.int(), ids_RC[:, :num_top]], dim=1)
    rows_RW[:, 2::2] = (torch.cat([chosen_R1, values_RC[:, :num_top]], dim=1) - logsumexp_R1).view(torch.int32)


@dataclass(frozen=True)
class BatchLogprobs:
    """Log-probabilities of a batch, in tensors as `logprob_rows` returns them, whose copy to the host may still run."""

    # All rows of the batch, each with the largest number of tokens up to FEW_TOKENS; None if no row needs it.
    few_SW: torch.Tensor | None
    many: dict[int, torch.Tensor]  # rows with more than FEW_TOKENS tokens, by index in the batch: [1, 3 + 2 * k]


def batch_logprobs(
    logits_SV: torch.Tensor,
    token_ids_S: torch.Tensor,
    num_logprobs_S: np.ndarray,
    triton: bool | None = None,
    vocabulary: VocabularySlice | None = None,
) -> BatchLogprobs:
    """Return the log-probabilities of a batch in which at least one row needs them.

    num_logprobs_S: the number of most likely tokens of each row, on the host; see NO_LOGPROBS for rows that need none.
    Other arguments: see `logprob_rows`.
    """
    num_tokens = logits_SV.shape[1] if vocabulary is None else vocabulary.whole_size
    counts_S = np.where(num_logprobs_S == -1, num_tokens, num_logprobs_S)
    most_of_few = int(counts_S[counts_S <= FEW_TOKENS].max(initial=NO_LOGPROBS))
    few_SW = None
    if most_of_few != NO_LOGPROBS:
        few_SW = logprob_rows(logits_SV, token_ids_S, most_of_few, triton, vocabulary)
    many: dict[int, torch.Tensor] = {}
    for count in sorted({*counts_S[counts_S > FEW_TOKENS].tolist()}):
        indices = np.flatnonzero(counts_S == count)
        index_R = upload(indices, logits_SV.device)
        chosen_R = token_ids_S.index_select(0, index_R)
        rows_RW = logprob_rows(logits_SV.index_select(0, index_R), chosen_R, count, triton, vocabulary)
        many |= zip(indices.tolist(), rows_RW.split(1), strict=True)
    return BatchLogprobs(few_SW, many)
