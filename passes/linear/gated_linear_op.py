"""The op of gated_linear, a linear with halves gate and up: reference, and launch of kernels.

Kernels are chosen at launch: one kernel if it is faster according to the device's profile, otherwise the library's
product and a kernel for the activation.
"""

from __future__ import annotations

import torch

from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.linear import silu_mul
from compiled_engine.passes.linear.hopper_linear import hopper_linear, hopper_tiles
from compiled_engine.passes.linear.hopper_product import hopper_product, product_tiles


def reference(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """[T, N / 2]: the activation of the first half of linear(x) times its second half."""
    return silu_mul.reference(torch.nn.functional.linear(x_TK, weight_NK, bias_N), activation)


def launch(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """The kernels behind `reference`."""
    tiles = hopper_tiles(*x_TK.shape[:1], *weight_NK.shape, True, x_TK.dtype, x_TK.device)
    if tiles is not None:
        return hopper_linear(x_TK, weight_NK, bias_N, True, activation, tiles)
    products = product_tiles(*x_TK.shape[:1], *weight_NK.shape, True, x_TK.dtype, x_TK.device)
    if products is not None and bias_N is None:
        return hopper_product(x_TK, weight_NK, True, activation, products)
    return silu_mul.launch(torch.nn.functional.linear(x_TK, weight_NK, bias_N), activation)


def _fake(x_TK: torch.Tensor, weight_NK: torch.Tensor, *others: object) -> torch.Tensor:
    return x_TK.new_empty((x_TK.shape[0], weight_NK.shape[0] // 2))


gated_linear = define_op(
    'gated_linear(Tensor x_TK, Tensor weight_NK, Tensor? bias_N, str activation="silu") -> Tensor',
    cpu=reference,
    cuda=launch,
    fake=_fake,
    reference=reference,
)
