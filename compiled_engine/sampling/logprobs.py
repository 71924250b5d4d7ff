"""Log-probabilities of chosen tokens and of the most likely ones, without a tensor of them all.

A log-probability is a logit less the row's logsumexp, so top-k is taken of the logits. They are computed on the
device and stay there until somebody asks for them: nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.sampling.row_chunks import row_chunks
from compiled_engine.sampling.transfer import download, upload
from compiled_engine.scheduling.step import TokenLogprobs

# Results with more tokens a row than this go to the host at once, so that those of a chunk alone take device memory.
MAX_TOKENS_ON_DEVICE = 1024


@dataclass(frozen=True)
class _Chunk:
    """Of rows `indices` of the batch, `counts` tokens wanted each (host). On the device, or all on the host:

    chosen_ids_R int64 and ranks_R int32 [R]; ids_RK int32 [R, K]; values_RK1 float32 [R, 1 + K], the chosen token's
    log-probability first.
    """

    indices: Sequence[int]
    counts: Sequence[int]
    chosen_ids_R: torch.Tensor
    ranks_R: torch.Tensor
    ids_RK: torch.Tensor
    values_RK1: torch.Tensor

    def to_host(self) -> _Chunk:
        tensors = (self.chosen_ids_R, self.ranks_R, self.ids_RK, self.values_RK1)
        return _Chunk(self.indices, self.counts, *map(download, tensors))


class HostLogprobs:
    """What DeviceLogprobs.to_host gave: `entries` may be called once the copies are done."""

    def __init__(self, num_rows: int, chunks: list[_Chunk]) -> None:
        self._num_rows = num_rows
        self._chunks = chunks

    def entries(self) -> list[TokenLogprobs | None]:
        """One for each row of the batch: the chosen token, then the most likely ones; None if not asked for."""
        entries: list[TokenLogprobs | None] = [None] * self._num_rows
        for chunk in self._chunks:
            columns = (chunk.chosen_ids_R, chunk.ranks_R, chunk.ids_RK, chunk.values_RK1)
            rows = zip(chunk.indices, chunk.counts, *(column.tolist() for column in columns), strict=True)
            for index, count, chosen_id, rank, ids, values in rows:
                entries[index] = TokenLogprobs((chosen_id, *ids[:count]), tuple(values[: count + 1]), rank)
        return entries


class DeviceLogprobs:
    """Log-probabilities of a batch of num_rows rows, of which some asked for them."""

    def __init__(self, num_rows: int, chunks: list[_Chunk]) -> None:
        self._num_rows = num_rows
        self._chunks = chunks

    def to_host(self) -> HostLogprobs:
        """Start copies to pinned memory on the current stream, without waiting for them.

        That stream is the one that sampled, or it waits for it; this object has to live until the copies are done.
        """
        return HostLogprobs(self._num_rows, [chunk.to_host() for chunk in self._chunks])

    def read(self) -> list[TokenLogprobs | None]:
        """The entries now: waits for the device."""
        host = self.to_host()
        if any(chunk.values_RK1.device.type == "cuda" or chunk.values_RK1.is_pinned() for chunk in self._chunks):
            torch.cuda.current_stream().synchronize()
        return host.entries()


def token_logprobs(
    logits_SV: torch.Tensor,
    token_ids_S: torch.Tensor,
    wanted: np.ndarray,
    num_logprobs: np.ndarray,
    triton: bool | None = None,
) -> DeviceLogprobs:
    """For some rows their token's log-probability, then those of the num_logprobs[i] most likely tokens (-1: all).

    logits_SV: [S, V] of any floating dtype, computed with in float32. token_ids_S: int64 [S]. wanted: int [R] on the
    host, ascending, which rows. triton: whether to launch kernels, by default on CUDA. Temporary memory is bounded
    (see row_chunks.py).
    """
    num_rows, vocab_size = logits_SV.shape
    triton = logits_SV.device.type == "cuda" if triton is None else triton
    counts = np.where(num_logprobs == -1, vocab_size, num_logprobs)
    chunks = []
    # Apart, since all rows of a chunk get as many as the one that wants most.
    many = counts > MAX_TOKENS_ON_DEVICE
    for part in (np.flatnonzero(~many), np.flatnonzero(many)):
        for rows in row_chunks(len(part), vocab_size):
            of_chunk = part[rows]
            chunk = _compute(logits_SV, token_ids_S, wanted[of_chunk], counts[of_chunk], triton)
            chunks.append(chunk.to_host() if many[of_chunk[0]] else chunk)
    return DeviceLogprobs(num_rows, chunks)


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
    return _Chunk(indices.tolist(), counts.tolist(), token_ids_R, ranks_R, top.indices.int(), values_RK1)
