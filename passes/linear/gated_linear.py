"""Fuses a linear of gate and up with silu(gate) * up into one op, which is one kernel on Hopper where that is faster.

Why: a kernel for the activation alone costs a launch, and reads the linear's output, twice as wide as the result. The
fused kernels also prefetch weights before the preceding norm has ended. small_batch_linear does the same for fewer
tokens. The pass runs after silu_mul, whose op it absorbs.

The kernels are chosen at launch: one kernel if the device's profile measured it faster, otherwise torch's linear and a
kernel for the activation.
"""

from __future__ import annotations

import torch
from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import arg, emit_named, named, only_user, rewrite_calls
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.linear import hopper_linear, hopper_product, silu_mul
from compiled_engine.passes.linear.linears import linear_of, why_no_linear
from compiled_engine.passes.linear.quantised_linear_op import quantised_linear


def reference(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """Return activation(gate) * up, [T, N / 2], where gate and up are the two halves of linear(x)."""
    return silu_mul.reference(torch.nn.functional.linear(x_TK, weight_NK, bias_N), activation)


def launch(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """Return activation(gate) * up of the halves of linear(x), [T, N / 2].

    A Hopper kernel computes it if the device's profile measured it faster; otherwise torch's linear runs, and then the
    kernel of silu_mul.
    """
    products = hopper_product.product_tiles(*x_TK.shape[:1], *weight_NK.shape, True, x_TK.dtype, x_TK.device)
    if products is not None and bias_N is None:
        return hopper_product.hopper_product(x_TK, weight_NK, True, activation, products)
    tiles = hopper_linear.hopper_tiles(*x_TK.shape[:1], *weight_NK.shape, True, x_TK.dtype, x_TK.device)
    if tiles is not None:
        return hopper_linear.hopper_linear(x_TK, weight_NK, bias_N, True, activation, tiles)
    return silu_mul.launch(torch.nn.functional.linear(x_TK, weight_NK, bias_N), activation)


gated_linear = define_op(
    'gated_linear(Tensor x_TK, Tensor weight_NK, Tensor? bias_N, str activation="silu") -> Tensor',
    cpu=reference,
    cuda=launch,
    fake=lambda x_TK, weight_NK: x_TK.new_empty((x_TK.shape[0], weight_NK.shape[0] // 2)),
    reference=reference,
)


class GatedLinear(GraphPass):
    name = "gated_linear"
    requires = ("merge_linears", "silu_mul")
    kernel_token_counts = (*hopper_linear.TOKEN_BUCKETS, *hopper_product.TOKEN_BUCKETS)

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        return f"{compile_range.name} tokens is a small-batch range" if compile_range.small else None

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return silu_mul.gated_products(graph)

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
