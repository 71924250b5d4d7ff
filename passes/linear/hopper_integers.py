"""Launches Hopper's kernel for linears of four-bit codes and up to 128 tokens.

Also says which linears the kernel supports, and chooses its tile sizes. The kernel reads codes in words (see
rounding.to_words), and scales and zero points transposed, [K / 128, N]. If a linear's codes have dtype int32, its
operands are in this layout.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from compiled_engine.kernels.boxes import Box
from compiled_engine.kernels.launch_arguments import WARPS, cdiv
from compiled_engine.passes.framework.rounding import from_words
from compiled_engine.passes.linear.hopper_linear import (
    SHARED_MEMORY,
    TOKEN_BUCKETS,
    HopperTiles,
    layout_of_boxes,
    multiprocessors,
    rows_for_boxes,
)
from compiled_engine.passes.linear.split_sums import sum_splits
from compiled_engine.quantisation import LinearScheme

# Columns of a step, and the only supported columns per scale.
COLUMNS = 128
MOST_TOKENS = TOKEN_BUCKETS[-1]
# Registers of a thread, by how many programs of one group of warps a multiprocessor holds; 0: no limit.
_REGISTERS = {3: 80, 2: 128, 1: 0}
# From this many programs per multiprocessor on, a program has three groups of warps, which share the tokens.
_GROUPED = 2
# Most splits, and fewest blocks of 128 columns per split.
_MOST_SPLITS, _LEAST_BLOCKS = 8, 8
# Most columns that few tokens are multiplied by without splits, which need a second kernel.
_SHORT = 4096


def why_not_in_words(num_rows: int, k: int, scheme: LinearScheme, dtype: torch.dtype) -> str | None:
    """Return why Hopper's kernel for four-bit codes does not support a linear; None if it does.

    num_rows, k: sizes of the weight. dtype: dtype of the results.
    """
    weight = scheme.weight
    if not weight.is_integer or weight.format.per_byte != 2 or scheme.inputs is not None:
        return f"its weight is no matrix of four-bit integers, or its inputs are rounded ({scheme})"
    if weight.rows != 1 or weight.columns != COLUMNS:
        return f"its scales are not of {COLUMNS} columns of a row ({scheme})"
    if k % COLUMNS or num_rows % 16:
        return f"its sizes [{num_rows}, {k}] are no multiples of 16 and {COLUMNS}"
    return None if dtype.itemsize == 2 else f"its results are {str(dtype).removeprefix('torch.')}"


def in_rows(
    words: torch.Tensor, scales_CN: torch.Tensor, zeros_CN: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Convert operands of Hopper's kernel to the layout that other kernels read.

    Returns packed codes [N, K / 2], scales [N, K / 128], and zero points of the same shape or None.
    """
    return from_words(words), scales_CN.t(), None if zeros_CN is None else zeros_CN.t().to(torch.uint8)


@cache
def integer_tiles(
    num_tokens: int, num_rows: int, k: int, gated: bool, has_zeros: bool, num_multiprocessors: int
) -> tuple[HopperTiles, int]:
    """Return (tile sizes, number of splits of K) for a linear of `num_tokens` tokens and a weight [num_rows, k].

    A program reads the inputs of all tokens in its columns, and from about 16 tokens on these are more bytes than the
    codes. Work is therefore divided among programs by columns rather than rows: K is split until the programs fill the
    multiprocessors. gated: num_rows counts gate and up together.
    """
    tokens = max(8, next(bucket for bucket in TOKEN_BUCKETS if num_tokens <= bucket))
    programs, blocks = cdiv(num_rows, 64), k // COLUMNS
    together = 3 if tokens <= 32 else 2 if tokens <= 64 else 1
    groups = parts = splits = 1
    if tokens == 64 and programs >= _GROUPED * num_multiprocessors:
        groups, together = 3, 1
    elif tokens == 8 and not gated and k <= _SHORT and 4 * programs <= 3 * num_multiprocessors and blocks % 8 == 0:
        parts = 4
    else:
        fitting = [n for n in range(1, _MOST_SPLITS + 1) if blocks % n == 0 and blocks // n >= _LEAST_BLOCKS]
        splits = max(n for n in (1, *fitting) if n == 1 or n * programs <= together * num_multiprocessors)
    programs = cdiv(programs * parts, groups) * splits
    together = min(together, max(1, cdiv(programs, num_multiprocessors)))
    steps = blocks // splits // parts
    for products in (4, 2, 1):
        tiles = HopperTiles(groups, tokens, 1, _REGISTERS[together] if groups == 1 else 0, parts, products)
        tiles = with_stages(tiles, gated, has_zeros, k // splits, together)
        if steps % products == 0 and tiles.stages >= min(2, steps // products):
            break
    return tiles, splits


def stage_bytes(tiles: HopperTiles, has_zeros: bool) -> int:
    """Return the shared memory of a stage in bytes: for codes, scales, zero points and tokens."""
    rows = 64 * tiles.groups
    return tiles.products * (rows * (COLUMNS // 2 + 4 + 2 * has_zeros) + tiles.parts * tiles.tokens * 2 * COLUMNS)


def with_stages(tiles: HopperTiles, gated: bool, has_zeros: bool, k: int, together: int) -> HopperTiles:
    """Return `tiles` with as many stages of the ring buffer as fit the shared memory, at most one per step along k.

    k: columns of a split. together: number of programs that run on a multiprocessor at the same time.
    """
    steps = k // (COLUMNS * tiles.parts * tiles.products)
    room = SHARED_MEMORY // together - tiles.ending_bytes(gated)
    return replace(tiles, stages=max(1, min(room // stage_bytes(tiles, has_zeros), steps)))


def hopper_integers(
    x_TK: torch.Tensor,
    words: torch.Tensor,
    scales_CN: torch.Tensor,
    zeros_CN: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    residual_TM: torch.Tensor | None,
    gated: bool,
    activation: str,
    zero: int,
    tiles: tuple[HopperTiles, int] | None = None,
) -> torch.Tensor:
    """Return y = linear(x) + residual, [T, N], or with `gated` activation(gate) * up + residual, [T, N / 2].

    gate and up are the halves of linear(x). words: int32 [N, K / 8]; scales_CN: fp32 [K / 128, N]; zeros_CN: int16 [K /
    128, N]; None: the zero point of all codes is `zero`. T may be at most MOST_TOKENS and at most the tile's tokens;
    see also why_not_in_words. tiles: (tile sizes, splits of K); if None, those of integer_tiles.
    """
    from compiled_engine.kernels import hopper_linear_kernel as gluon  # Gluon takes a while to import

    (num_tokens, k), num_rows = x_TK.shape, words.shape[0]
    if tiles is None:
        many = multiprocessors(x_TK.device)
        tiles = integer_tiles(num_tokens, num_rows, k, gated, zeros_CN is not None, many)
    tile, splits = tiles
    x_TK = rows_for_boxes(x_TK)
    if residual_TM is not None and not residual_TM.is_contiguous():
        residual_TM = residual_TM.contiguous()
    outputs = num_rows // 2 if gated else num_rows
    out_TM = torch.empty((num_tokens, outputs), dtype=x_TK.dtype, device=x_TK.device)
    written = out_TM
    if splits > 1:
        written = torch.empty((splits, num_tokens, num_rows), dtype=torch.float32, device=x_TK.device)
    rows, block, boxes = gluon.ROWS.value, gluon.BLOCK.value, tile.parts * tile.products
    of_words, of_tokens, of_scales, of_zeros = _boxes(tile, gated)
    # A box of each operand begins 128 columns after the one before it.
    of_row = k // 8
    if gated:
        shape, strides = [boxes, outputs // block, 2, block, of_row], [16, block * of_row, outputs * of_row, of_row, 1]
        grid, steps = [k // COLUMNS, outputs // block, 2, block], [num_rows, block, outputs, 1]
    else:
        shape, strides = [boxes, num_rows, of_row], [16, of_row, 1]
        grid, steps = [k // COLUMNS, num_rows], [num_rows, 1]
    by_token = [64, COLUMNS, x_TK.stride(0), 1]
    gluon.hopper_linear_kernel[(cdiv(num_rows, tile.groups * (rows // tile.parts)), splits)](
        of_words.of(words, shape, strides),
        of_tokens.of(x_TK, [2, boxes, num_tokens, k], by_token),
        written,
        None if splits > 1 else bias_N,
        None if splits > 1 else residual_TM,
        num_tokens,
        outputs,
        K=k,
        GROUPS=tile.groups,
        TOKENS=tile.tokens,
        STAGES=tile.stages,
        PARTS=tile.parts,
        PRODUCTS=tile.products,
        GATED=gated,
        ACTIVATION=activation,
        REGISTERS=tile.computing_registers(),
        s_desc=of_scales.of(scales_CN, grid, steps),
        z_desc=None if zeros_CN is None else of_zeros.of(zeros_CN, grid, steps),
        ZERO=zero,
        SPLITS=splits,
        num_warps=WARPS,
        maxnreg=tile.registers or None,
        launch_pdl=True,
    )
    if splits > 1:
        sum_splits(written, bias_N, residual_TM, gated, activation, out_TM)
    return out_TM


@cache
def _boxes(tiles: HopperTiles, gated: bool) -> tuple[Box, Box, Box, Box]:
    """Return (TMA box of the words, of the tokens, of the scales, of the zero points)."""
    from compiled_engine.kernels import hopper_integers as kernels
    from compiled_engine.kernels import hopper_linear_kernel as gluon

    parts, boxes, words = tiles.parts, tiles.parts * tiles.products, kernels.WORDS.value
    shape = (gluon.BLOCKS.value // parts, 2, gluon.BLOCK.value) if gated else (gluon.ROWS.value // parts,)
    rank = len(shape) + 1
    return (
        Box((boxes, *shape, words), kernels.word_layout(rank + 1)),
        Box((2, boxes, tiles.tokens, 64), layout_of_boxes(16, 4)),
        Box((boxes, *shape), kernels.row_layout(32, rank)),
        Box((boxes, *shape), kernels.row_layout(16, rank)),
    )
