"""Triton kernel: a linear whose result for a token does not depend on the number of tokens, bit for bit.

The columns of the weight are divided into parts, whose number follows from the weight's shape alone. The products of a
part are added in steps of BLOCK_K columns, and the parts in their order. With few tokens each part has programs of its
own, which store their sums; with many tokens a program computes all parts of a tile. A tile has rows of the weight on
its left, so that tensor cores multiply by the same instructions whatever the number of tokens is.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.linear.split_sums import sum_splits

# A launch takes the tile for the smallest of these token counts that is not below its own; a larger tile beyond them.
TOKEN_BUCKETS = (16, 32, 64)
# With more tokens, a program computes all parts of a tile.
MOST_SPREAD = 256
# Columns of a step.
BLOCK_K = 64
# Programs that a launch with one tile of tokens should have, and the least columns of a part.
PROGRAMS, LEAST_PART = 256, 512
MOST_PARTS = 8


class Tile(NamedTuple):
    """The rows of the weight and the tokens of a tile, and the options with which its kernel is compiled."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


@cache
def part_of(num_rows: int, num_columns: int) -> int:
    """Return the number of columns of a part of a weight [num_rows, num_columns]; the last part may have fewer."""
    parts = min(MOST_PARTS, cdiv(PROGRAMS, cdiv(num_rows, 64)), max(1, num_columns // LEAST_PART))
    return cdiv(cdiv(num_columns, parts), BLOCK_K) * BLOCK_K


@cache
def tile_of(num_tokens: int, element_size: int) -> Tile:
    """Return the tile sizes for a number of tokens. element_size: bytes per element of the inputs."""
    if element_size == 4:
        return Tile(32, 16 if num_tokens <= 16 else 32, 4, 2)
    for tokens in TOKEN_BUCKETS:
        if num_tokens <= tokens:
            return Tile(64, tokens, 4, 4)
    return Tile(128, 128, 8, 3)


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
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute x w^T + bias for a tile. Program (tile of TOKENS tokens, tile of ROWS rows of the weight, part).

    Parts are PART columns each.

    x_ptr: [num_tokens, K], rows x_stride apart. w_ptr: [N, K]. bias_ptr: [N], or None. out_ptr: [num_tokens, N].
    partials_ptr: fp32 [parts, num_tokens, N], receives the sums over the program's part. None: the program computes all
        parts and writes to out.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    PARTS: tl.constexpr = (K + PART - 1) // PART
    EVEN: tl.constexpr = K % BLOCK_K == 0
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row_N = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column_K = tl.arange(0, BLOCK_K)
    x_ptrs_TK = x_ptr + token_T.to(tl.int64)[:, None] * x_stride + column_K[None, :]
    w_ptrs_NK = w_ptr + row_N.to(tl.int64)[:, None] * K + column_K[None, :]
    x_mask_T1 = (token_T < num_tokens)[:, None]
    w_mask_N1 = (row_N < N)[:, None]
    offsets_NT = token_T.to(tl.int64)[None, :] * N + row_N[:, None]
    mask_NT = (token_T < num_tokens)[None, :] & (row_N < N)[:, None]
    first_part = 0
    end_part = PARTS
    if partials_ptr is not None:
        first_part = tl.program_id(2)
        end_part = first_part + 1
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
        total_NT += acc_NT
    if partials_ptr is not None:
        offset = tl.program_id(2).to(tl.int64) * num_tokens * N
        tl.store(partials_ptr + offset + offsets_NT, total_NT, mask=mask_NT)
    else:
        if bias_ptr is not None:
            total_NT += tl.load(bias_ptr + row_N, mask=row_N < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + offsets_NT, total_NT.to(out_ptr.dtype.element_ty), mask=mask_NT)


def invariant_product(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """Return x weight^T + bias, [T, N], in the dtype of x. Sums are fp32. x may have gaps between its rows.

    A row of the result depends on the same row of x, the weight and the bias alone.
    """
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    (num_tokens, num_columns), num_rows = x_TK.shape, weight_NK.shape[0]
    out_TN = x_TK.new_empty((num_tokens, num_rows))
    if not num_tokens:
        return out_TN
    part = part_of(num_rows, num_columns)
    parts = cdiv(num_columns, part)
    tile = tile_of(num_tokens, x_TK.element_size())
    spread = parts > 1 and num_tokens <= MOST_SPREAD
    partials_STN = x_TK.new_empty((parts, num_tokens, num_rows), dtype=torch.float32) if spread else None
    invariant_product_kernel[(cdiv(num_tokens, tile.tokens), cdiv(num_rows, tile.rows), parts if spread else 1)](
        x_TK,
        weight_NK,
        bias_N,
        out_TN,
        partials_STN,
        num_tokens,
        x_TK.stride(0),
        N=num_rows,
        K=num_columns,
        PART=part,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        BLOCK_K=BLOCK_K,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(x_TK.device),
    )
    if partials_STN is not None:
        sum_splits(partials_STN, bias_N, None, False, "", out_TN)
    return out_TN
