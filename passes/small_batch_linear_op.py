"""The op that small_batch_linear introduces: a linear with its neighbours taken in, and its plain-torch reference.

It is opaque to Inductor: which kernel runs, and how, is chosen by the number of tokens when it is launched.
"""

from __future__ import annotations

import torch

from compiled_engine.passes import rms_norm
from compiled_engine.passes.op_library import define_op
from compiled_engine.passes.small_batch_linear_launch import launch


def reference(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    eps: float,
    residual_TM: torch.Tensor | None,
    silu_mul: bool,
) -> torch.Tensor:
    """[T, M]: linear(RMSNorm(x) * norm_weight), then silu(gate) * up of its halves, then plus the residual.

    Each step is left out whose argument is None or False; M is N, or N / 2 with silu_mul. Rounds to the dtype of x
    where the textbook model does.
    """
    if norm_weight_K is not None:
        x_TK = rms_norm.reference(x_TK, norm_weight_K, eps)
    y_TN = torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    if silu_mul:
        gate_TM, up_TM = y_TN.chunk(2, dim=-1)
        y_TN = torch.nn.functional.silu(gate_TM) * up_TM
    return y_TN if residual_TM is None else residual_TM + y_TN


def _fake(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    eps: float,
    residual_TM: torch.Tensor | None,
    silu_mul: bool,
) -> torch.Tensor:
    return x_TK.new_empty((x_TK.shape[0], weight_NK.shape[0] // (2 if silu_mul else 1)))


define_op(
    "small_batch_linear(Tensor x_TK, Tensor weight_NK, Tensor? bias_N, Tensor? norm_weight_K, float eps, "
    "Tensor? residual_TM, bool silu_mul) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=_fake,
)
