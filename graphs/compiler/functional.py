"""Dynamo's graph to ATen, functional also where the code that was traced changes tensors in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_engine.attention.op import ATTENTION_OPS
from compiled_engine.graphs.compiler import compat


def to_aten(graph: fx.GraphModule, fakes: list[Any]) -> fx.GraphModule:
    """The ATen graph of Dynamo's; ops that write to their arguments are the attention ops alone."""
    module = make_fx(graph)(*fakes)
    if any(map(_writes, module.graph.nodes)):
        return make_fx(compat.functional(graph))(*fakes)
    return module


def _writes(node: fx.Node) -> bool:
    target = node.target
    mutates = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return mutates and target.name() not in ATTENTION_OPS  # type: ignore[union-attr]
