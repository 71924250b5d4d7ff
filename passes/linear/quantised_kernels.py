"""Chooses the kernel of a quantised linear, with the reason why a faster one is not used, and launches it.

Hopper GPUs have kernels of their own: one at memory bandwidth for few tokens, others for many. On other GPUs, and for
linears that these kernels do not support, torch._scaled_mm multiplies many tokens if each row has one scale. A Triton
kernel covers all other cases, and torch's ops those that no kernel supports. Weights of integer or e2m1 codes whose
inputs are not rounded have kernels of their own. Before the linear, a kernel computes the norm, if any, and rounds the
inputs, unless the inputs already are codes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from compiled_engine.passes.framework.rounding import decode
from compiled_engine.passes.framework.rounding import round_inputs as rounded_by_torch
from compiled_engine.passes.linear import (
    hopper_integer_product,
    hopper_integers,
    integer_product,
    quantised_product,
    round_inputs,
)
from compiled_engine.passes.linear.hopper_codes import hopper_codes, why_not_on_the_left
from compiled_engine.passes.linear.hopper_linear import TOKEN_BUCKETS, hopper_linear, multiprocessors
from compiled_engine.passes.linear.hopper_product import ProductTiles, hopper_product, product_tiles
from compiled_engine.passes.linear.hopper_quantised import (
    PRODUCT_TILES,
    quantised_tiles,
    why_not_on_hopper,
)
from compiled_engine.passes.linear.quantised_product import Scaling
from compiled_engine.passes.linear.round_inputs import capability_of, why_no_products
from compiled_engine.passes.linear.silu_mul import launch as silu_mul_launch
from compiled_engine.passes.norm import rms_norm
from compiled_engine.quantisation import LinearScheme

MOST_FEW = TOKEN_BUCKETS[-1]
# Beyond this many tokens, Hopper's product of codes is fastest.
MOST_BEFORE_CODES = 64
# The report names the kernels for up to this many tokens.
MOST_IN_REPORT = 16384

HOPPER_LINEAR, HOPPER_CODES, HOPPER_PRODUCT = "Hopper's linear", "Hopper's product of codes", "Hopper's product"
HOPPER_INTEGERS, HOPPER_INTEGER_PRODUCT = "Hopper's linear of integers", "Hopper's product of integers"
LIBRARY, TRITON, TORCH = "torch._scaled_mm", "Triton's product", "plain torch"
INTEGERS, DECODED = "Triton's product of integers", "the product of the decoded weight"
_END_IN_ACTIVATION = (HOPPER_LINEAR, HOPPER_CODES, HOPPER_PRODUCT, HOPPER_INTEGER_PRODUCT, TRITON)


class Choice(NamedTuple):
    """The chosen kernel, and the reason why no faster kernel is used; None if there is no faster one."""

    kernel: str
    reason: str | None = None

    def __str__(self) -> str:
        return self.kernel if self.reason is None else f"{self.kernel}: {self.reason}"


@cache
def choose(
    capability: tuple[int, int],
    num_tokens: int,
    num_rows: int,
    k: int,
    silu_mul: bool,
    bias: bool,
    scheme: LinearScheme,
    dtype: torch.dtype,
    in_words: bool = False,
    num_multiprocessors: int = 132,
) -> Choice:
    """Return the kernel chosen for a quantised linear of `num_tokens` tokens and a weight [num_rows, k] on a GPU.

    capability: the GPU's compute capability. silu_mul: num_rows counts gate and up together. bias: the linear has a
    bias. dtype: dtype of the results. in_words: the operands are in the layout of hopper_integers.
    num_multiprocessors: the GPU's; only used with in_words.
    """
    if in_words:
        if num_tokens <= hopper_integers.MOST_TOKENS:
            return Choice(HOPPER_INTEGERS)
        decoded = hopper_integer_product.is_faster_decoded(num_tokens, num_rows, k, num_multiprocessors)
        return Choice(DECODED if decoded else HOPPER_INTEGER_PRODUCT)
    if scheme.inputs is None and scheme.weight.element in integer_product.ELEMENTS:
        obstacle = integer_product.why_not_by_kernels(capability, scheme)
        if obstacle is not None:
            return Choice(TORCH, obstacle)
        if num_tokens > integer_product.MOST_TOKENS:
            return Choice(DECODED)
        by_hopper = hopper_integers.why_not_in_words(num_rows, k, scheme, dtype) if capability[0] == 9 else None
        return Choice(INTEGERS, by_hopper)
    reason = why_no_products(capability, scheme.weight) or why_not_by_kernels(k, scheme)
    if reason is not None:
        return Choice(TORCH, reason)
    is_hopper, many = capability[0] == 9, num_tokens > MOST_FEW
    by_hopper = why_not_on_hopper(num_rows, k, silu_mul, scheme, dtype) if is_hopper else "it is no Hopper"
    if by_hopper is None and not bias and num_tokens > MOST_BEFORE_CODES:
        by_codes = why_not_on_the_left(num_rows, silu_mul, scheme)
        if by_codes is None:
            return Choice(HOPPER_CODES)
        if many and library_obstacle(k, num_rows, scheme, dtype) is not None:
            return Choice(HOPPER_PRODUCT, by_codes)
    if many and library_obstacle(k, num_rows, scheme, dtype) is None:
        return Choice(LIBRARY)
    if not is_hopper:
        return Choice(TRITON)
    if by_hopper is None and many and bias:
        by_hopper = "it has a bias"
    return Choice(HOPPER_LINEAR) if by_hopper is None else Choice(TRITON, by_hopper)


def describe_kernels(
    capability: tuple[int, int], num_rows: int, k: int, bias: bool, scheme: LinearScheme, dtype: torch.dtype
) -> str:
    """Return text that names the kernels of a linear for few, for many and for thousands of tokens, for reports.

    See `choose` for the arguments. On Hopper, codes that hopper_integers supports are assumed to be in its layout: the
    pass reorder_codes stores them so.
    """
    in_words = capability[0] == 9 and hopper_integers.why_not_in_words(num_rows, k, scheme, dtype) is None
    few, many, most = (
        choose(capability, count, num_rows, k, False, bias, scheme, dtype, in_words)
        for count in (MOST_BEFORE_CODES, MOST_FEW + 1, MOST_IN_REPORT)
    )
    if few == many == most:
        return f"any number of tokens: {few}"
    limit = MOST_BEFORE_CODES if many.kernel == HOPPER_CODES or few.kernel == INTEGERS else MOST_FEW
    more = f"{many}" if many == most else f"{many}; thousands: {most}"
    return f"up to {limit} tokens: {few}; more: {more}"


def why_not_by_kernels(k: int, scheme: LinearScheme) -> str | None:
    """Return why no kernel supports a linear of `k` columns, so that torch's ops compute it; None if kernels can."""
    if not quantised_product.step_of(scheme):
        return f"its scales are of columns that are no multiple of {quantised_product.LEAST_COLUMNS} ({scheme})"
    return None if scheme.inputs is None else round_inputs.columns_obstacle(k, scheme.inputs)


def library_obstacle(k: int, num_rows: int, scheme: LinearScheme, dtype: torch.dtype) -> str | None:
    """Return why torch._scaled_mm does not support a linear; None if it does."""
    if scheme.inputs is None:
        return "its inputs are not rounded"
    if scheme.weight.is_integer:
        return "it multiplies no integers"
    if (scheme.weight.rows, scheme.weight.columns) != (1, 0) or (scheme.inputs.columns and not scheme.inputs.static):
        return f"its scales are not of whole rows ({scheme})"
    if k % 16 or num_rows % 16:
        return f"its sizes [{num_rows}, {k}] are no multiples of 16"
    return None if dtype == torch.bfloat16 else f"its results are {str(dtype).removeprefix('torch.')}, not bfloat16"


def launch(
    x_TK: torch.Tensor,
    codes_NK: torch.Tensor,
    scales_RC: torch.Tensor,
    zeros_RC: torch.Tensor | None,
    input_scale_1: torch.Tensor | None,
    scheme: LinearScheme,
    bias_N: torch.Tensor | None,
    residual_TM: torch.Tensor | None,
    silu_mul: bool,
    activation: str,
    norm_weight_K: torch.Tensor | None,
    eps: float,
    norm_offset: float,
    norm_wide: bool,
) -> torch.Tensor:
    """Return a quantised linear with its norm, activation and residual, [T, N] or [T, N / 2], in the dtype of x.

    See quantised_linear_op.reference for the arguments.
    """
    dtype, k = x_TK.dtype, x_TK.shape[1]
    norm = norm_weight_K, eps, norm_offset, norm_wide
    inputs_CT = None
    if scheme.inputs is not None and round_inputs.why_not_by_kernel(k, scheme.inputs, x_TK.device) is None:
        tile = round_inputs.tile_of(x_TK.shape[0])
        x_TK, inputs_CT = round_inputs.launch(x_TK, scheme.inputs, input_scale_1, *norm, tile=tile)
    else:
        if norm_weight_K is not None:
            x_TK = rms_norm.launch(x_TK, norm_weight_K, eps, norm_offset, norm_wide)
        if scheme.inputs is not None:
            x_TK, inputs_CT = round_inputs.by_formula(x_TK, scheme.inputs, input_scale_1)
    after = bias_N, residual_TM, silu_mul, activation
    return multiply(x_TK, inputs_CT, codes_NK, scales_RC, zeros_RC, scheme, *after, dtype)


def multiply(
    x_TK: torch.Tensor,
    inputs_CT: torch.Tensor | None,
    codes_NK: torch.Tensor,
    scales_RC: torch.Tensor,
    zeros_RC: torch.Tensor | None,
    scheme: LinearScheme,
    bias_N: torch.Tensor | None,
    residual_TM: torch.Tensor | None,
    silu_mul: bool,
    activation: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a quantised linear of x with bias, silu * up and residual, [T, N] or [T, N / 2], in `dtype`.

    This is the part of `launch` that follows rounding. x_TK: codes with the scales inputs_CT; if inputs_CT is None,
    values that are not rounded.
    """
    kernel = _kernel_for(x_TK, codes_NK, silu_mul, bias_N, scheme, dtype)
    if kernel == HOPPER_CODES:
        scaling = scaling_of(scales_RC, inputs_CT, scheme)
        y_TM = hopper_codes(x_TK, codes_NK, silu_mul, activation, scaling, dtype)
        return y_TM if residual_TM is None else residual_TM + y_TM
    if kernel in (HOPPER_LINEAR, HOPPER_PRODUCT):
        scaling = scaling_of(scales_RC, inputs_CT, scheme)
        return _on_hopper(x_TK, codes_NK, scaling, bias_N, residual_TM, silu_mul, activation, dtype)
    if kernel == TRITON:
        scaling, step = scaling_of(scales_RC, inputs_CT, scheme), quantised_product.step_of(scheme)
        after = bias_N, residual_TM, silu_mul, activation
        return quantised_product.launch(x_TK, codes_NK, scaling, *after, step, dtype)
    if kernel in (HOPPER_INTEGERS, HOPPER_INTEGER_PRODUCT):
        weight, zero = (codes_NK, scales_RC, zeros_RC), _zero_of(scheme)
        if kernel == HOPPER_INTEGERS:
            return hopper_integers.hopper_integers(x_TK, *weight, bias_N, residual_TM, silu_mul, activation, zero)
        compute = hopper_integer_product.hopper_integer_product
        return compute(x_TK, *weight, bias_N, residual_TM, silu_mul, activation, zero)
    if kernel == INTEGERS:
        weight = codes_NK, scales_RC, zeros_RC
        return integer_product.launch(x_TK, *weight, bias_N, residual_TM, silu_mul, activation, scheme)
    if kernel == DECODED:
        if codes_NK.dtype == torch.int32:
            weight_NK = integer_product.decode_words(codes_NK, scales_RC, zeros_RC, _zero_of(scheme), dtype)
        else:
            weight_NK = integer_product.decode_weight(codes_NK, scales_RC, zeros_RC, scheme, dtype)
        by_hopper = _gated_tiles(x_TK, weight_NK) if silu_mul and bias_N is None else None
        if by_hopper is not None:
            y_TM = hopper_product(x_TK, weight_NK, True, activation, by_hopper)
            return y_TM if residual_TM is None else residual_TM + y_TM
        y_TN = torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    elif kernel == LIBRARY:
        assert inputs_CT is not None
        y_TN = _library_product(x_TK, codes_NK, scales_RC, inputs_CT, bias_N, dtype)
    else:
        y_TN = product(x_TK, codes_NK, scales_RC, zeros_RC, None, bias_N, scheme, inputs_CT, dtype)
    if silu_mul:
        y_TN = silu_mul_launch(y_TN, activation)
    return y_TN if residual_TM is None else residual_TM + y_TN


def _gated_tiles(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> ProductTiles | None:
    """Return the measured tile sizes of Hopper's kernel for gate and up; None if torch's linear is to compute them."""
    return product_tiles(len(x_TK), *weight_NK.shape, True, x_TK.dtype, x_TK.device)


def ends_in_activation(
    x_TK: torch.Tensor, codes_NK: torch.Tensor, scheme: LinearScheme, bias_N: torch.Tensor | None, dtype: torch.dtype
) -> bool:
    """Return whether the kernel that `choose` gives for a linear of gate and up also computes silu(gate) * up."""
    return _kernel_for(x_TK, codes_NK, True, bias_N, scheme, dtype) in _END_IN_ACTIVATION


def _kernel_for(
    x_TK: torch.Tensor,
    codes_NK: torch.Tensor,
    silu_mul: bool,
    bias_N: torch.Tensor | None,
    scheme: LinearScheme,
    dtype: torch.dtype,
) -> str:
    capability = capability_of(x_TK.device)
    (num_tokens, k), num_rows = x_TK.shape, codes_NK.shape[0]
    in_words = codes_NK.dtype == torch.int32
    on = multiprocessors(x_TK.device) if in_words else 0
    return choose(capability, num_tokens, num_rows, k, silu_mul, bias_N is not None, scheme, dtype, in_words, on).kernel


def _zero_of(scheme: LinearScheme) -> int:
    return scheme.weight.format.zero or 0


def _on_hopper(
    x_TK: torch.Tensor,
    codes_NK: torch.Tensor,
    scaling: Scaling,
    bias_N: torch.Tensor | None,
    residual_TM: torch.Tensor | None,
    silu_mul: bool,
    activation: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    num_tokens, (num_rows, k) = x_TK.shape[0], codes_NK.shape
    many = multiprocessors(x_TK.device)
    if num_tokens <= MOST_FEW:
        if residual_TM is not None and not residual_TM.is_contiguous():
            residual_TM = residual_TM.contiguous()
        tiles = quantised_tiles(num_tokens, num_rows, k, silu_mul, many)
        return hopper_linear(x_TK, codes_NK, bias_N, silu_mul, activation, tiles, residual_TM, scaling, dtype)
    y_TM = hopper_product(x_TK, codes_NK, silu_mul, activation, PRODUCT_TILES, scaling, dtype)
    return y_TM if residual_TM is None else residual_TM + y_TM


def scaling_of(scales_RC: torch.Tensor, inputs_CT: torch.Tensor | None, scheme: LinearScheme) -> Scaling:
    """Return the scales of a linear, and the sizes of the tiles whose elements share a scale, for its kernels.

    inputs_CT: scales from round_inputs.launch; None if inputs are not rounded.
    """
    weight, inputs = scheme.weight, scheme.inputs
    input_columns = 0 if inputs is None or inputs.static else inputs.columns
    return Scaling(scales_RC, inputs_CT, weight.rows, weight.columns, input_columns)


def product(
    x_TK: torch.Tensor,
    codes_NK: torch.Tensor,
    scales_RC: torch.Tensor,
    zeros_RC: torch.Tensor | None,
    input_scale_1: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    scheme: LinearScheme,
    inputs_CT: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return rounded(x) @ decoded weight^T + bias, [T, N], computed with torch's ops in fp32 and rounded to `dtype`.

    inputs_CT: the scales of x if x already is codes; otherwise None.
    """
    assert codes_NK.dtype == scheme.weight.dtype, codes_NK.dtype
    rounded_TK = x_TK.float()
    if scheme.inputs is not None:
        codes = rounded_by_torch(x_TK, scheme.inputs, input_scale_1) if inputs_CT is None else (x_TK, inputs_CT.t())
        rounded_TK = decode(*codes, scheme.inputs)
    bias = None if bias_N is None else bias_N.float()
    values_NK = decode(codes_NK, scales_RC, scheme.weight, zeros_RC)
    return torch.nn.functional.linear(rounded_TK, values_NK, bias).to(dtype)


def _library_product(
    rounded_TK: torch.Tensor,
    codes_NK: torch.Tensor,
    scales_N1: torch.Tensor,
    inputs_1T: torch.Tensor,
    bias_N: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    # Fast accumulation would drop bits of the sums of fp8 products.
    return torch._scaled_mm(
        rounded_TK,
        codes_NK.t(),
        scale_a=inputs_1T.t(),
        scale_b=scales_N1.t(),
        bias=bias_N,
        out_dtype=dtype,
        use_fast_accum=False,
    )
