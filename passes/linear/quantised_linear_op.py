"""The op of a linear with a weight stored as codes with scales, and rounded inputs: reference and launch.

Like small_batch_linear it may contain its fused neighbours. The reference is eager PyTorch on a CPU as well: it defines
what every kernel computes, by the formula in rounding.py.
"""

from __future__ import annotations

from functools import cache

import torch

from compiled_engine.passes.framework.op_library import QUANTISED, LinearArguments, define_op
from compiled_engine.passes.linear import quantised_kernels
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
) -> torch.Tensor:
    """[T, M]: rounded(x) @ decoded weight^T + bias, the product in fp32, rounded once to the dtype of x.

    scheme: as text, see LinearScheme. input_scale_1: for static inputs. zeros_RC: None for symmetric codes, the only
    ones today. The others: see small_batch_linear, whose order of steps is the same.
    """
    if norm_weight_K is not None:
        x_TK = rms_norm.reference(x_TK, norm_weight_K, eps, norm_offset, norm_wide)
    y_TN = quantised_kernels.product(x_TK, codes_NK, scales_RC, input_scale_1, bias_N, LinearScheme.parse(scheme))
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
) -> torch.Tensor:
    """The kernels behind `reference`: see quantised_kernels."""
    after = bias_N, residual_TM, silu_mul, activation
    norm = norm_weight_K, eps, norm_offset, norm_wide
    return quantised_kernels.launch(x_TK, codes_NK, scales_RC, input_scale_1, _parsed(scheme), *after, *norm)


def _fake(
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
    *others: object,
) -> torch.Tensor:
    return x_TK.new_empty((x_TK.shape[0], codes_NK.shape[0] // (2 if silu_mul else 1)))


quantised_linear = define_op(
    "quantised_linear(Tensor x_TK, Tensor codes_NK, Tensor scales_RC, Tensor? zeros_RC, Tensor? input_scale_1, "
    "Tensor? bias_N, str scheme, Tensor? norm_weight_K=None, float eps=0.0, Tensor? residual_TM=None, "
    'bool silu_mul=False, str activation="silu", float norm_offset=0.0, bool norm_wide=False) -> Tensor',
    cpu=reference,
    cuda=launch,
    fake=_fake,
    linear=LinearArguments(
        "x_TK",
        "codes_NK",
        "bias_N",
        QUANTISED,
        alone=(("norm_weight_K", None), ("residual_TM", None), ("silu_mul", False)),
    ),
)
