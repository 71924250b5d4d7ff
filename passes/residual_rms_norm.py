"""Residual add and the RMSNorm that follows it become one kernel that returns both results.

Why: both read and write the hidden state, so one kernel halves the traffic and saves a launch; Inductor by itself finds
the same fusion as two loops over the row, this kernel keeps the row in registers. With few tokens small_batch_linear
takes both in. On an H200, leaving the pass out costs a decode step of the Qwen3-0.6B shape at 1, 8 and 64 tokens 127,
232 and 214 microseconds of 597, 789 and 1420.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import fx
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.config import ModelConfig
from compiled_engine.kernels.dependent_launch import may_launch_early
from compiled_engine.passes.graph_inputs import is_parameter
from compiled_engine.passes.graph_pass import CompileRange, PassResult, Replacement
from compiled_engine.passes.matching import (
    arg,
    aten,
    emit,
    emit_item,
    is_call,
    other_factor,
    through_cast,
    user_through_cast,
)
from compiled_engine.passes.op_library import define_op


@triton.jit(do_not_specialize=["eps"])
def _kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    eps: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * HIDDEN_SIZE
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN_SIZE
    x = tl.load(x_ptr + start + column, mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + start + column, mask, other=0.0).to(tl.float32)
    total = (x + residual).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + start + column, total, mask)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / HIDDEN_SIZE + eps)
    normed = (total * scale).to(normed_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask, other=0.0).to(tl.float32)
    tl.store(normed_ptr + start + column, (normed * weight).to(normed_ptr.dtype.element_ty), mask)


def reference(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm(x + residual) * weight, x + residual), the norm in fp32 as the models compute it."""
    total_TD = x_TD + residual_TD
    wide_TD = total_TD.float()
    normed_TD = wide_TD * torch.rsqrt(wide_TD.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * normed_TD.to(x_TD.dtype), total_TD


def launch(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel behind `reference`."""
    x_TD, residual_TD = x_TD.contiguous(), residual_TD.contiguous()
    normed_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    hidden_size = x_TD.shape[-1]
    block = triton.next_power_of_2(hidden_size)
    early = may_launch_early(x_TD.device)
    _kernel[(x_TD.shape[0],)](
        x_TD,
        residual_TD,
        weight_D,
        normed_TD,
        total_TD,
        eps,
        HIDDEN_SIZE=hidden_size,
        BLOCK=block,
        DEPENDENT_LAUNCH=early,
        num_warps=max(1, min(16, block // 512)),
        **({"launch_pdl": True} if early else {}),
    )
    return normed_TD, total_TD


def _fake(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x_TD), torch.empty_like(x_TD)


residual_rms_norm = define_op(
    "residual_rms_norm(Tensor x_TD, Tensor residual_TD, Tensor weight_D, float eps) -> (Tensor, Tensor)",
    cpu=reference,
    cuda=launch,
    fake=_fake,
)


class ResidualRMSNorm:
    name = "residual_rms_norm"

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        return None

    def contract(self, model: ModelConfig, compile_range: CompileRange) -> int:
        return 2 * model.num_layers

    def run(self, graph: fx.Graph) -> PassResult:
        near_misses: list[str] = []
        replacements: list[Replacement] = []
        for rsqrt in graph.find_nodes(op="call_function", target=aten.rsqrt.default):
            found = _rewrite(graph, rsqrt)
            if isinstance(found, str):
                near_misses += [f"{rsqrt.name}: {found}"] if found else []
            else:
                replacements += found
        return PassResult(len(replacements) // 2, tuple(near_misses), tuple(replacements))


def _rewrite(graph: fx.Graph, rsqrt: fx.Node) -> list[Replacement] | str:
    """What was rewritten; why not, when it is a norm of a sum that does not fit; "" for norms of anything else.

    The textbook form: wide * rsqrt(mean(wide ** 2) + eps), cast, times a weight; wide is the sum in fp32.
    """
    shifted = arg(rsqrt, 0)
    mean: Any = arg(shifted, 0) if is_call(shifted, aten.add.Tensor) else None
    if not (is_call(mean, aten.mean.dim) and is_call(mean.args[0], aten.pow.Tensor_Scalar)):
        return ""
    wide = mean.args[0].args[0]
    total = through_cast(wide)
    if not (is_call(total, aten.add.Tensor) and total.meta["val"].dim() == 2):
        return ""
    if wide.meta["val"].dtype != torch.float32:
        return f"the norm is computed in {wide.meta['val'].dtype}"
    if shifted.kwargs or mean.kwargs or mean.args[0].kwargs:
        return "the mean of squares or its sum with eps has further arguments"
    left, right = total.args[:2]
    if not all(isinstance(a, fx.Node) and a.meta["val"].shape == total.meta["val"].shape for a in (left, right)):
        return "the addends differ in shape"
    if total.kwargs or any(a.meta["val"].dtype != total.meta["val"].dtype for a in (left, right)):
        return "the addends are scaled or differ in dtype"
    if mean.args[1] != [-1] or mean.args[0].args[1] != 2 or not isinstance(shifted.args[1], float):
        return "not the mean of squares over the last dimension plus a constant"
    scaled = user_through_cast(rsqrt)
    if scaled is None or not is_call(scaled, aten.mul.Tensor) or other_factor(scaled, rsqrt) is not wide:
        return "the root is not multiplied with the normed value"
    product = user_through_cast(scaled)
    if product is None or not is_call(product, aten.mul.Tensor):
        return "no multiplication with a weight follows"
    weight = other_factor(product, scaled)
    if not is_parameter(weight) or weight.meta["val"].dtype != total.meta["val"].dtype:
        return "the weight is not a parameter of the same dtype"
    if tuple(weight.meta["val"].shape) != (total.meta["val"].shape[-1],):
        return "the weight is not a vector of the hidden size"
    if product.meta["val"].dtype != total.meta["val"].dtype:
        return "the result has another dtype"
    with graph.inserting_after(total):
        fused = emit(graph, torch.ops.compiled_engine.residual_rms_norm.default, right, left, weight, shifted.args[1])
    with graph.inserting_after(fused):
        new_total = emit_item(graph, fused, 1)
    with graph.inserting_after(fused):
        normed = emit_item(graph, fused, 0)
    replacements = [Replacement(total.name, new_total), Replacement(product.name, normed)]
    product.replace_all_uses_with(normed)
    total.replace_all_uses_with(new_total)
    _erase_dead(graph, product)
    return replacements


def _erase_dead(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a value that nothing reads, and what only led to it."""
    if node.users or node.op != "call_function":
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for argument in inputs:
        _erase_dead(graph, argument)
