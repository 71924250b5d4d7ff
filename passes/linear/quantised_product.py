"""Triton kernel of a quantised linear for any number of tokens, on tensor cores.

Tensor cores sum products of e4m3 with fewer bits than fp32 has, so the sums of each step of columns are added in fp32.
Products of int8 are summed exactly, in int32. Block scales are applied to the sum of a step, row scales at the end. The
kernel runs where there is no faster one: on many GPUs other than Hopper, for integers, for sizes that TMA cannot copy,
or if inputs are not rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.linear.small_batch_linear_gemv import finish
from compiled_engine.passes.linear.small_batch_linear_tiles import weight_rows
from compiled_engine.quantisation import LinearScheme

# Columns of a step: at least one tensor-core product.
LEAST_COLUMNS, MOST_COLUMNS = 32, 128
# From this many tokens on, tokens are the left operand of the tensor-core products, which needs 64 rows.
TOKENS_FIRST = 64


class Scaling(NamedTuple):
    """The scales of a weight and of a linear's inputs, and the sizes of the tiles that share a scale."""

    weights_RC: torch.Tensor
    inputs_CT: torch.Tensor | None  # transposed; None for inputs that are not rounded
    rows: int
    columns: int
    input_columns: int  # like rows and columns of the weight: the elements that share a scale; 0: all

    @property
    def input_stride(self) -> int:
        return 0 if self.inputs_CT is None else self.inputs_CT.stride(0)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments with which Hopper's kernels take the scales, by name."""
        return {
            "scales_ptr": self.weights_RC,
            "input_scales_ptr": self.inputs_CT,
            "input_stride": self.input_stride,
            "TILE_ROWS": self.rows,
            "TILE_COLUMNS": self.columns,
            "INPUT_COLUMNS": self.input_columns,
        }


@triton.jit
def store_outputs(
    y_TN: tl.tensor,
    first: tl.tensor,
    num_outputs: tl.tensor,
    token_T: tl.tensor,
    mask_T: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    SILU_MUL: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """Store the outputs from `first` on: y_TN plus bias, then with SILU_MUL activation(gate) * up, plus the residual.

    y_TN: products of tokens with the weight's rows that small_batch_linear_tiles.weight_rows returns. token_T, mask_T:
    indices of the tokens, and whether each exists. bias_ptr and residual_ptr may be None.
    """
    ROWS: tl.constexpr = y_TN.shape[1]
    OUTPUTS: tl.constexpr = ROWS // 2 if SILU_MUL else ROWS
    output_M = first + tl.arange(0, OUTPUTS)
    offsets_TM = token_T.to(tl.int64)[:, None] * num_outputs + output_M[None, :]
    mask_TM = mask_T[:, None] & (output_M < num_outputs)[None, :]
    RESIDUAL: tl.constexpr = residual_ptr is not None
    residual_TM = None
    if RESIDUAL:
        residual_TM = tl.load(residual_ptr + offsets_TM, mask=mask_TM, other=0.0)
    if bias_ptr is not None:
        row_N = weight_rows(first, num_outputs, ROWS, SILU_MUL)
        y_TN += tl.load(bias_ptr + row_N).to(tl.float32)[None, :]
    if SILU_MUL:
        gate_TM, up_TM = tl.split(tl.reshape(y_TN, offsets_TM.shape + [2]))  # noqa: RUF005 (Triton has no star)
        finish(gate_TM, up_TM, residual_TM, out_ptr, offsets_TM, mask_TM, SILU_MUL, ACTIVATION, RESIDUAL)
    else:
        finish(y_TN, None, residual_TM, out_ptr, offsets_TM, mask_TM, SILU_MUL, ACTIVATION, RESIDUAL)


@quick_launches
@triton.jit(do_not_specialize=["num_outputs", "num_tokens"])
def quantised_product_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    input_scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_outputs: tl.tensor,
    num_tokens: tl.tensor,
    x_stride: tl.tensor,
    input_stride: tl.tensor,
    K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    INPUT_COLUMNS: tl.constexpr,
    SILU_MUL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute a quantised linear with the activation and the residual add after it; see quantised_linear_op.reference.

    Program (rows, tokens) multiplies TOKENS tokens by ROWS rows of the weight.

    x_ptr: [num_tokens, K], codes, or values if input_scales_ptr is None. codes_ptr: [N, K].
    scales_ptr, input_scales_ptr: see Scaling. A scale holds for TILE_ROWS rows by TILE_COLUMNS columns of the weight,
        or for INPUT_COLUMNS columns of an input; K for whole rows.
    out_ptr, residual_ptr: [num_tokens, num_outputs]. bias_ptr: [N]. bias_ptr and residual_ptr may be None.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    EVEN: tl.constexpr = K % BLOCK_K == 0
    BY_STEP: tl.constexpr = TILE_COLUMNS < K or INPUT_COLUMNS < K
    ROUNDED: tl.constexpr = input_scales_ptr is not None
    INTEGERS: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if INTEGERS and not BY_STEP else tl.float32
    OUTPUTS: tl.constexpr = ROWS // 2 if SILU_MUL else ROWS
    first = tl.program_id(0) * OUTPUTS
    row_N = weight_rows(first, num_outputs, ROWS, SILU_MUL)
    token_T = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    mask_T = token_T < num_tokens
    column_K = tl.arange(0, BLOCK_K)
    w_ptr_NK = codes_ptr + row_N.to(tl.int64)[:, None] * K + column_K[None, :]
    x_ptr_TK = x_ptr + token_T.to(tl.int64)[:, None] * x_stride + column_K[None, :]
    scales_ptr_N = scales_ptr + row_N // TILE_ROWS * ((K + TILE_COLUMNS - 1) // TILE_COLUMNS)
    if DEPENDENT_LAUNCH:
        gdc_wait()
    acc = tl.zeros([ROWS, TOKENS] if ROWS_FIRST else [TOKENS, ROWS], SUM)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        if EVEN:
            w_NK = tl.load(w_ptr_NK + k, eviction_policy="evict_first")
            x_TK = tl.load(x_ptr_TK + k, mask=mask_T[:, None], other=0.0)
        else:
            w_NK = tl.load(w_ptr_NK + k, mask=(k + column_K < K)[None, :], other=0.0)
            x_TK = tl.load(x_ptr_TK + k, mask=mask_T[:, None] & (k + column_K < K)[None, :], other=0.0)
        if not ROUNDED:
            w_NK = w_NK.to(x_TK.dtype)
        left, right = (w_NK, x_TK) if ROWS_FIRST else (x_TK, w_NK)
        if BY_STEP:
            product = tl.dot(left, tl.trans(right), input_precision="ieee").to(tl.float32)
            scale_N = tl.load(scales_ptr_N + k // TILE_COLUMNS)
            if ROUNDED:
                scales_ptr_T = input_scales_ptr + k // INPUT_COLUMNS * input_stride + token_T
                scale_T = tl.load(scales_ptr_T, mask=mask_T, other=0.0)
                product *= scale_T[None, :] if ROWS_FIRST else scale_T[:, None]
            acc += product * (scale_N[:, None] if ROWS_FIRST else scale_N[None, :])
        elif INTEGERS:
            acc = tl.dot(left, tl.trans(right), acc, out_dtype=tl.int32)
        elif ROUNDED:
            acc = tl.dot(left, tl.trans(right), acc, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    y_TN = (tl.trans(acc) if ROWS_FIRST else acc).to(tl.float32)
    if not BY_STEP:
        y_TN *= tl.load(scales_ptr_N)[None, :]
        if ROUNDED:
            y_TN *= tl.load(input_scales_ptr + token_T, mask=mask_T, other=0.0)[:, None]
    store_outputs(y_TN, first, num_outputs, token_T, mask_T, bias_ptr, residual_ptr, out_ptr, SILU_MUL, ACTIVATION)


def step_of(scheme: LinearScheme) -> int:
    """Return how many columns the kernel multiplies per step: the largest power of two that divides those of all tiles.

    The number is at most MOST_COLUMNS. Returns 0 if it would be less than LEAST_COLUMNS.
    """
    tiles = [scheme.weight.columns]
    if scheme.inputs is not None and not scheme.inputs.static:
        tiles.append(scheme.inputs.columns)
    columns = math.gcd(MOST_COLUMNS, *tiles)
    return columns if columns >= LEAST_COLUMNS else 0


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of a program, tokens and rows of the weight (gate and up counted together), and compile options."""

    tokens: int
    rows: int
    num_warps: int = 4
    num_stages: int = 3


def choose_tiles(num_tokens: int, num_rows: int, is_rounded: bool) -> Tiles:
    """Return the tile sizes for a linear of `num_tokens` tokens and a weight of `num_rows` rows, by a rule.

    is_rounded: the inputs are codes.
    """
    if num_tokens <= TOKENS_FIRST // 2:
        return Tiles(max(16, next_power_of_2(num_tokens)), 32 if num_rows <= 8192 else 64, 4, 4)
    if num_tokens <= 128 or not is_rounded:
        return Tiles(64, 64, 4, 3)
    return Tiles(128, 128, 8, 3)


def launch(
    x_TK: torch.Tensor,
    codes_NK: torch.Tensor,
    scaling: Scaling,
    bias_N: torch.Tensor | None,
    residual_TM: torch.Tensor | None,
    silu_mul: bool,
    activation: str,
    step: int,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Return a linear with bias, activation and residual, as given: [T, N], or [T, N / 2] with silu_mul, in `dtype`.

    See quantised_linear_op.reference for these steps. x_TK: codes, or values if scaling.inputs_CT is None. The weight
    must be contiguous. step: columns per step, from step_of. tiles: if None, those of choose_tiles.
    """
    if residual_TM is not None and not residual_TM.is_contiguous():
        residual_TM = residual_TM.contiguous()
    num_tokens, k = x_TK.shape
    num_rows = codes_NK.shape[0]
    if tiles is None:
        tiles = choose_tiles(num_tokens, num_rows, scaling.inputs_CT is not None)
    outputs = num_rows // 2 if silu_mul else num_rows
    out_TM = torch.empty((num_tokens, outputs), dtype=dtype, device=x_TK.device)
    quantised_product_kernel[(cdiv(num_rows, tiles.rows), cdiv(num_tokens, tiles.tokens))](
        x_TK,
        codes_NK,
        scaling.weights_RC,
        scaling.inputs_CT,
        bias_N,
        residual_TM,
        out_TM,
        outputs,
        num_tokens,
        x_TK.stride(0),
        scaling.input_stride,
        K=k,
        TILE_ROWS=scaling.rows or num_rows,
        TILE_COLUMNS=scaling.columns or k,
        INPUT_COLUMNS=scaling.input_columns or k,
        SILU_MUL=silu_mul,
        ACTIVATION=activation,
        TOKENS=tiles.tokens,
        ROWS=tiles.rows,
        BLOCK_K=step,
        ROWS_FIRST=tiles.tokens < TOKENS_FIRST,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        enable_fp_fusion=True,
        **dependent_launch(x_TK.device),
    )
    return out_TM
