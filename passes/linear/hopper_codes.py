"""Quantised linears of over 128 tokens on Hopper with tokens on the left of its products: what it takes; its launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from compiled_engine.kernels.launch_arguments import PRODUCT_COPYING, WARPS, cdiv, computing_registers
from compiled_engine.passes.linear.hopper_linear import multiprocessors, rows_for_boxes
from compiled_engine.passes.linear.quantised_product import Scaling
from compiled_engine.quantisation import LinearScheme

GROUPS, COLUMNS = 2, 128


@dataclass(frozen=True)
class CodesTiles:
    """A tile is two times `tokens` (64 or 128) tokens and `rows` (64 or 128) rows of the weight, gate and up counted
    together. Columns pass in `stages` stages of 128. `together`: token tiles that take the same rows in turn."""

    tokens: int
    rows: int
    stages: int
    together: int = 8


def why_not_on_the_left(num_rows: int, gated: bool, scheme: LinearScheme) -> str | None:
    """Why the kernel does not take what Hopper's product does; None where it does."""
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
    tiles: CodesTiles,
    scaling: Scaling,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The linear of codes, or with `gated` activation(gate) * up of its halves: [T, N] or [T, N / 2] in `dtype`.

    The weight is contiguous, K is a multiple of 16, and N of 8 or, with `gated`, of 16; see why_not_on_the_left.
    """
    # Gluon takes a while to import, and only a Hopper needs it.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from compiled_engine.kernels import hopper_linear_kernel as ring
    from compiled_engine.kernels.hopper_codes_kernel import hopper_codes_kernel

    num_tokens, k = x_TK.shape
    x_TK = rows_for_boxes(x_TK)
    num_rows, rows = codes_NK.shape[0], tiles.rows
    outputs = num_rows // 2 if gated else num_rows
    written = rows // 2 if gated else rows
    block, shared = ring.BLOCK.value, ring.shared_layout(8, 2)
    out_TM = torch.empty((num_tokens, outputs), dtype=dtype, device=x_TK.device)
    if gated:
        shape, strides = [outputs // block, 2, block, k], [block * k, outputs * k, k, 1]
        box = [written // block, 2, block, COLUMNS]
        weight = TensorDescriptor(codes_NK, shape, strides, box, ring.shared_layout(8, 4))
    else:
        weight = TensorDescriptor(codes_NK, [num_rows, k], [k, 1], [rows, COLUMNS], shared)
    tokens = TensorDescriptor(x_TK, [num_tokens, k], [x_TK.stride(0), 1], [tiles.tokens, COLUMNS], shared)
    results = TensorDescriptor(out_TM, [num_tokens, outputs], [outputs, 1], [64, written], _out_shared(written))
    token_tiles, row_tiles = cdiv(num_tokens, GROUPS * tiles.tokens), cdiv(outputs, written)
    hopper_codes_kernel[(min(multiprocessors(x_TK.device), token_tiles * row_tiles),)](
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
def _out_shared(outputs: int) -> Any:
    """Layout of results in shared memory, with this many side by side."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=min(128, 2 * outputs), element_bitwidth=16, rank=2)
