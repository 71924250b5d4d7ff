"""Launches Hopper's kernel for linears of four-bit codes and many tokens, and chooses its tile sizes by a rule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from compiled_engine.kernels.boxes import Box
from compiled_engine.kernels.launch_arguments import PRODUCT_COPYING, WARPS, cdiv, computing_registers
from compiled_engine.passes.linear.hopper_linear import (
    SHARED_MEMORY,
    box_of_results,
    layout_of_boxes,
    multiprocessors,
    rows_for_boxes,
)
from compiled_engine.passes.linear.split_sums import sum_splits

# Columns of a block; rows of a tile, of two groups of warps; token tiles that take the same rows one after another.
_BLOCK, _ROWS, _TOGETHER = 128, 128, 8
# Bytes of a stage of codes: of each row 16 words, a scale and a zero point.
_WORD_STAGES, _WORD_STAGE = 4, _ROWS * (64 + 4 + 2)
# Parts of a tile's tokens: powers of two, each one operand of a tensor-core product.
PARTS = {128: (128, 0), 144: (128, 16), 160: (128, 32), 192: (128, 64), 256: (256, 0)}
# Tokens of a tile, and the time of one of its blocks in microseconds: fitted, like the following constants, on an H200,
# for 256 to 384 tokens. That of 256 tokens is nearer to what thousands of tokens take.
_BLOCK_TIMES = {128: 0.81, 144: 0.95, 160: 0.99, 192: 1.01, 256: 1.25}
# Time for the start and the end of a tile, in blocks.
_ENDS = 3
# Time of the kernel that adds splits in microseconds, and bytes of partial sums per microsecond.
_SUM, _PARTIAL_SUMS = 2.6, 5.2e6
# Decoding first: microseconds of a launch, weights decoded per microsecond; then bytes of 16-bit weights read and
# operations done per microsecond.
_LAUNCH, _DECODED, _READ, _OPERATIONS = 4.0, 1.08e6, 3.6e6, 0.9e9
_MOST_SPLITS, _LEAST_BLOCKS = 8, 4


@dataclass(frozen=True)
class IntegerTiles:
    """Sizes of a tile: `tokens` tokens and 128 rows, gate and up counted together, over one of `splits` parts of K.

    Raises ValueError for values that are not allowed.
    """

    tokens: int  # those of PARTS
    splits: int  # divides the number of blocks of 128 columns
    stages: int  # of tokens, each of half a block

    def __post_init__(self) -> None:
        if self.tokens not in PARTS:
            raise ValueError(f"tokens is {self.tokens}; allowed: {', '.join(map(str, PARTS))}")
        for name, least in (("splits", 1), ("stages", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: at least {least}")

    @property
    def parts(self) -> tuple[int, int]:
        """The tokens of the first and the second part; the second may be 0."""
        return PARTS[self.tokens]


def tiles_with(tokens: int, splits: int, gated: bool) -> IntegerTiles:
    """Return the tile sizes with as many stages as fit a multiprocessor's shared memory.

    tokens, splits: see IntegerTiles. gated: the weight has gate and up.
    """
    parts, outputs = PARTS[tokens], 32 if gated else 64
    # Results of a group: 128 tokens at a time, for gate and up 256; a small second part has its own place.
    at_once = 256 if gated and parts[0] == 256 else 128 + (parts[1] if parts[1] <= 32 else 0)
    results = 0 if splits > 1 else 2 * at_once * outputs * 2
    stages = (SHARED_MEMORY - results - _WORD_STAGES * _WORD_STAGE) // (tokens * _BLOCK)
    return IntegerTiles(tokens, splits, stages)


@cache
def integer_product_tiles(
    num_tokens: int, num_rows: int, k: int, gated: bool, num_multiprocessors: int
) -> IntegerTiles:
    """Return the tile sizes with which a [num_tokens, k] x [num_rows, k] product takes the least estimated time.

    gated: num_rows counts gate and up together.
    """
    return tiles_with(*min(_estimates(num_tokens, num_rows, k, num_multiprocessors))[1:], gated)


def is_faster_decoded(num_tokens: int, num_rows: int, k: int, num_multiprocessors: int) -> bool:
    """Return whether, by an estimate, it is faster to decode the whole weight once, before the matrix product.

    That is so for thousands of tokens, since the kernel decodes the rows again for each tile of tokens.
    """
    product = max(2 * num_rows * k / _READ, 2 * num_tokens * num_rows * k / _OPERATIONS)
    decoded = _LAUNCH + num_rows * k / _DECODED + product
    return decoded < min(_estimates(num_tokens, num_rows, k, num_multiprocessors))[0]


def _estimates(num_tokens: int, num_rows: int, k: int, num_multiprocessors: int) -> list[tuple[float, int, int]]:
    """Return (estimated microseconds, tokens of a tile, splits of K) for each way to divide a product into tiles."""
    blocks, found = k // _BLOCK, []
    for tokens, block_time in _BLOCK_TIMES.items():
        for splits in range(1, _MOST_SPLITS + 1):
            if splits > 1 and (blocks % splits or blocks // splits < _LEAST_BLOCKS):
                continue
            tiles = cdiv(num_tokens, tokens) * cdiv(num_rows, _ROWS) * splits
            us = cdiv(tiles, num_multiprocessors) * (blocks // splits + _ENDS) * block_time
            if splits > 1:  # partial sums of 4 bytes are written and read
                us += _SUM + 8 * splits * num_tokens * num_rows / _PARTIAL_SUMS
            found.append((us, tokens, splits))
    return found


def hopper_integer_product(
    x_TK: torch.Tensor,
    words: torch.Tensor,
    scales_CN: torch.Tensor,
    zeros_CN: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    residual_TM: torch.Tensor | None,
    gated: bool,
    activation: str,
    zero: int,
    tiles: IntegerTiles | None = None,
) -> torch.Tensor:
    """Return the same as hopper_integers (see there for the arguments), but for any number of tokens.

    Decoded weights are rounded to the results' dtype before the product, as in `integer_product.decode_words`. tiles:
    if None, those of integer_product_tiles.
    """
    from compiled_engine.kernels import hopper_integer_product_kernel as kernels  # Gluon takes a while to import

    (num_tokens, k), num_rows = x_TK.shape, words.shape[0]
    if tiles is None:
        tiles = integer_product_tiles(num_tokens, num_rows, k, gated, multiprocessors(x_TK.device))
    x_TK = rows_for_boxes(x_TK)
    outputs = num_rows // 2 if gated else num_rows
    out_TM = torch.empty((num_tokens, outputs), dtype=x_TK.dtype, device=x_TK.device)
    is_split, of_row = tiles.splits > 1, k // 8
    partials = None
    if is_split:
        partials = torch.empty((tiles.splits, num_tokens, num_rows), dtype=torch.float32, device=x_TK.device)
    of_words, of_scales, of_zeros, of_tokens, of_results = _boxes(tiles, gated)
    tokens = [box and box.of(x_TK, [num_tokens, k], [x_TK.stride(0), 1]) for box in of_tokens]
    results = [None if is_split else box and box.of(out_TM, [num_tokens, outputs], [outputs, 1]) for box in of_results]
    if gated:
        shape, strides = [outputs // 8, 2, 8, of_row], [8 * of_row, outputs * of_row, of_row, 1]
        grid, steps = [k // _BLOCK, outputs // 8, 2, 8], [num_rows, 8, outputs, 1]
    else:
        shape, strides = [num_rows, of_row], [of_row, 1]
        grid, steps = [k // _BLOCK, num_rows], [num_rows, 1]
    token_tiles, row_tiles = cdiv(num_tokens, tiles.tokens), cdiv(num_rows, _ROWS)
    programs = min(multiprocessors(x_TK.device), token_tiles * row_tiles * tiles.splits)
    kernels.hopper_integer_product_kernel[(programs,)](
        of_words.of(words, shape, strides),
        of_scales.of(scales_CN, grid, steps),
        None if zeros_CN is None else of_zeros.of(zeros_CN, grid, steps),
        *tokens,
        *results,
        None if is_split else bias_N,
        partials,
        num_tokens,
        outputs,
        token_tiles,
        row_tiles,
        K=k,
        PART0=tiles.parts[0],
        PART1=tiles.parts[1],
        STAGES=tiles.stages,
        WORD_STAGES=_WORD_STAGES,
        SPLITS=tiles.splits,
        GATED=gated,
        ACTIVATION=activation,
        TOGETHER=_TOGETHER,
        ZERO=zero,
        REGISTERS=computing_registers(2, PRODUCT_COPYING),
        num_warps=WARPS,
        launch_pdl=True,
    )
    if partials is not None:
        if residual_TM is not None and not residual_TM.is_contiguous():
            residual_TM = residual_TM.contiguous()
        sum_splits(partials, bias_N, residual_TM, gated, activation, out_TM)
        return out_TM
    return out_TM if residual_TM is None else residual_TM + out_TM


@cache
def _boxes(tiles: IntegerTiles, gated: bool) -> tuple[Box, Box, Box, list[Box | None], list[Box | None]]:
    """Return the TMA boxes of words, scales, zero points, and for each part of the tokens (tokens, results).

    None: the part has no tokens.
    """
    from compiled_engine.kernels import hopper_integer_product_kernel as kernels

    rows, words = kernels.ROWS.value, kernels.WORDS.value
    shape = (rows // 16, 2, 8) if gated else (rows,)
    rank = len(shape) + 1
    outputs = rows // 2 if gated else rows
    return (
        Box((*shape, words), kernels.word_layout(rank)),
        Box((1, *shape), kernels.row_layout(32, rank)),
        Box((1, *shape), kernels.row_layout(16, rank)),
        [Box((part, kernels.HALF.value), layout_of_boxes(16, 2)) if part else None for part in tiles.parts],
        [box_of_results(min(part, 128), outputs) if part else None for part in tiles.parts],
    )
