"""Log-probabilities as two Triton kernels: of each block of the vocabulary its largest logit, the sum of exponentials
and how many logits are above the chosen token's; then of each row the whole, and its top tokens.

The second one merges the blocks: whichever holds the largest logit that is left yields it, and is read again for the
largest below that. So only blocks with a top token are read twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launch_arguments import cdiv, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.rows.staged_writes import download
from compiled_engine.sampling.sampled_tokens import row_width
from compiled_engine.sampling.value_checks import FLOAT32_MAX

BLOCK_V = 2048
_LEAST_FLOAT = tl.constexpr(-FLOAT32_MAX)
_LEAST_KEY = tl.constexpr(-(2**63))
_SIGN_MASK = tl.constexpr(2**31 - 1)


@triton.jit
def block_keys(
    row_ptr: tl.tensor, block: tl.tensor, VOCAB_SIZE: tl.constexpr, BLOCK_V: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Logits of a block, float32, and int64 keys in the same order, where of equal logits the lower id is larger."""
    token_ids = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = token_ids < VOCAB_SIZE
    logits = tl.load(row_ptr + token_ids, mask=inside, other=-float("inf")).to(tl.float32)
    bits = logits.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ _SIGN_MASK, bits)
    keys = (ordered.to(tl.int64) << 32) | (token_ids ^ _SIGN_MASK).to(tl.int64)
    return logits, tl.where(inside, keys, _LEAST_KEY)


@triton.jit
def logit_of(key: tl.tensor) -> tl.tensor:
    """float32; finite where minus infinity would give NaN as the difference of two."""
    ordered = (key >> 32).to(tl.int32)
    logit = tl.where(ordered < 0, ordered ^ _SIGN_MASK, ordered).to(tl.float32, bitcast=True)
    return tl.maximum(logit, _LEAST_FLOAT)


@quick_launches
@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr"])
def block_logprobs_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    token_ids_ptr: tl.tensor,
    best_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    above_ptr: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Program (row, block), into [R, blocks]: the largest key, int64; the sum of exponentials of logits less the
    largest, float32; how many logits are above the chosen token's, int32."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row_ptr = logits_ptr + row * logits_stride
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    logits, keys = block_keys(row_ptr, block, VOCAB_SIZE, BLOCK_V)
    best = tl.max(keys, axis=0)
    slot = row * tl.num_programs(1) + block
    tl.store(best_ptr + slot, best)
    tl.store(sum_ptr + slot, tl.sum(tl.exp(logits - logit_of(best)), axis=0))
    tl.store(above_ptr + slot, tl.sum((logits > chosen).to(tl.int32), axis=0))


@quick_launches
@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["token_ids_ptr"])
def row_logprobs_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    token_ids_ptr: tl.tensor,
    best_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    above_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_top: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE_B: tl.constexpr,
) -> None:
    """Program (row): a row of LogprobRows, into rows_ptr."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    blocks = tl.arange(0, TILE_B)
    in_row = blocks < NUM_BLOCKS
    slots = row * NUM_BLOCKS + blocks
    keys = tl.load(best_ptr + slots, mask=in_row, other=_LEAST_KEY)
    sums = tl.load(sum_ptr + slots, mask=in_row, other=0.0)
    largest = tl.where(in_row, logit_of(keys), _LEAST_FLOAT)
    top = tl.max(largest, axis=0)
    logsumexp = top + tl.log(tl.sum(sums * tl.exp(largest - top), axis=0))
    rank = tl.sum(tl.load(above_ptr + slots, mask=in_row, other=0), axis=0) + 1
    token_id = tl.load(token_ids_ptr + row)
    chosen = tl.load(row_ptr + token_id).to(tl.float32)
    out_ptr = rows_ptr + row * (3 + 2 * num_top)
    tl.store(out_ptr, rank)
    tl.store(out_ptr + 1, token_id)
    tl.store(out_ptr + 2, (chosen - logsumexp).to(tl.int32, bitcast=True))
    place = 0
    while place < num_top:
        best = tl.max(keys, axis=0)
        token_id = (best & _SIGN_MASK).to(tl.int32) ^ _SIGN_MASK
        logit = tl.load(row_ptr + token_id).to(tl.float32)
        tl.store(out_ptr + 3 + 2 * place, token_id)
        tl.store(out_ptr + 4 + 2 * place, (logit - logsumexp).to(tl.int32, bitcast=True))
        block = token_id // BLOCK_V
        _, of_block = block_keys(row_ptr, block, VOCAB_SIZE, BLOCK_V)
        next_best = tl.max(tl.where(of_block < best, of_block, _LEAST_KEY), axis=0)
        keys = tl.where(blocks == block, next_best, keys)
        place += 1


def launch(logits_RV: torch.Tensor, token_ids_R: torch.Tensor, num_top: int) -> torch.Tensor:
    """See logprobs.logprob_rows. The rows are in pinned memory, on a CPU (where kernels are interpreted) in any.

    They are copied there: PyTorch's allocator knows of copies that are under way, and not of kernels that write, so it
    would give memory that such a kernel is still to write to the next upload.
    """
    num_rows, vocab_size = logits_RV.shape
    device = logits_RV.device
    assert token_ids_R.dtype == torch.int32
    rows_RW = torch.empty(num_rows, row_width(num_top), dtype=torch.int32, device=device)
    if num_rows == 0:
        return download(rows_RW)
    num_blocks = cdiv(vocab_size, BLOCK_V)
    best_RB = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=device)
    sum_RB = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    above_RB = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    inputs = (logits_RV, logits_RV.stride()[0], token_ids_R, best_RB, sum_RB, above_RB)
    block_logprobs_kernel[(num_rows, num_blocks)](*inputs, VOCAB_SIZE=vocab_size, BLOCK_V=BLOCK_V)
    row_logprobs_kernel[(num_rows,)](
        *inputs,
        rows_RW,
        num_top,
        VOCAB_SIZE=vocab_size,
        BLOCK_V=BLOCK_V,
        NUM_BLOCKS=num_blocks,
        TILE_B=next_power_of_2(num_blocks),
        num_warps=8,
    )
    return download(rows_RW)
