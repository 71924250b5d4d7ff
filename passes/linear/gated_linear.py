"""A linear and silu * up of its halves become one op, which on Hopper is one kernel where that is faster.

Why: a separate activation costs a launch, and a read of the linear's output, which is twice as wide as the result; the
kernels also prefetch their weights before the preceding norm has ended. small_batch_linear does the same for fewer
tokens. It runs after silu_mul, whose op it absorbs.
"""

from __future__ import annotations

import torch
from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import arg, emit_named, named, only_user, rewrite_calls
from compiled_engine.passes.linear import hopper_linear, hopper_product
from compiled_engine.passes.linear.gated_linear_op import gated_linear
from compiled_engine.passes.linear.linears import linear_of, why_no_linear
from compiled_engine.passes.linear.quantised_linear_op import quantised_linear
from compiled_engine.passes.linear.silu_mul import gated_products


class GatedLinear(GraphPass):
    name = "gated_linear"
    requires = ("merge_linears", "silu_mul")
    kernel_token_counts = (*hopper_linear.TOKEN_BUCKETS, *hopper_product.TOKEN_BUCKETS)

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        return f"{compile_range.name} tokens is a small-batch range" if compile_range.small else None

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return gated_products(graph)

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, torch.ops.compiled_engine.silu_mul.default, _rewrite)


def _rewrite(graph: fx.Graph, activation: fx.Node) -> list[Replacement] | str:
    product = arg(activation, 0)
    linear = linear_of(product)
    if linear is None:
        return why_no_linear(product) or "gate and up are not what a linear computes"
    if not linear.is_known:
        return f"its weight is stored as {linear.format}"
    if only_user(product) is not activation:
        return "the linear's result has other users"
    with graph.inserting_before(activation):
        if linear.quantised is not None:
            arguments = named(product) | {"silu_mul": True, "activation": named(activation)["activation"]}
            fused = emit_named(graph, quantised_linear, arguments)
        else:
            arguments = {"x_TK": linear.x, "weight_NK": linear.weight, "bias_N": linear.bias}
            fused = emit_named(graph, gated_linear, named(activation) | arguments)
    activation.replace_all_uses_with(fused)
    return [Replacement(activation.name, fused)]
