"""Adapter kernels for few tokens: each program handles one token.

Latency dominates with few tokens. A program issues all its loads at once, since all addresses follow from the token's
slot, and loads its part of A or B into registers before it waits for the previous kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.linear.adapter_operands import VECTOR, Operands, member_of, tiles_of_members

# Elements of A or B per program, and the most results per program.
ELEMENTS, RESULTS = 8192, 256
# Up to this rank, a program has fewer rows of A and more columns.
LOW_RANK = 32


@quick_launches
@triton.jit(do_not_specialize=["num_tokens"])
def shrink_token_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    z_ptr: tl.tensor,
    num_tokens: tl.tensor,
    K: tl.constexpr,
    RANK: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write partial sums of z = A x (LoRA's shrink) of one token over a split of K, for BLOCK_R rows of a member's A.

    Program (token, split of K, member and tile of rows of A). Members are the linears that were merged into one, each
    with an A of its own. Rows beyond the rank that a member has in the token's adapter, and tokens with a negative
    slot, which have no adapter, are not written.

    x_ptr: [T, K]; a_ptr: [slots, MEMBERS * RANK, K]; ranks_ptr: int32 [slots, MEMBERS]; slots_ptr: int32 [T]; z_ptr:
    float32 [splits, num_tokens, MEMBERS * RANK].
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    TILES: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    token = tl.program_id(0)
    split = tl.program_id(1)
    member = tl.program_id(2) // TILES
    r_R = tl.program_id(2) % TILES * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.load(slots_ptr + token)
    rank = tl.load(ranks_ptr + slot * MEMBERS + member, mask=slot >= 0, other=0)
    used_R = r_R < rank
    column_K = split * BLOCK_K + tl.arange(0, BLOCK_K)
    inside_K = column_K < K
    row_R = (slot * MEMBERS + member) * RANK + r_R
    a_RK = tl.load(
        a_ptr + row_R[:, None].to(tl.int64) * K + column_K[None, :],
        mask=used_R[:, None] & inside_K[None, :],
        other=0.0,
    )
    if DEPENDENT_LAUNCH:
        gdc_wait()
    if tl.program_id(2) % TILES * BLOCK_R < rank:
        x_K = tl.load(x_ptr + token.to(tl.int64) * K + column_K, mask=inside_K, other=0.0).to(tl.float32)
        place = (split * num_tokens + token).to(tl.int64) * (RANK * MEMBERS) + member * RANK
        tl.store(z_ptr + place + r_R, tl.sum(a_RK.to(tl.float32) * x_K[None, :], 1), mask=used_R)


@quick_launches
@triton.jit(do_not_specialize=["num_tokens"])
def expand_token_kernel(
    y_ptr: tl.tensor,
    z_ptr: tl.tensor,
    b_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    N: tl.constexpr,
    RANK: tl.constexpr,
    BEGINS: tl.constexpr,
    ENDS: tl.constexpr,
    FIRST_TILES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write out = y + B z (LoRA's expand) of one token, for a tile of outputs. Program (token, tile).

    A tile's outputs belong to one member, a linear that was merged with others.

    y_ptr, out_ptr: [T, N]; z_ptr: see shrink_token_kernel; b_ptr: [slots, N, RANK]; ranks_ptr, slots_ptr: as for
        shrink_token_kernel.
    BEGINS, ENDS, FIRST_TILES: see tiles_of_members. BLOCK_N: outputs of a tile.
    BLOCK_S, BLOCK_R: NUM_SPLITS and RANK rounded up to powers of two.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    MEMBERS: tl.constexpr = len(ENDS)
    token = tl.program_id(0)
    member, begin, end = member_of(tl.program_id(1), BEGINS, ENDS, FIRST_TILES, BLOCK_N)
    result_N = begin + tl.arange(0, BLOCK_N)
    inside_N = result_N < end
    slot = tl.load(slots_ptr + token)
    rank = tl.load(ranks_ptr + slot * MEMBERS + member, mask=slot >= 0, other=0)
    r_R = tl.arange(0, BLOCK_R)
    # Masked in steps of a vector: a mask that may end anywhere prevents vector loads.
    asked_R = (r_R // VECTOR * VECTOR < rank) & (r_R < RANK)
    b_NR = tl.load(
        b_ptr + (slot * N + result_N[:, None]).to(tl.int64) * RANK + r_R[None, :],
        mask=inside_N[:, None] & asked_R[None, :],
        other=0.0,
    )
    if DEPENDENT_LAUNCH:
        gdc_wait()
    place_N = token.to(tl.int64) * N + result_N
    y_N = tl.load(y_ptr + place_N, mask=inside_N, other=0.0)
    split_S = tl.arange(0, BLOCK_S)
    place_S = (split_S * num_tokens + token).to(tl.int64) * (RANK * MEMBERS) + member * RANK
    z_SR = tl.load(
        z_ptr + place_S[:, None] + r_R[None, :], mask=(split_S < NUM_SPLITS)[:, None] & asked_R[None, :], other=0.0
    )
    used_R = r_R < rank
    z_R = tl.where(used_R, tl.sum(z_SR, 0), 0.0).to(b_NR.dtype).to(tl.float32)
    b_NR = tl.where(used_R[None, :], b_NR, 0.0).to(tl.float32)
    tl.store(out_ptr + place_N, (y_N.to(tl.float32) + tl.sum(b_NR * z_R[None, :], 1)).to(y_N.dtype), mask=inside_N)


def add_by_token(operands: Operands) -> torch.Tensor:
    """Return a linear's result plus the tokens' LoRA adapters applied to its input, [T, N]; see adapter_add.

    The kernels for few tokens compute it.
    """
    y_TN, x_TK, a_SRK, b_SNR, ranks_SM, slots_T, sizes = operands
    (num_tokens, num_results), (_, rows, k), rank = y_TN.shape, a_SRK.shape, b_SNR.shape[2]
    block_r = 8 if rank <= LOW_RANK else 16
    block_k = ELEMENTS // block_r
    num_splits, dependent = cdiv(k, block_k), dependent_launch(x_TK.device)
    z = torch.empty((num_splits, num_tokens, rows), dtype=torch.float32, device=x_TK.device)
    shrink_token_kernel[(num_tokens, num_splits, len(sizes) * cdiv(rank, block_r))](
        *(x_TK, a_SRK, ranks_SM, slots_T, z, num_tokens),
        K=k,
        RANK=rank,
        MEMBERS=len(sizes),
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        **dependent,
    )
    block_rank = next_power_of_2(rank)
    block_n = min(RESULTS, ELEMENTS // block_rank)
    members, tiles = tiles_of_members(sizes, block_n)
    out_TN = torch.empty_like(y_TN)
    expand_token_kernel[(num_tokens, tiles)](
        *(y_TN, z, b_SNR, ranks_SM, slots_T, out_TN, num_tokens),
        N=num_results,
        RANK=rank,
        NUM_SPLITS=num_splits,
        BLOCK_S=next_power_of_2(num_splits),
        BLOCK_N=block_n,
        BLOCK_R=block_rank,
        **members,
        **dependent,
    )
    return out_TN
