"""Computes silu(gate) * up, or gelu(gate) * up, in one kernel that reads gate and up from one linear's result.

Why: the model's widest activation is read once, and there is one launch. For few tokens, small_batch_linear absorbs the
op.
"""

from __future__ import annotations

import operator

import torch
import triton
import triton.language as tl
from torch import fx
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import (
    ACTIVATIONS,
    arg,
    aten,
    emit,
    factors,
    is_call,
    only_user,
    other_factor,
    rewrite_calls,
)
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.norm.norms import is_scaled_and_weighted

# Up to this many tokens, smaller programs are needed to use every multiprocessor.
FEW_TOKENS = 128


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Return activation(gate) * up in fp32, with activation(gate) rounded to `dtype`. gate, up: fp32."""
    if ACTIVATION == "silu":
        activated = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z).
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    return activated.to(dtype).to(tl.float32) * up


@quick_launches
@triton.jit
def silu_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write activation(gate) * up. Program (token, block of BLOCK columns).

    gate_up_ptr: [T, 2 * WIDTH], gate and up of each row; out_ptr: [T, WIDTH].
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + column, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * WIDTH + WIDTH + column, mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * WIDTH + column, gated(gate, up, ACTIVATION, dtype).to(dtype), mask)


def activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate). activation: silu, gelu, or gelu_tanh (the tanh approximation of gelu)."""
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def reference(gate_up_TI2: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """Return activation(gate) * up, [T, I]. gate_up_TI2: [T, 2 I], gate in the left half of a row, up in the right."""
    gate_TI, up_TI = gate_up_TI2.chunk(2, dim=-1)
    return activate(gate_TI, activation) * up_TI


def launch(gate_up_TI2: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """Return activation(gate) * up of the halves of each row, [T, I], computed by the kernel; see `reference`."""
    gate_up_TI2 = gate_up_TI2.contiguous()
    num_tokens, width = gate_up_TI2.shape[0], gate_up_TI2.shape[1] // 2
    out_TI = gate_up_TI2.new_empty((num_tokens, width))
    block = 512 if num_tokens <= FEW_TOKENS else 1024
    silu_mul_kernel[(num_tokens, cdiv(width, block))](
        gate_up_TI2,
        out_TI,
        WIDTH=width,
        BLOCK=block,
        ACTIVATION=activation,
        **dependent_launch(gate_up_TI2.device),
    )
    return out_TI


silu_mul = define_op(
    'silu_mul(Tensor gate_up_TI2, str activation="silu") -> Tensor',
    cpu=reference,
    cuda=launch,
    fake=lambda gate_up_TI2: gate_up_TI2.new_empty((gate_up_TI2.shape[0], gate_up_TI2.shape[1] // 2)),
    reference=reference,
)


def gated_products(graph: fx.Graph) -> int:
    """Return the number of results of activations, [T, I], that are multiplied by another value, for contracts.

    Passes that match silu(gate) * up must match as often. Products with the result of a norm, a clamp or a recurrence
    do not count.
    """
    activations = [node for each in ACTIVATIONS for node in graph.find_nodes(op="call_function", target=each)]
    products = [(node, only_user(node)) for node in activations if node.meta["val"].dim() == 2]
    return sum(
        any(left is node is not right and not _is_gated_later(right) for left, right in factors(product))
        for node, product in products
    )


def _is_gated_later(node: fx.Node) -> bool:
    """Return whether the node is the result of a norm, a clamp or a recurrence (an op that writes to a buffer)."""
    if is_scaled_and_weighted(node) or is_call(node, aten.clamp.Tensor):
        return True
    while is_call(node, aten.view.default, aten.reshape.default, aten._to_copy.default):
        node = arg(node, 0)
    return is_call(node, aten.empty_like.default)


class SiluMul(GraphPass):
    name = "silu_mul"
    requires = ("merge_linears",)
    kernel_token_counts = (FEW_TOKENS,)

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return gated_products(graph)

    def run(self, graph: fx.Graph) -> PassResult:
        silu, gelu = (rewrite_calls(graph, target, _rewrite) for target in ACTIVATIONS)
        replacements = (*silu.replacements, *gelu.replacements)
        return PassResult(silu.matches + gelu.matches, (*silu.near_misses, *gelu.near_misses), replacements)


def _rewrite(graph: fx.Graph, silu: fx.Node) -> list[Replacement] | str:
    product = only_user(silu)
    if product is None or not is_call(product, aten.mul.Tensor):
        return "it is not multiplied with another value"
    gate, up = arg(silu, 0), other_factor(product, silu)
    halves = [is_call(half, operator.getitem) and half.args[1] == i for i, half in enumerate((gate, up))]
    if not (all(halves) and gate.args[0] is up.args[0]):
        return "gate and up are not the two halves of one tensor (merge_linears makes them so)"
    split = gate.args[0]
    if not is_call(split, aten.split_with_sizes.default, aten.split.Tensor) or len(split.meta["val"]) != 2:
        return "gate and up are not the two halves of one tensor (merge_linears makes them so)"
    if len(split.args) < 3 or split.args[2] not in (-1, 1):  # the default is 0, rows
        return "the halves are not halves of each row"
    first, second = (half.shape[-1] for half in split.meta["val"])
    if first != second or split.args[0].meta["val"].dim() != 2:
        return "the halves differ in width"
    with graph.inserting_before(product):
        fused = emit(graph, silu_mul, split.args[0], activation_of(silu))
    product.replace_all_uses_with(fused)
    return [Replacement(product.name, fused)]


def activation_of(call: fx.Node) -> str:
    """Return the name of the activation that a call of one of ACTIVATIONS computes, as `activate` takes it."""
    if is_call(call, aten.silu.default):
        return "silu"
    return "gelu_tanh" if call.kwargs.get("approximate") == "tanh" else "gelu"
