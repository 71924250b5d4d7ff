"""Triton kernel: a linear whose result for a token does not depend on the number of tokens, bit for bit.

The columns of the weight are divided into parts, whose number follows from the weight's shape alone. The products of a
part are added in steps of 16 columns, and the parts in their order. With few tokens each part has programs of its own,
which store their sums; with many tokens a program computes all parts of a tile. A tile has rows of the weight on its
left, so that tensor cores multiply by the same instructions whatever the number of tokens is. With few tokens a program
uses only some of these rows, so that all multiprocessors read the weight.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, is_hopper
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.linear.small_batch_linear_gemv import finish
from compiled_engine.passes.linear.small_batch_linear_tiles import weight_rows
from compiled_engine.passes.linear.split_sums import sum_splits

# A launch takes the tile for the smallest of these token counts that is not below its own; the last tile beyond them.
TOKEN_BUCKETS = (16, 32, 64, 256)
# With more tokens, a program computes all parts of a tile.
MOST_SPREAD = 64
# Columns of a part are a multiple of this number, and of each step's columns.
STEP = 256
# Rows that a program has at least with few tokens, programs that a launch should then have, and columns of a part.
FEWEST_ROWS, PROGRAMS, LEAST_PART = 32, 128, 512
MOST_PARTS = 8
# Tiles of tokens whose programs follow one another, so that they find rows of the weight in the L2 cache.
TOGETHER = tl.constexpr(8)


class Tile(NamedTuple):
    """The rows of the weight and the tokens of a tile, and the options with which its kernel is compiled."""

    rows: int  # of a product of tensor cores
    used: int  # of these, rows that the program computes
    tokens: int
    columns: int  # of a step
    num_warps: int
    num_stages: int


@cache
def part_of(num_rows: int, num_columns: int) -> int:
    """Return the number of columns of a part of a weight [num_rows, num_columns]; the last part may have fewer."""
    parts = min(MOST_PARTS, cdiv(PROGRAMS, cdiv(num_rows, FEWEST_ROWS)), max(1, num_columns // LEAST_PART))
    return cdiv(cdiv(num_columns, parts), STEP) * STEP


@cache
def tile_of(num_tokens: int, num_rows: int, parts: int, element_size: int, hopper: bool) -> Tile:
    """Return the tile sizes for a number of tokens, and of the weight's rows and parts.

    element_size: bytes of an element. hopper: the GPU is a Hopper, whose shared memory holds more.
    """
    few = FEWEST_ROWS if cdiv(num_rows, 64) < PROGRAMS else 64
    if element_size == 4:
        return Tile(32, 32, 16 if num_tokens <= 16 else 32, 64, 4, 2)
    for tokens in (16, 32, 64):
        if num_tokens <= tokens:
            return Tile(64, few, tokens, 64 if not hopper else 256 if tokens <= 32 else 128, 4, 4)
    if not hopper:
        return Tile(128, 128, 128, 64, 8, 3)
    if num_tokens <= TOKEN_BUCKETS[-1]:
        return Tile(64, 64, 64, 64, 4, 5)
    # With several parts a program has the sums of two.
    return Tile(128, 128, 256 if parts == 1 else 128, 64, 8, 3)


@quick_launches
@triton.jit(do_not_specialize=["num_tokens"])
def invariant_product_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partials_ptr: tl.tensor,
    num_tokens: tl.tensor,
    x_stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    USED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SILU_MUL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute x w^T + bias for a tile. Program (tile, part): tiles of TOKENS tokens and USED rows of the weight.

    Parts are PART columns each.

    x_ptr: [num_tokens, K], rows x_stride apart. w_ptr: [N, K]. bias_ptr: [N], or None. out_ptr: [num_tokens, N], or
        [num_tokens, N / 2] with SILU_MUL, for ACTIVATION(gate) * up of the weight's halves.
    partials_ptr: fp32 [parts, num_tokens, N], receives the sums over the program's part. None: the program computes all
        parts and writes to out.
    ROWS: rows of a product of tensor cores, those from USED on are zeros.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    PARTS: tl.constexpr = (K + PART - 1) // PART
    EVEN: tl.constexpr = K % BLOCK_K == 0
    TILES_N: tl.constexpr = (N + USED - 1) // USED
    SPREAD: tl.constexpr = partials_ptr is not None
    # Programs of TOGETHER tiles of tokens go through the rows of the weight together.
    num_tiles_t = tl.cdiv(num_tokens, TOKENS)
    tile = tl.program_id(0)
    first_t = tile // (TOGETHER * TILES_N) * TOGETHER
    together = tl.minimum(num_tiles_t - first_t, TOGETHER)
    tile_t = first_t + tile % (TOGETHER * TILES_N) % together
    tile_n = tile % (TOGETHER * TILES_N) // together
    token_T = tile_t * TOKENS + tl.arange(0, TOKENS)
    r_N = tl.arange(0, ROWS)
    is_used_N = r_N < USED
    row_N = tile_n * USED + r_N
    if SILU_MUL:
        row_N = weight_rows(tile_n * (USED // 2), N // 2, ROWS, True)
    else:
        is_used_N &= row_N < N
    column_K = tl.arange(0, BLOCK_K)
    x_ptrs_TK = x_ptr + token_T.to(tl.int64)[:, None] * x_stride + column_K[None, :]
    w_ptrs_NK = w_ptr + row_N.to(tl.int64)[:, None] * K + column_K[None, :]
    exists_T = token_T < num_tokens
    x_mask_T1 = exists_T[:, None]
    w_mask_N1 = is_used_N[:, None]
    first_part = 0
    end_part = PARTS
    if SPREAD:
        first_part = tl.program_id(1)
        end_part = first_part + 1
    if DEPENDENT_LAUNCH:
        gdc_wait()
    total_NT = tl.zeros([ROWS, TOKENS], tl.float32)
    for part in range(first_part, end_part):
        acc_NT = tl.zeros([ROWS, TOKENS], tl.float32)
        for first in range(part * PART, tl.minimum(part * PART + PART, K), BLOCK_K):
            if EVEN:
                w_NK = tl.load(w_ptrs_NK + first, mask=w_mask_N1, other=0.0)
                x_TK = tl.load(x_ptrs_TK + first, mask=x_mask_T1, other=0.0)
            else:
                inside_1K = (first + column_K < K)[None, :]
                w_NK = tl.load(w_ptrs_NK + first, mask=w_mask_N1 & inside_1K, other=0.0)
                x_TK = tl.load(x_ptrs_TK + first, mask=x_mask_T1 & inside_1K, other=0.0)
            acc_NT = tl.dot(w_NK, tl.trans(x_TK), acc_NT, input_precision="ieee")
        if PARTS == 1 or SPREAD:
            total_NT = acc_NT
        else:
            total_NT += acc_NT
    offsets_T = token_T.to(tl.int64)[None, :]
    if SPREAD:
        offset = tl.program_id(1).to(tl.int64) * num_tokens * N
        offsets_NT = offsets_T * N + row_N[:, None]
        tl.store(partials_ptr + offset + offsets_NT, total_NT, mask=exists_T[None, :] & w_mask_N1)
    else:
        if bias_ptr is not None:
            total_NT += tl.load(bias_ptr + row_N, mask=is_used_N, other=0.0).to(tl.float32)[:, None]
        if SILU_MUL:
            output_M = tile_n * (USED // 2) + tl.arange(0, ROWS // 2)
            is_used_M = (tl.arange(0, ROWS // 2) < USED // 2) & (output_M < N // 2)
            pairs_M2T = tl.reshape(total_NT, [ROWS // 2, 2, TOKENS])
            gate_MT, up_MT = tl.split(tl.trans(pairs_M2T, (0, 2, 1)))
            offsets_MT = offsets_T * (N // 2) + output_M[:, None]
            mask_MT = exists_T[None, :] & is_used_M[:, None]
            finish(gate_MT, up_MT, None, out_ptr, offsets_MT, mask_MT, True, ACTIVATION, False)
        else:
            offsets_NT = offsets_T * N + row_N[:, None]
            tl.store(out_ptr + offsets_NT, total_NT.to(out_ptr.dtype.element_ty), mask=exists_T[None, :] & w_mask_N1)


def invariant_product(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, activation: str | None = None
) -> torch.Tensor:
    """Return x weight^T + bias, [T, N], in the dtype of x. Sums are fp32. x may have gaps between its rows.

    With an activation, returns activation(gate) * up of its two halves, [T, N / 2]. A row of the result depends on the
    same row of x, the weight and the bias alone.
    """
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    (num_tokens, num_columns), num_rows = x_TK.shape, weight_NK.shape[0]
    gated = activation is not None
    out_TM = x_TK.new_empty((num_tokens, num_rows // (2 if gated else 1)))
    if not num_tokens:
        return out_TM
    part = part_of(num_rows, num_columns)
    parts = cdiv(num_columns, part)
    tile = tile_of(num_tokens, num_rows, parts, x_TK.element_size(), is_hopper(x_TK.device))
    spread = parts > 1 and num_tokens <= MOST_SPREAD
    partials_STN = x_TK.new_empty((parts, num_tokens, num_rows), dtype=torch.float32) if spread else None
    num_tiles = cdiv(num_tokens, tile.tokens) * cdiv(num_rows, tile.used)
    invariant_product_kernel[(num_tiles, parts if spread else 1)](
        x_TK,
        weight_NK,
        bias_N,
        out_TM,
        partials_STN,
        num_tokens,
        x_TK.stride(0),
        N=num_rows,
        K=num_columns,
        PART=part,
        ROWS=tile.rows,
        USED=tile.used,
        TOKENS=tile.tokens,
        BLOCK_K=tile.columns,
        SILU_MUL=gated and not spread,
        ACTIVATION=activation or "",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(x_TK.device),
    )
    if partials_STN is not None:
        sum_splits(partials_STN, bias_N, None, gated, activation or "", out_TM)
    return out_TM
