"""Defines the linear of batch-invariant engines, whose result for a token depends on no other token, bit for bit.

Libraries choose a kernel, and with it the order of a sum, by the number of rows; the kernels here do not.
"""

from __future__ import annotations

import torch

from compiled_engine.passes.framework.op_library import LinearArguments, define_op
from compiled_engine.passes.linear import invariant_hopper, silu_mul
from compiled_engine.passes.linear.invariant_product import invariant_product
from compiled_engine.passes.linear.small_batch_linear_cpu import linear_in_order


def reference(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """Return linear(x), [T, N]; with an activation, activation(gate) * up of its two halves, [T, N / 2]."""
    y_TN = torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    return y_TN if activation is None else silu_mul.reference(y_TN, activation)


def launch(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """Return linear(x), or activation(gate) * up of its halves, by a kernel that serves the weight; see `reference`."""
    if len(x_TK) and invariant_hopper.is_served(weight_NK, bias_N, activation is not None):
        return invariant_hopper.launch(x_TK, weight_NK, activation)
    return invariant_product(x_TK, weight_NK, bias_N, activation)


def _fake(x_TK: torch.Tensor, weight_NK: torch.Tensor, activation: str | None) -> torch.Tensor:
    return x_TK.new_empty((x_TK.shape[0], weight_NK.shape[0] // (1 if activation is None else 2)))


invariant_linear = define_op(
    "invariant_linear(Tensor x_TK, Tensor weight_NK, Tensor? bias_N=None, str? activation=None) -> Tensor",
    cpu=linear_in_order,
    cuda=launch,
    fake=_fake,
    linear=LinearArguments("x_TK", "weight_NK", "bias_N", alone=(("activation", None),)),
)
