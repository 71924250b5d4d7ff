"""Finds tensors whose elements all have one value, which is the same in every step.

Why: code that is general computes with such tensors where a model has no use for them. A router that chooses one group
of experts among one group writes ones into every element of its mask, for example.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from compiled_engine.passes.framework.matching import always_equal, arg, aten, is_call, named

_ZEROS = (aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default)
_ONES = (aten.ones_like.default, aten.new_ones.default, aten.ones.default)
_FULL = (aten.full_like.default, aten.new_full.default, aten.full.default)
# Ops that only choose, repeat or move elements of their first argument.
_MOVES = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.clone.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.transpose.int, aten.permute.default),
    *(aten.t.default, aten.alias.default, aten.detach.default),
)


def fill_of(node: object) -> bool | float | None:
    """Return the value of all elements of a tensor; None if it is not known or the elements differ.

    The tensor must not be written to later: traced graphs have no aten op that writes to its arguments.
    """
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    if is_call(node, *_ZEROS, *_ONES):
        return _rounded(float(is_call(node, *_ONES)), node)
    if is_call(node, *_FULL):
        return _rounded(named(node)["fill_value"], node)
    if is_call(node, *_MOVES):
        return fill_of(node.args[0])
    if is_call(node, aten._to_copy.default):
        before = fill_of(node.args[0])
        return None if before is None else _rounded(before, node)
    if is_call(node, aten.bitwise_not.default, aten.logical_not.default) and node.meta["val"].dtype == torch.bool:
        before = fill_of(node.args[0])
        return None if before is None else not before
    if is_call(node, aten.scatter.value) and _is_everywhere(arg(node, 2), arg(node, 1), node):
        return _rounded(arg(node, 3), node)
    return None


def _rounded(value: object, node: fx.Node) -> bool | float | None:
    """Return a number as an element of the node's dtype; None if the dtype does not have it, or if it is no number."""
    if not isinstance(value, bool | int | float):
        return None
    try:
        return torch.tensor(value, dtype=node.meta["val"].dtype).item()
    except (OverflowError, RuntimeError):  # such as minus infinity, or -1, in whole numbers
        return None


def _is_everywhere(index: fx.Node, dim: int, scatter: fx.Node) -> bool:
    """Return whether a scatter along `dim` writes to each element: the index is a choice of all elements of a row."""
    if not is_call(index, operator.getitem) or index.args[1] != 1 or not is_call(index.args[0], aten.topk.default):
        return False
    chosen, value = named(arg(index, 0)), scatter.meta["val"]
    rows = chosen["self"].meta["val"].shape
    same_shape = len(rows) == value.dim() and all(map(always_equal, rows, value.shape))
    last = value.dim()
    return same_shape and chosen["dim"] % last == dim % last and always_equal(chosen["k"], rows[chosen["dim"]])
