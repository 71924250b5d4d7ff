"""Finds calls that take the values of a token from other tokens, so that no token's result depends on its company.

A dimension whose size depends on the number of tokens has a token's values at one place. An op that chooses, joins or
adds along it reads other tokens' values. Tensors keep such a dimension where it is, in the order of memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.matching import always_equal, named

# Ops along the dimension `dim` of their first argument, by name.
_ALONG = frozenset(
    ("cat", "gather", "index_select", "scatter", "scatter_", "select", "slice", "split", "split_with_sizes", "topk")
)
# Ops along a dimension that is always the same.
_ALONG_FIXED = {"aten::embedding": 0, "compiled_engine::row_function": -1, "compiled_engine::top_k": -1}
_VIEWS = ("view", "_unsafe_view", "reshape")


def mixes_tokens(call: fx.Node) -> str | None:
    """Return how a call takes values of a token from other tokens of the step; None if it does not.

    Only ops that a batch-invariant model may have are known here.
    """
    target: Any = call.target
    library, _, name = (full := target.name().partition(".")[0]).partition("::")
    arguments, is_aten = named(call), library == "aten"
    if is_aten and name == "arange":
        depends = any(isinstance(_value(each), torch.SymInt) for each in arguments.values())
        return "with the number of tokens" if depends else None
    if is_aten and name in _VIEWS:
        before, after = _value(call.args[0]), _value(call)
        stays = _place_of_tokens(before) == _place_of_tokens(after)
        return None if stays else f"as {list(after.shape)} of {list(before.shape)}"
    if is_aten and name in _ALONG:
        dim = arguments["dim"]
    elif full in _ALONG_FIXED:
        dim = _ALONG_FIXED[full]
    else:
        return None
    first: Any = call.args[0]
    tensors = [_value(each) for each in (first if isinstance(first, list | tuple) else [first])]
    found = next((tensor for tensor in tensors if not isinstance(tensor.shape[dim], int)), None)
    if found is None or (name == "slice" and all(map(always_equal, found.shape, _value(call).shape))):
        return None
    return f"along dimension {dim} of {list(found.shape)}"


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _place_of_tokens(tensor: torch.Tensor) -> list[int]:
    """Return, for each dimension that depends on the number of tokens, the product of the fixed sizes before it."""
    sizes = tensor.shape
    return [
        math.prod(each for each in sizes[:dim] if isinstance(each, int))
        for dim, size in enumerate(sizes)
        if not isinstance(size, int)
    ]
