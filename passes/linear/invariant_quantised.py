"""Defines the op of a linear with codes of e4m3 or int8 in batch-invariant engines.

Inputs are rounded row by row, and one kernel multiplies the codes, by the same instruction in the same order whatever
the number of tokens is.
"""

from __future__ import annotations

from functools import cache

import torch

from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.linear import quantised_kernels, quantised_product, round_inputs, silu_mul
from compiled_engine.passes.linear.linears import Quantised
from compiled_engine.passes.linear.round_inputs import capability_of, why_no_products
from compiled_engine.quantisation import LinearScheme

# Numbers of tokens up to which a launch has the same tiles, and rows of a large weight.
TOKEN_BUCKETS = (128, 256)
LARGE = 16384

_parsed = cache(LinearScheme.parse)


def tiles_of(num_tokens: int, num_rows: int, has_blocks: bool) -> quantised_product.Tiles:
    """Return the tile sizes for a number of tokens and of the weight's rows, the fastest measured on an H200.

    Tiles have at least 64 tokens: with fewer, tensor cores would run another instruction. has_blocks: blocks of the
    weight have a scale each, rather than whole rows.
    """
    if num_tokens <= TOKEN_BUCKETS[0] or (num_tokens <= TOKEN_BUCKETS[1] and num_rows < LARGE):
        return quantised_product.Tiles(64, 64, 4, 4)
    if has_blocks:
        return quantised_product.Tiles(64, 128, 4, 4)
    return quantised_product.Tiles(128, 64 if num_tokens <= TOKEN_BUCKETS[1] else 128, 8, 4)


def why_not(quantised: Quantised, num_columns: int, device: torch.device) -> str | None:
    """Return why the batch-invariant op does not support a quantised linear of num_columns columns; None if it does."""
    scheme = quantised.scheme
    if device.type != "cuda":
        return "quantised linears are the library's on a CPU"
    if scheme.inputs is None or quantised.zeros is not None or quantised.columns is not None:
        return f"its kernels are chosen by the number of tokens ({scheme})"
    missing = why_no_products(capability_of(device), scheme.weight)
    return missing or quantised_kernels.why_not_by_kernels(num_columns, scheme)


def reference(
    x_TK: torch.Tensor,
    codes_NK: torch.Tensor,
    scales_RC: torch.Tensor,
    input_scale_1: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    scheme: str,
    activation: str | None = None,
) -> torch.Tensor:
    """Return y = rounded(x) @ decoded weight^T + bias, [T, N]; with an activation, activation(gate) * up, [T, N / 2].

    gate and up are the halves of y. See quantised_linear_op.reference for the arguments.
    """
    operands = x_TK, codes_NK, scales_RC, None, input_scale_1, bias_N
    y_TN = quantised_kernels.product(*operands, _parsed(scheme), None, x_TK.dtype)
    return y_TN if activation is None else silu_mul.reference(y_TN, activation)


def launch(
    x_TK: torch.Tensor,
    codes_NK: torch.Tensor,
    scales_RC: torch.Tensor,
    input_scale_1: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    scheme: str,
    activation: str | None = None,
) -> torch.Tensor:
    """Return the quantised linear of x, or, with an activation, activation(gate) * up of its halves; see `reference`.

    One kernel rounds x, another multiplies the codes and computes the activation.
    """
    parsed = _parsed(scheme)
    assert parsed.inputs is not None
    rounded_TK, inputs_CT = round_inputs.launch(x_TK, parsed.inputs, input_scale_1)
    scaling, step = quantised_kernels.scaling_of(scales_RC, inputs_CT, parsed), quantised_product.step_of(parsed)
    tiles = tiles_of(x_TK.shape[0], codes_NK.shape[0], scaling.columns > 0)
    operands = rounded_TK, codes_NK, scaling, bias_N, None, activation is not None, activation or "", step
    return quantised_product.launch(*operands, x_TK.dtype, tiles)


def _fake(x_TK: torch.Tensor, codes_NK: torch.Tensor, activation: str | None) -> torch.Tensor:
    return x_TK.new_empty((x_TK.shape[0], codes_NK.shape[0] // (1 if activation is None else 2)))


invariant_quantised_linear = define_op(
    "invariant_quantised_linear(Tensor x_TK, Tensor codes_NK, Tensor scales_RC, Tensor? input_scale_1, "
    "Tensor? bias_N, str scheme, str? activation=None) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=_fake,
)
