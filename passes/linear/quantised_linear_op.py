"""Defines the op of a linear with a quantised weight, and inputs that are rounded if its scheme says so.

Like small_batch_linear, the op may include a norm before the linear, and silu * up or a residual add after it. The
reference, in torch's ops, is also used on CPUs. It defines the result of every kernel, by the formula in rounding.py.
"""

from __future__ import annotations

from functools import cache

import torch

from compiled_engine.passes.framework.op_library import QUANTISED, LinearArguments, define_op
from compiled_engine.passes.linear import quantised_kernels, round_inputs
from compiled_engine.passes.linear.hopper_integers import in_rows
from compiled_engine.passes.linear.silu_mul import reference as silu_mul_reference
from compiled_engine.passes.norm import rms_norm
from compiled_engine.quantisation import LinearScheme

_parsed = cache(LinearScheme.parse)


def reference(
    x_TK: torch.Tensor,
    codes_NK: torch.Tensor,
    scales_RC: torch.Tensor,
    zeros_RC: torch.Tensor | None,
    input_scale_1: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    scheme: str,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    residual_TM: torch.Tensor | None = None,
    silu_mul: bool = False,
    activation: str = "silu",
    norm_offset: float = 0.0,
    norm_wide: bool = False,
    input_scales_CT: torch.Tensor | None = None,
    dtype: str = "",
    columns_1K: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rounded(x) @ decoded weight^T + bias, [T, M], computed in fp32 and rounded once to the dtype of x.

    A norm before the linear, and an activation and a residual add after it, are as in small_batch_linear_op.reference;
    see there for their arguments and for M.

    scheme: the text form of a LinearScheme. codes_NK: maybe packed, see Rounding.stored, or int32 words, see
    hopper_integers; scales and zero points are then transposed. zeros_RC: zero points, uint8, for schemes that have
    them. input_scale_1: the static scale of the inputs. input_scales_CT: the scales of x if x is codes (see
    round_inputs); the results then have `dtype`, and there is no norm. columns_1K: the column of x for each column of
    the codes, if the checkpoint stores the columns in another order.
    """
    out = x_TK.dtype if input_scales_CT is None else getattr(torch, dtype)
    if codes_NK.dtype == torch.int32:
        codes_NK, scales_RC, zeros_RC = in_rows(codes_NK, scales_RC, zeros_RC)
    if norm_weight_K is not None:
        x_TK = rms_norm.reference(x_TK, norm_weight_K, eps, norm_offset, norm_wide)
    if columns_1K is not None:
        x_TK = x_TK.index_select(1, columns_1K[0])
    y_TN = quantised_kernels.product(
        x_TK, codes_NK, scales_RC, zeros_RC, input_scale_1, bias_N, LinearScheme.parse(scheme), input_scales_CT, out
    )
    if silu_mul:
        y_TN = silu_mul_reference(y_TN, activation)
    return y_TN if residual_TM is None else residual_TM + y_TN


def launch(
    x_TK: torch.Tensor,
    codes_NK: torch.Tensor,
    scales_RC: torch.Tensor,
    zeros_RC: torch.Tensor | None,
    input_scale_1: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    scheme: str,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    residual_TM: torch.Tensor | None = None,
    silu_mul: bool = False,
    activation: str = "silu",
    norm_offset: float = 0.0,
    norm_wide: bool = False,
    input_scales_CT: torch.Tensor | None = None,
    dtype: str = "",
    columns_1K: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a quantised linear with its norm, activation and residual, by quantised_kernels; see `reference`."""
    after = bias_N, residual_TM, silu_mul, activation
    parsed = _parsed(scheme)
    if input_scales_CT is not None:
        out = getattr(torch, dtype)
        return quantised_kernels.multiply(x_TK, input_scales_CT, codes_NK, scales_RC, None, parsed, *after, out)
    norm = norm_weight_K, eps, norm_offset, norm_wide
    if columns_1K is not None:
        if norm_weight_K is not None:
            x_TK, norm = rms_norm.launch(x_TK, norm_weight_K, *norm[1:]), (None, 0.0, 0.0, False)
        x_TK = x_TK.index_select(1, columns_1K[0])
    return quantised_kernels.launch(x_TK, codes_NK, scales_RC, zeros_RC, input_scale_1, parsed, *after, *norm)


def _fake(
    x_TK: torch.Tensor, codes_NK: torch.Tensor, silu_mul: bool, input_scales_CT: torch.Tensor | None, dtype: str
) -> torch.Tensor:
    shape = x_TK.shape[0], codes_NK.shape[0] // (2 if silu_mul else 1)
    return x_TK.new_empty(shape, dtype=x_TK.dtype if input_scales_CT is None else getattr(torch, dtype))


quantised_linear = define_op(
    "quantised_linear(Tensor x_TK, Tensor codes_NK, Tensor scales_RC, Tensor? zeros_RC, Tensor? input_scale_1, "
    "Tensor? bias_N, str scheme, Tensor? norm_weight_K=None, float eps=0.0, Tensor? residual_TM=None, "
    'bool silu_mul=False, str activation="silu", float norm_offset=0.0, bool norm_wide=False, '
    'Tensor? input_scales_CT=None, str dtype="", Tensor? columns_1K=None) -> Tensor',
    cpu=reference,
    cuda=launch,
    fake=_fake,
    linear=LinearArguments(
        "x_TK",
        "codes_NK",
        "bias_N",
        QUANTISED,
        alone=(("norm_weight_K", None), ("residual_TM", None), ("silu_mul", False), ("input_scales_CT", None)),
    ),
)


def gated_reference(
    x_TK: torch.Tensor,
    input_scales_CT: torch.Tensor,
    codes_NK: torch.Tensor,
    scales_RC: torch.Tensor,
    bias_N: torch.Tensor | None,
    scheme: str,
    activation: str,
    dtype: str,
    static_1: torch.Tensor | None,
    rounding: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return activation(gate) * up, quantised: codes [T, N / 2] and scales [C, T].

    gate and up are the halves of the result of a linear of codes. x_TK, input_scales_CT: codes and scales of the
    linear's inputs. codes_NK, scales_RC: codes and scales of its weight. dtype: the dtype of gate, up and the
    activation. static_1, rounding: how the result is quantised, see round_inputs.
    """
    y_TM = reference(
        *(x_TK, codes_NK, scales_RC, None, None, bias_N, scheme),
        silu_mul=True,
        activation=activation,
        input_scales_CT=input_scales_CT,
        dtype=dtype,
    )
    return round_inputs.by_formula(y_TM, round_inputs.rounding_of(rounding), static_1)


def gated_launch(
    x_TK: torch.Tensor,
    input_scales_CT: torch.Tensor,
    codes_NK: torch.Tensor,
    scales_RC: torch.Tensor,
    bias_N: torch.Tensor | None,
    scheme: str,
    activation: str,
    dtype: str,
    static_1: torch.Tensor | None,
    rounding: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return activation(gate) * up of a quantised linear as codes and scales, by kernels; see `gated_reference`.

    The linear's kernel computes activation(gate) * up if it can, otherwise the kernel that rounds does. If no kernel
    can round the result, torch's ops do.
    """
    parsed, out, columns = round_inputs.rounding_of(rounding), getattr(torch, dtype), codes_NK.shape[0] // 2
    by_kernel = round_inputs.why_not_by_kernel(columns, parsed, x_TK.device) is None
    weight = codes_NK, scales_RC, None, _parsed(scheme), bias_N, None
    product_ends = quantised_kernels.ends_in_activation(x_TK, codes_NK, weight[3], bias_N, out)
    y_TM = quantised_kernels.multiply(x_TK, input_scales_CT, *weight, product_ends or not by_kernel, activation, out)
    if not by_kernel:
        return round_inputs.by_formula(y_TM, parsed, static_1)
    return round_inputs.launch(y_TM, parsed, static_1, activation="" if product_ends else activation)


def _fake_gated(x_TK: torch.Tensor, codes_NK: torch.Tensor, rounding: str) -> tuple[torch.Tensor, torch.Tensor]:
    return round_inputs.fake_codes(x_TK.new_empty((x_TK.shape[0], codes_NK.shape[0] // 2)), rounding)


quantised_gated_rounded = define_op(
    "quantised_gated_rounded(Tensor x_TK, Tensor input_scales_CT, Tensor codes_NK, Tensor scales_RC, Tensor? bias_N, "
    "str scheme, str activation, str dtype, Tensor? static_1, str rounding) -> (Tensor, Tensor)",
    cpu=gated_reference,
    cuda=gated_launch,
    fake=_fake_gated,
)
