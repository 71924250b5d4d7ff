"""For each row of logits its logsumexp and a token's rank, in one pass and without temporaries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launcher import quick_launches

BLOCK_V = 4096


@quick_launches
@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr"])
def normaliser_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    token_ids_ptr: tl.tensor,
    logsumexp_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Program (row): a running maximum and sum for each lane (online softmax, Milakov and Gimelshein, 2018)."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    # Finite where minus infinity would give NaN as the difference of two; no float32 logit is less.
    largest = tl.full([BLOCK_V], -3.4028234663852886e38, tl.float32)
    sums = tl.zeros([BLOCK_V], dtype=tl.float32)
    above = tl.zeros([BLOCK_V], dtype=tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK_V):
        token_ids = start + tl.arange(0, BLOCK_V)
        logits = tl.load(row_ptr + token_ids, mask=token_ids < VOCAB_SIZE, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, logits)
        sums = sums * tl.exp(largest - larger) + tl.exp(logits - larger)
        largest = larger
        above += (logits > chosen).to(tl.int32)
    top = tl.max(largest, axis=0)
    tl.store(logsumexp_ptr + row, top + tl.log(tl.sum(sums * tl.exp(largest - top), axis=0)))
    tl.store(rank_ptr + row, tl.sum(above, axis=0) + 1)


def normalisers(logits_RV: torch.Tensor, token_ids_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logsumexp, float32 [R], and rank of the token (int64 [R]) from 1, int32 [R].

    logits_RV: any floating dtype, consecutive within a row.
    """
    num_rows, vocab_size = logits_RV.shape
    logsumexp_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    rank_R = torch.empty(num_rows, dtype=torch.int32, device=logits_RV.device)
    if num_rows > 0:
        normaliser_kernel[(num_rows,)](
            logits_RV,
            logits_RV.stride(0),
            token_ids_R,
            logsumexp_R,
            rank_R,
            VOCAB_SIZE=vocab_size,
            BLOCK_V=BLOCK_V,
            num_warps=8,
        )
    return logsumexp_R, rank_R
