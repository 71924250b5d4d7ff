"""Launches Hopper's kernel for linears of 8-bit codes (quantised values) and more than 64 tokens.

Also says which linears the kernel supports, and chooses its tile sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from compiled_engine.kernels.boxes import Box
from compiled_engine.kernels.launch_arguments import PRODUCT_COPYING, WARPS, cdiv, computing_registers
from compiled_engine.passes.linear.hopper_linear import box_of_results, layout_of_boxes, multiprocessors, rows_for_boxes
from compiled_engine.passes.linear.quantised_product import Scaling
from compiled_engine.quantisation import LinearScheme

GROUPS, COLUMNS = 2, 128


@dataclass(frozen=True)
class CodesTiles:
    """Tile sizes of a program: 2 * `tokens` tokens and `rows` rows of the weight, gate and up counted together.

    stages: stages of the ring buffer in shared memory, of 128 columns each.
    """

    tokens: int  # 64 or 128
    rows: int  # 64 or 128
    stages: int
    together: int = 8  # token tiles that use the same rows in turn


# Microseconds that a tile takes for 32 steps on an H100 while every multiprocessor computes one, by whether blocks of
# the weight have scales, and by tile sizes. The largest tiles leave no registers for block scales.
_LARGE, _SQUARE, _NARROW = CodesTiles(128, 128, 4), CodesTiles(64, 128, 6), CodesTiles(64, 64, 8)
COSTS = {False: {_LARGE: 28.1, _SQUARE: 16.6, _NARROW: 11.8}, True: {_SQUARE: 18.3, _NARROW: 13.3}}

# Token counts that together select every tile that a matrix of at least 1,024 rows can get.
TOKEN_COUNTS = (64, 128, 256, 384, 1024, 1152, 2048, 4096)


@cache
def codes_tiles(num_tokens: int, num_rows: int, has_blocks: bool, num_multiprocessors: int) -> CodesTiles:
    """Return the tile sizes with the least estimated time.

    The estimate is the number of tiles that a multiprocessor computes one after another, times a tile's time in COSTS.

    num_rows: gate and up counted together. has_blocks: blocks of the weight have a scale each, rather than whole rows.
    """

    def cost(tiles: CodesTiles) -> float:
        count = cdiv(num_tokens, GROUPS * tiles.tokens) * cdiv(num_rows, tiles.rows)
        return cdiv(count, num_multiprocessors) * COSTS[has_blocks][tiles]

    return min(COSTS[has_blocks], key=cost)


def why_not_on_the_left(num_rows: int, gated: bool, scheme: LinearScheme) -> str | None:
    """Return why hopper_codes does not support a linear that hopper_product supports; None if it does.

    hopper_codes has the tokens on the left of the tensor cores' products. num_rows: rows of the weight. gated: the
    weight has gate and up, and num_rows counts them together.
    """
    weight, inputs = scheme.weight, scheme.inputs
    input_columns = 0 if inputs is None or inputs.static else inputs.columns
    if weight.columns != input_columns:
        return f"its weight and inputs have scales of different columns ({scheme})"
    if not weight.columns:
        return None
    part = COLUMNS // 2 if gated else COLUMNS
    if weight.rows % part or (gated and num_rows // 2 % part):
        return f"tiles of {part} rows have several scales ({scheme})"
    return None


def hopper_codes(
    x_TK: torch.Tensor,
    codes_NK: torch.Tensor,
    gated: bool,
    activation: str,
    scaling: Scaling,
    dtype: torch.dtype,
    tiles: CodesTiles | None = None,
) -> torch.Tensor:
    """Return y = x @ weight^T, [T, N], or with `gated` activation(gate) * up, [T, N / 2], in `dtype`.

    x and the weight are 8-bit codes with the scales `scaling`; gate and up are the halves of y. The weight must be
    contiguous, K a multiple of 16, and N of 8, or of 16 with `gated`; see also why_not_on_the_left. tiles: if None,
    those of codes_tiles.
    """
    if tiles is None:
        many = multiprocessors(x_TK.device)
        tiles = codes_tiles(x_TK.shape[0], codes_NK.shape[0], scaling.columns > 0, many)
    from compiled_engine.kernels import hopper_codes_kernel as kernels  # Gluon takes a while to import

    num_tokens, k = x_TK.shape
    x_TK = rows_for_boxes(x_TK)
    num_rows, rows = codes_NK.shape[0], tiles.rows
    outputs = num_rows // 2 if gated else num_rows
    written = rows // 2 if gated else rows
    block = kernels.BLOCK.value
    out_TM = torch.empty((num_tokens, outputs), dtype=dtype, device=x_TK.device)
    of_weight, of_tokens, of_results = _boxes(tiles, gated)
    if gated:
        shape, strides = [outputs // block, 2, block, k], [block * k, outputs * k, k, 1]
    else:
        shape, strides = [num_rows, k], [k, 1]
    weight = of_weight.of(codes_NK, shape, strides)
    tokens = of_tokens.of(x_TK, [num_tokens, k], [x_TK.stride(0), 1])
    results = of_results.of(out_TM, [num_tokens, outputs], [outputs, 1])
    token_tiles, row_tiles = cdiv(num_tokens, GROUPS * tiles.tokens), cdiv(outputs, written)
    kernels.hopper_codes_kernel[(min(multiprocessors(x_TK.device), token_tiles * row_tiles),)](
        weight,
        tokens,
        results,
        scaling.weights_RC,
        scaling.inputs_CT,
        scaling.input_stride,
        num_tokens,
        outputs,
        token_tiles,
        row_tiles,
        K=k,
        GROUP_TOKENS=tiles.tokens,
        ROWS=rows,
        STAGES=tiles.stages,
        GATED=gated,
        ACTIVATION=activation,
        TOGETHER=tiles.together,
        REGISTERS=computing_registers(GROUPS, PRODUCT_COPYING),
        TILE_ROWS=scaling.rows or num_rows,
        TILE_COLUMNS=scaling.columns,
        num_warps=WARPS,
        launch_pdl=True,
    )
    return out_TM


@cache
def _boxes(tiles: CodesTiles, gated: bool) -> tuple[Box, Box, Box]:
    """Return (TMA box of the weight, TMA box of the tokens, TMA box of the results)."""
    from compiled_engine.kernels import hopper_codes_kernel as kernels

    rows, block = tiles.rows, kernels.BLOCK.value
    if gated:
        weight = Box((rows // 2 // block, 2, block, COLUMNS), layout_of_boxes(8, 4))
    else:
        weight = Box((rows, COLUMNS), layout_of_boxes(8, 2))
    tokens = Box((tiles.tokens, COLUMNS), layout_of_boxes(8, 2))
    return weight, tokens, box_of_results(64, rows // 2 if gated else rows)
