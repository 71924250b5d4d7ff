"""Defines the op of a linear with codes of e4m3 or int8 in batch-invariant engines.

Its inputs are codes too: they are rounded row by row before. Most linears of e4m3 on Hopper (see `on_hopper`) have the
kernels of other engines, one for few tokens and one for many, with tiles that do not divide the columns. Both multiply
128 columns and add the product to the sums, so that a row has the same bits in either, which the start verifies (see
bit_check.py). Other linears have Triton's product, in tiles for which tensor cores have the same instruction.
"""

from __future__ import annotations

from functools import cache

import torch

from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.linear import quantised_kernels, quantised_product, silu_mul
from compiled_engine.passes.linear.hopper_codes import TOKEN_COUNTS, codes_tiles, hopper_codes, why_not_on_the_left
from compiled_engine.passes.linear.hopper_linear import TOKEN_BUCKETS, hopper_linear, multiprocessors
from compiled_engine.passes.linear.hopper_quantised import quantised_tiles, why_not_on_hopper
from compiled_engine.passes.linear.linears import Quantised
from compiled_engine.passes.linear.quantised_kernels import MOST_BEFORE_CODES
from compiled_engine.passes.linear.round_inputs import capability_of, why_no_products
from compiled_engine.quantisation import LinearScheme

# Numbers of tokens up to which Triton's product has the same tiles, and rows of a large weight.
FEW, SOME = 128, 256
LARGE = 16384
# Beyond this many tokens, Hopper's kernel has the tiles for this many.
MOST = 2048
# Token counts that together select every tile of a weight. Without 512, weights of about 5,000 rows would lack the
# tile that they have for 385 to 1,536 tokens.
COUNTS = tuple(
    sorted(
        {FEW, SOME, 512, *(count for count in TOKEN_COUNTS if count <= MOST)}
        | {count for count in TOKEN_BUCKETS if count <= MOST_BEFORE_CODES}
    )
)

_parsed = cache(LinearScheme.parse)


def tiles_of(num_tokens: int, num_rows: int, has_blocks: bool) -> quantised_product.Tiles:
    """Return the tile sizes of Triton's product, by tokens and the weight's rows, the fastest measured on an H200.

    Tiles have at least 64 tokens: with fewer, tensor cores would run another instruction. has_blocks: blocks of the
    weight have a scale each, rather than whole rows.
    """
    if num_tokens <= FEW or (num_tokens <= SOME and num_rows < LARGE):
        return quantised_product.Tiles(64, 64, 4, 4)
    if has_blocks:
        return quantised_product.Tiles(64, 128, 4, 4)
    return quantised_product.Tiles(128, 64 if num_tokens <= SOME else 128, 8, 4)


def why_not(quantised: Quantised, num_columns: int, device: torch.device) -> str | None:
    """Return why the batch-invariant op does not support a quantised linear of num_columns columns; None if it does."""
    scheme = quantised.scheme
    if device.type != "cuda":
        return "quantised linears are the library's on a CPU"
    if scheme.inputs is None or quantised.zeros is not None or quantised.columns is not None:
        return f"its kernels are chosen by the number of tokens ({scheme})"
    missing = why_no_products(capability_of(device), scheme.weight)
    return missing or quantised_kernels.why_not_by_kernels(num_columns, scheme)


@cache
def on_hopper(
    capability: tuple[int, int], num_rows: int, k: int, gated: bool, bias: bool, scheme: str, dtype: torch.dtype
) -> bool:
    """Return whether Hopper's kernels compute a linear. The answer holds for any number of tokens.

    capability: the GPU's compute capability. num_rows, k: sizes of the weight; num_rows counts gate and up together.
    dtype: dtype of the results.
    """
    parsed = _parsed(scheme)
    if capability[0] != 9 or bias or why_not_on_hopper(num_rows, k, gated, parsed, dtype) is not None:
        return False
    return why_not_on_the_left(num_rows, gated, parsed) is None


def reference(
    x_TK: torch.Tensor,
    input_scales_CT: torch.Tensor,
    codes_NK: torch.Tensor,
    scales_RC: torch.Tensor,
    bias_N: torch.Tensor | None,
    scheme: str,
    dtype: str,
    activation: str | None = None,
) -> torch.Tensor:
    """Return y = decoded x @ decoded weight^T + bias, [T, N]; with an activation, activation(gate) * up, [T, N / 2].

    gate and up are the halves of y. x_TK, input_scales_CT: codes and scales from round_inputs. dtype: dtype of the
    results. See quantised_linear_op.reference for the other arguments.
    """
    operands = x_TK, codes_NK, scales_RC, None, None, bias_N
    y_TN = quantised_kernels.product(*operands, _parsed(scheme), input_scales_CT, getattr(torch, dtype))
    return y_TN if activation is None else silu_mul.reference(y_TN, activation)


def launch(
    x_TK: torch.Tensor,
    input_scales_CT: torch.Tensor,
    codes_NK: torch.Tensor,
    scales_RC: torch.Tensor,
    bias_N: torch.Tensor | None,
    scheme: str,
    dtype: str,
    activation: str | None = None,
) -> torch.Tensor:
    """Return the quantised linear of x, or with an activation, activation(gate) * up of its halves; see `reference`."""
    parsed, out, gated = _parsed(scheme), getattr(torch, dtype), activation is not None
    (num_tokens, k), num_rows = x_TK.shape, codes_NK.shape[0]
    scaling = quantised_kernels.scaling_of(scales_RC, input_scales_CT, parsed)
    how = gated, activation or ""
    on_gpu = x_TK.device.type == "cuda" and num_tokens > 0
    if on_gpu and on_hopper(capability_of(x_TK.device), num_rows, k, gated, bias_N is not None, scheme, out):
        num_sms = multiprocessors(x_TK.device)
        if num_tokens <= MOST_BEFORE_CODES:
            few = quantised_tiles(num_tokens, num_rows, k, gated, num_sms, divides=False)
            return hopper_linear(x_TK, codes_NK, None, *how, few, None, scaling, out)
        many = codes_tiles(min(num_tokens, MOST), num_rows, scaling.columns > 0, num_sms)
        return hopper_codes(x_TK, codes_NK, *how, scaling, out, many)
    tiles, step = tiles_of(num_tokens, num_rows, scaling.columns > 0), quantised_product.step_of(parsed)
    return quantised_product.launch(x_TK, codes_NK, scaling, bias_N, None, *how, step, out, tiles)


def _fake(x_TK: torch.Tensor, codes_NK: torch.Tensor, dtype: str, activation: str | None) -> torch.Tensor:
    shape = x_TK.shape[0], codes_NK.shape[0] // (1 if activation is None else 2)
    return x_TK.new_empty(shape, dtype=getattr(torch, dtype))


invariant_quantised_linear = define_op(
    "invariant_quantised_linear(Tensor x_TK, Tensor input_scales_CT, Tensor codes_NK, Tensor scales_RC, "
    "Tensor? bias_N, str scheme, str dtype, str? activation=None) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=_fake,
)
