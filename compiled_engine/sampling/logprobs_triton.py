"""Log-probabilities as two Triton kernels, the second of which finds the top tokens of a row.

The first kernel reduces each block of the vocabulary to its largest logit, its sum of exponentials, and the number of
logits above the chosen token's. The second kernel combines a row's blocks. To find the next top token, it takes the
block with the largest remaining logit, and reads this block again for the block's next logit. So only blocks that hold
top tokens are read again.
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
    """Return (logits of a block of BLOCK_V tokens, float32; a key for each logit, int64).

    A larger logit has a larger key. Of equal logits, the logit of the lower token id has the larger key. row_ptr:
    logits of the row.
    """
    token_ids = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = token_ids < VOCAB_SIZE
    logits = tl.load(row_ptr + token_ids, mask=inside, other=-float("inf")).to(tl.float32)
    bits = logits.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ _SIGN_MASK, bits)
    keys = (ordered.to(tl.int64) << 32) | (token_ids ^ _SIGN_MASK).to(tl.int64)
    return logits, tl.where(inside, keys, _LEAST_KEY)


@triton.jit
def logit_of(key: tl.tensor) -> tl.tensor:
    """Return the float32 logit that a key of `block_keys` stands for; the lowest finite number for minus infinity.

    Differences of minus infinity would be NaN.
    """
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
    """Reduce one block of a row's logits to three numbers; one program per row and block.

    logits_ptr: [R, VOCAB_SIZE], rows logits_stride apart; token_ids_ptr: int32 [R], the chosen tokens. best_ptr: int64
    [R, blocks], receives the largest key, see block_keys. sum_ptr: float32 [R, blocks], receives the sum of exp(logit -
    largest). above_ptr: int32 [R, blocks], receives the number of logits above the chosen token's.
    """
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
    """Combine the results of a row's blocks, and find its num_top most likely tokens; one program per row.

    rows_ptr: int32 [R, 3 + 2 * num_top], receives a row of LogprobRows. Other arguments are those of
    block_logprobs_kernel; best_ptr, sum_ptr and above_ptr have that kernel's results.
    """
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
    """Compute logprobs.logprob_rows with the kernels, and return its result, int32 [R, 3 + 2 * num_top], on the host.

    The kernels write device memory, which is copied to pinned memory if on a GPU. PyTorch's allocator tracks pending
    copies but not pending writes of kernels, so it could reuse pinned memory that a kernel has yet to write.
    token_ids_R: int32.
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
