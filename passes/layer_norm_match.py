"""Finds LayerNorm where it is computed op by op, in fp32, as Cohere's code does."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from compiled_engine.passes.graph_inputs import is_parameter
from compiled_engine.passes.matching import arg, aten, factors, is_call, only_user, through_cast
from compiled_engine.passes.rms_norm import rounded


class WrittenOut(NamedTuple):
    """`value` is LayerNorm(x) * weight, rounded once, without a bias."""

    value: fx.Node
    x: fx.Node
    weight: fx.Node
    eps: float


def match_layer_norm(rsqrt: fx.Node) -> WrittenOut | str | None:
    """The norm that the root belongs to; why it is another norm; None where no mean is subtracted."""
    scaled: Any = only_user(rsqrt)
    centred: Any = next((other for root, other in factors(scaled) if root is rsqrt), None)
    if not (is_call(centred, aten.sub.Tensor) and centred.meta["val"].dim() == 2):
        return None
    wide: Any = centred.args[0]
    x = through_cast(wide)
    eps = _eps(rsqrt, wide)
    if eps is None or not _is_centred(centred, wide):
        return "it is not over the deviation from the mean, its squares plus a constant"
    product = only_user(scaled)
    weight: Any = next((through_cast(other) for found, other in factors(product) if found is scaled), None)
    if product is None or not is_parameter(weight):
        return "no multiplication with a weight follows"
    value, like = rounded(product), x.meta["val"]
    in_fp32 = wide.meta["val"].dtype == product.meta["val"].dtype == torch.float32
    if not in_fp32 or value.meta["val"].dtype != like.dtype:
        return "it is not computed in fp32 and rounded once"
    if weight.meta["val"].shape != like.shape[-1:] or weight.meta["val"].dtype != like.dtype:
        return "its weight is not a parameter of its dtype with an element for each of the last dimension"
    return WrittenOut(value, x, weight, eps)


def _eps(rsqrt: fx.Node, wide: fx.Node) -> float | None:
    """eps of rsqrt(mean((wide - mean) ** 2) + eps) over the last dimension."""
    shifted: Any = arg(rsqrt, 0)
    if not is_call(shifted, aten.add.Tensor) or shifted.kwargs or not isinstance(shifted.args[1], float):
        return None
    squares = _averaged(shifted.args[0])
    is_square = is_call(squares, aten.pow.Tensor_Scalar) and squares.args[1] == 2
    return shifted.args[1] if is_square and _is_centred(squares.args[0], wide) else None


def _is_centred(value: Any, wide: fx.Node) -> bool:
    """Whether a value is wide - mean(wide)."""
    if not is_call(value, aten.sub.Tensor) or value.kwargs:
        return False
    return value.args[0] is wide and _averaged(value.args[1]) is wide


def _averaged(mean: Any) -> Any:
    """What a mean over the last dimension is of."""
    is_mean = is_call(mean, aten.mean.dim) and not mean.kwargs and mean.args[1:] == ([-1], True)
    return mean.args[0] if is_mean else None
