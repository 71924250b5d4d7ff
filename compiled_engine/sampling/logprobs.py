"""Log-probabilities of chosen tokens and of the most likely ones, without a tensor of them all.

A log-probability is a logit less the row's logsumexp, so top-k is taken of the logits. They are computed on the
device and copied to pinned memory, on the current stream: nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.sampling.async_copies import download, upload
from compiled_engine.sampling.row_chunks import row_chunks
from compiled_engine.sampling.token_logprobs import TokenLogprobs

# Rows that want more tokens than this are computed apart: all rows of a chunk get as many as the one that wants most.
MANY_TOKENS = 1024


@dataclass(frozen=True)
class _Chunk:
    """Of rows `indices` of the batch, `counts` tokens wanted each.

    chosen_ids_R int64 and ranks_R int32 [R]; ids_RK int32 [R, K]; values_RK1 float32 [R, 1 + K], the chosen token's
    log-probability first.
    """

    indices: Sequence[int]
    counts: Sequence[int]
    chosen_ids_R: torch.Tensor
    ranks_R: torch.Tensor
    ids_RK: torch.Tensor
    values_RK1: torch.Tensor


class BatchLogprobs:
    """Of a batch of num_rows rows, of which some asked for them; on the way to the host."""

    def __init__(self, num_rows: int, chunks: list[_Chunk]) -> None:
        self._num_rows = num_rows
        self._chunks = chunks

    def entries(self) -> list[TokenLogprobs | None]:
        """One for each row of the batch: the chosen token, then the most likely ones; None if not asked for.

        May be called once the stream that sampled has come as far as it was then.
        """
        entries: list[TokenLogprobs | None] = [None] * self._num_rows
        for chunk in self._chunks:
            columns = (chunk.chosen_ids_R, chunk.ranks_R, chunk.ids_RK, chunk.values_RK1)
            rows = zip(chunk.indices, chunk.counts, *(column.tolist() for column in columns), strict=True)
            for index, count, chosen_id, rank, ids, values in rows:
                entries[index] = TokenLogprobs((chosen_id, *ids[:count]), tuple(values[: count + 1]), rank)
        return entries


def token_logprobs(
    logits_SV: torch.Tensor,
    token_ids_S: torch.Tensor,
    wanted: np.ndarray,
    num_logprobs: np.ndarray,
    triton: bool | None = None,
) -> BatchLogprobs:
    """For some rows their token's log-probability, then those of the num_logprobs[i] most likely tokens (-1: all).

    logits_SV: [S, V] of any floating dtype, computed with in float32. token_ids_S: int64 [S]. wanted: int [R] on the
    host, ascending, which rows. triton: whether to launch kernels, by default on CUDA. Temporary memory is bounded
    (see row_chunks.py).
    """
    num_rows, vocab_size = logits_SV.shape
    triton = logits_SV.device.type == "cuda" if triton is None else triton
    counts = np.where(num_logprobs == -1, vocab_size, num_logprobs)
    chunks = []
    many = counts > MANY_TOKENS
    for part in (np.flatnonzero(~many), np.flatnonzero(many)):
        for rows in row_chunks(len(part), vocab_size):
            of_chunk = part[rows]
            chunks.append(_compute(logits_SV, token_ids_S, wanted[of_chunk], counts[of_chunk], triton))
    return BatchLogprobs(num_rows, chunks)


def _compute(
    logits_SV: torch.Tensor, token_ids_S: torch.Tensor, indices: np.ndarray, counts: np.ndarray, triton: bool
) -> _Chunk:
    first, end = int(indices[0]), int(indices[-1]) + 1
    if end - first == len(indices):
        logits_RV, token_ids_R = logits_SV[first:end], token_ids_S[first:end]
    else:
        index_R = upload(indices.astype(np.int64), logits_SV.device)
        logits_RV, token_ids_R = logits_SV.index_select(0, index_R), token_ids_S.index_select(0, index_R)
    if triton:
        from compiled_engine.sampling.logprobs_triton import normalisers

        logsumexp_R, ranks_R = normalisers(logits_RV, token_ids_R)
    else:
        logsumexp_R = logits_RV.float().logsumexp(dim=-1)
        ranks_R = (logits_RV > logits_RV.gather(1, token_ids_R[:, None])).sum(dim=-1, dtype=torch.int32) + 1
    top = logits_RV.float().topk(int(counts.max()), dim=-1)
    chosen_R1 = logits_RV.gather(1, token_ids_R[:, None]).float()
    values_RK1 = torch.cat([chosen_R1, top.values], dim=1) - logsumexp_R[:, None]
    # Freed at once: the stream has copied before anything else gets this memory.
    on_device = (token_ids_R, ranks_R, top.indices.int(), values_RK1)
    return _Chunk(indices.tolist(), counts.tolist(), *map(download, on_device))
