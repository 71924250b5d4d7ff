"""Recognises norms in graphs: `norm_of` is the only matcher of RMSNorm and LayerNorm for all passes.

A norm may be one ATen op (native_layer_norm) or several ops.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.graph_inputs import is_parameter
from compiled_engine.passes.framework.matching import arg, aten, factors, is_call, only_user, through_cast

_NATIVE = aten.native_layer_norm.default


@dataclass(frozen=True)
class Norm:
    """A norm, in a graph, over the last dimension of x.

    If `centred`, it is LayerNorm(x) * weight + bias, otherwise RMSNorm(x) * (offset + weight). Weight and bias are
    parameters of the graph. A LayerNorm may lack both; an RMSNorm always has a weight.
    """

    x: fx.Node
    weight: fx.Node | None
    eps: float
    offset: float = 0.0
    wide: bool = False  # see rms_norm.reference
    bias: fx.Node | None = None
    centred: bool = False

    @property
    def how(self) -> tuple[float, float, bool]:
        """The values (eps, offset, wide), in the order in which ops that include a norm take them as arguments."""
        return self.eps, self.offset, self.wide


def norm_of(value: object) -> Norm | None:
    """Return the norm that computes this value; None if the value is not recognised as the result of a norm."""
    found = _match(value)
    return found if isinstance(found, Norm) else None


def why_no_norm(value: object) -> str | None:
    """Return why a value that looks like the result of a norm is not recognised as one.

    Returns None for a norm that is recognised, and for a value that does not look like a norm.
    """
    found = _match(value)
    return found if isinstance(found, str) else None


def _match(value: Any) -> Norm | str | None:
    if is_call(value, operator.getitem) and is_call(value.args[0], _NATIVE) and value.args[1] == 0:
        return _native(value.args[0])
    product = through_cast(value)
    for weight, scaled in factors(product):
        for wide, rsqrt in factors(through_cast(scaled)):
            if is_call(rsqrt, aten.rsqrt.default):
                match = _layer_norm if is_deviation(wide) else _rms_norm
                return match(value, product, weight, scaled, wide, rsqrt)
    return None


def _rms_norm(
    value: fx.Node, product: fx.Node, weight: fx.Node, scaled: fx.Node, wide: fx.Node, rsqrt: fx.Node
) -> Norm | str:
    """Return the RMSNorm with `product` = weight * scaled and `scaled` = wide * rsqrt, or why it is not recognised.

    Operands may be cast before they are multiplied. value: `product`, maybe after a cast. wide: x, maybe after a cast.
    """
    x = through_cast(wide)
    size, dtype = x.meta["val"].shape[-1], x.meta["val"].dtype
    eps, squared = _mean_of_squares(rsqrt)
    if squared is not wide:
        return "its norm is not over the mean of its squares plus a constant"
    in_fp32 = scaled.meta["val"].dtype == product.meta["val"].dtype == torch.float32 != dtype
    if wide.meta["val"].dtype != torch.float32 or not (in_fp32 or scaled.meta["val"].dtype == dtype):
        return "its norm is not computed in fp32 and rounded before or after the weight"
    if value.meta["val"].dtype != dtype:
        return f"its norm is not rounded to the {dtype} of its input"
    parameter, offset = _weight_and_offset(weight)
    if offset and weight.meta["val"].dtype != torch.float32:
        return "the weight of its norm plus a constant is rounded"
    is_vector = is_parameter(parameter) and parameter.meta["val"].shape == (size,)
    if not is_vector or parameter.meta["val"].dtype not in ((dtype, torch.float32) if in_fp32 else (dtype,)):
        return "the weight of its norm is not a parameter of its dtype with an element for each of the last dimension"
    # Models in fp32 round nothing, so Gemma's norm is the same op there.
    return Norm(x, parameter, eps, offset, in_fp32)


def _layer_norm(
    value: fx.Node, product: fx.Node, weight: fx.Node, scaled: fx.Node, deviation: fx.Node, rsqrt: fx.Node
) -> Norm | str:
    """Return a LayerNorm without bias, computed in fp32 as in Cohere's code, or why it is not recognised.

    deviation: x - mean(x), maybe after a cast of x. The other arguments are those of `_rms_norm`.
    """
    wide: Any = deviation.args[0]
    x, weight = through_cast(wide), through_cast(weight)
    like = x.meta["val"]
    eps, squared = _mean_of_squares(rsqrt)
    if not (_is_from_mean(deviation, wide) and _is_from_mean(squared, wide)):
        return "it is not over the deviation from the mean, its squares plus a constant"
    if not is_parameter(weight):
        return "no multiplication with a weight follows"
    in_fp32 = wide.meta["val"].dtype == scaled.meta["val"].dtype == product.meta["val"].dtype == torch.float32
    if not in_fp32 or value.meta["val"].dtype != like.dtype:
        return "it is not computed in fp32 and rounded once"
    if weight.meta["val"].shape != like.shape[-1:] or weight.meta["val"].dtype != like.dtype:
        return "its weight is not a parameter of its dtype with an element for each of the last dimension"
    return Norm(x, weight, eps, centred=True)


def _native(norm: fx.Node) -> Norm | str:
    x, shape, weight, bias, eps = (arg(norm, i) for i in range(5))
    value = x.meta["val"]
    if len(norm.users) != 1:
        return "its mean or its deviation is read too"
    if list(shape) != [value.shape[-1]]:
        return "it is not over the last dimension"
    for parameter in (weight, bias):
        if parameter is not None and not (is_parameter(parameter) and parameter.meta["val"].dtype == value.dtype):
            return "its weight or bias is not a parameter of its dtype"
    return Norm(x, weight, eps, bias=bias, centred=True)


def rounded(product: fx.Node) -> fx.Node:
    """Return the only user of `product` if this user is a dtype conversion; otherwise `product` itself."""
    user = only_user(product)
    return user if user is not None and through_cast(user) is product else product


def _weight_and_offset(weight: fx.Node) -> tuple[fx.Node, float]:
    """Split the weight w + c into (w, c), where c is a constant and w is returned without its cast.

    c is 0 if nothing is added.
    """
    if is_call(weight, aten.add.Tensor) and not weight.kwargs and isinstance(weight.args[1], int | float):
        return through_cast(weight.args[0]), float(weight.args[1])
    return through_cast(weight), 0.0


def _mean_of_squares(rsqrt: fx.Node) -> tuple[float, Any]:
    """Return (eps, y) if the node is rsqrt(mean(y ** 2) + eps), with the mean over the last dimension.

    Returns (a number, None) for any other rsqrt.
    """
    shifted: Any = arg(rsqrt, 0)
    if not is_call(shifted, aten.add.Tensor) or shifted.kwargs or not isinstance(shifted.args[1], float):
        return 0.0, None
    squares = _averaged(shifted.args[0])
    is_square = is_call(squares, aten.pow.Tensor_Scalar) and squares.args[1] == 2
    return shifted.args[1], squares.args[0] if is_square else None


def _averaged(mean: Any) -> Any:
    """Return y if the value is the mean of y over its last dimension, with that dimension kept; otherwise None."""
    is_mean = is_call(mean, aten.mean.dim) and not mean.kwargs and mean.args[1:] == ([-1], True)
    return mean.args[0] if is_mean else None


def _is_from_mean(value: Any, wide: fx.Node) -> bool:
    """Return whether the value is wide - mean(wide), with the mean over the last dimension."""
    return is_deviation(value) and not value.kwargs and value.args[0] is wide and _averaged(value.args[1]) is wide


def is_deviation(value: Any) -> bool:
    """Return whether the value is a subtraction. In a norm only LayerNorm subtracts: the mean, from its input."""
    return is_call(value, aten.sub.Tensor)


def scaled_by_roots(graph: fx.Graph) -> Iterator[Any]:
    """Yield, for each norm over hidden states [T, D], the value that its rsqrt multiplies, before a cast to fp32.

    Passes count these values in their contracts. Every rsqrt of a 2-D value counts as a norm, even if `norm_of` does
    not recognise the norm; norms without a weight are left out. Yields None for an rsqrt that multiplies nothing.
    """
    for rsqrt in graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        if rsqrt.meta["val"].dim() == 2 and not _lacks_weight(rsqrt):
            scaled = (other for user in rsqrt.users for other, root in factors(user) if root is rsqrt)
            yield through_cast(next(scaled, None))


def _lacks_weight(rsqrt: fx.Node) -> bool:
    """Return whether the rsqrt multiplies a value, but the product, or a cast of it, is not multiplied by a weight."""
    products = [user for user in rsqrt.users if is_call(user, aten.mul.Tensor)]
    casts = [user for product in products for user in product.users if through_cast(user) is product]
    users = [user for value in (*products, *casts) for user in value.users]
    return bool(products) and not any(is_call(user, aten.mul.Tensor) for user in users)


def is_scaled_by_root(value: Any) -> bool:
    """Return whether the value, maybe cast, is a multiplication by an rsqrt, as in a norm."""
    return any(is_call(root, aten.rsqrt.default) for _, root in factors(through_cast(value)))


def is_sum(value: Any) -> bool:
    """Return whether the value is a sum of two tensors, both of the sum's shape, such as a residual add."""
    return is_call(value, aten.add.Tensor) and all(
        isinstance(addend, fx.Node) and addend.meta["val"].shape == value.meta["val"].shape for addend in value.args
    )


def has_normed_addend(total: fx.Node) -> bool:
    """Return whether an addend looks like the result of a norm with a weight, see `is_scaled_and_weighted`."""
    return any(map(is_scaled_and_weighted, total.all_input_nodes))


def is_scaled_and_weighted(value: Any) -> bool:
    """Return whether the value looks like the result of a norm with a weight: x multiplied by an rsqrt and a weight."""
    return any(is_scaled_by_root(factor) for factor, _ in factors(through_cast(value)))
