"""Replaces a LayerNorm, with the residual add before it if there is one, by one kernel that returns both results.

Why: separately, the add and the norm each read and write the hidden state. Inductor finds the same fusion, but its
kernel cannot start before the previous kernel has ended, and in small batches this wait is most of its time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import fx
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import (
    arg,
    aten,
    emit,
    emit_item,
    factors,
    is_call,
    only_user,
    rewrite_calls,
)
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.norm.norms import is_deviation, norm_of, rounded, scaled_by_roots, why_no_norm


@quick_launches
@triton.jit(do_not_specialize=["eps"])
def layer_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    eps: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write LayerNorm(x + residual) and the sum x + residual. Without a residual, write only LayerNorm(x).

    Program (token) computes one row. x_ptr, residual_ptr, normed_ptr, sum_ptr: [T, HIDDEN_SIZE], contiguous;
    weight_ptr, bias_ptr: [HIDDEN_SIZE]. residual_ptr, weight_ptr and bias_ptr may be None. BLOCK: HIDDEN_SIZE rounded
    up to a power of two.
    """
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN_SIZE
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask, other=0.0).to(tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * HIDDEN_SIZE
    x = tl.load(x_ptr + start + column, mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    if residual_ptr is not None:
        x += tl.load(residual_ptr + start + column, mask, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
        tl.store(sum_ptr + start + column, x.to(dtype), mask)
    centred = tl.where(mask, x - tl.sum(x, 0) / HIDDEN_SIZE, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / HIDDEN_SIZE + eps)
    if weight_ptr is not None:
        normed *= weight
    if bias_ptr is not None:
        normed += bias
    tl.store(normed_ptr + start + column, normed.to(dtype), mask)


def reference(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    weight_D: torch.Tensor | None,
    bias_D: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (LayerNorm(x + residual) * weight + bias, x + residual), [T, D] each.

    Residual, weight and bias may be None. Without a residual, x alone is normed and the second result has no elements.
    """
    total_TD = x_TD if residual_TD is None else x_TD + residual_TD
    normed_TD = torch.nn.functional.layer_norm(total_TD, (x_TD.shape[-1],), weight_D, bias_D, eps)
    return normed_TD, x_TD.new_empty(0) if residual_TD is None else total_TD


def launch(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    weight_D: torch.Tensor | None,
    bias_D: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the LayerNorm of x + residual, and x + residual, computed by the kernel; see `reference`."""
    x_TD = x_TD.contiguous()
    normed_TD, total_TD = _fake(x_TD, residual_TD)
    hidden_size = x_TD.shape[-1]
    block = next_power_of_2(hidden_size)
    layer_norm_kernel[(x_TD.shape[0],)](
        x_TD,
        None if residual_TD is None else residual_TD.contiguous(),
        weight_D,
        bias_D,
        normed_TD,
        total_TD,
        eps,
        HIDDEN_SIZE=hidden_size,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **dependent_launch(x_TD.device),
    )
    return normed_TD, total_TD


def _fake(x_TD: torch.Tensor, residual_TD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    normed_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    return normed_TD, x_TD.new_empty(0) if residual_TD is None else torch.empty_like(normed_TD)


layer_norm = define_op(
    "layer_norm(Tensor x_TD, Tensor? residual_TD, Tensor? weight_D, Tensor? bias_D, float eps) -> (Tensor, Tensor)",
    cpu=reference,
    cuda=launch,
    fake=_fake,
    reference=reference,
)


class LayerNorm(GraphPass):
    name = "layer_norm"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of LayerNorms over hidden states [T, D], written as one ATen op or as several."""
        native = graph.find_nodes(op="call_function", target=aten.native_layer_norm.default)
        of_tokens = [norm for norm in native if arg(norm, 0).meta["val"].dim() == 2]
        return len(of_tokens) + sum(map(is_deviation, scaled_by_roots(graph)))

    def run(self, graph: fx.Graph) -> PassResult:
        native = rewrite_calls(graph, aten.native_layer_norm.default, _rewrite)
        written_out = rewrite_calls(graph, aten.rsqrt.default, _rewrite_written_out)
        replacements = (*native.replacements, *written_out.replacements)
        near_misses = (*native.near_misses, *written_out.near_misses)
        return PassResult(native.matches + written_out.matches, near_misses, replacements)


def _rewrite(graph: fx.Graph, norm: fx.Node) -> list[Replacement] | str | None:
    if arg(norm, 0).meta["val"].dim() != 2:
        return None
    normed = only_user(norm)
    if normed is None or norm_of(normed) is None:
        return why_no_norm(normed) or "its mean or its deviation is read too"
    return _fuse(graph, normed)


def _rewrite_written_out(graph: fx.Graph, rsqrt: fx.Node) -> list[Replacement] | str | None:
    """Fuse the LayerNorm, written as several ops, that this rsqrt belongs to, and return the replacements.

    Returns the reason if the LayerNorm is not recognised, or None if the rsqrt belongs to no LayerNorm over [T, D].
    """
    scaled: Any = only_user(rsqrt)
    centred: Any = next((other for root, other in factors(scaled) if root is rsqrt), None)
    if not is_deviation(centred) or centred.meta["val"].dim() != 2:
        return None
    product = only_user(scaled)
    value = None if product is None else rounded(product)
    if value is None or norm_of(value) is None:
        return why_no_norm(value) or "no multiplication with a weight follows"
    return _fuse(graph, value)


def _fuse(graph: fx.Graph, value: fx.Node) -> list[Replacement]:
    norm = norm_of(value)
    assert norm is not None
    total, addends = norm.x, _addends(norm.x)
    # Other ops may read the sum before the norm does.
    with graph.inserting_before(value) if addends is None else graph.inserting_after(total):
        fused = emit(graph, layer_norm, *(addends or (total, None)), norm.weight, norm.bias, norm.eps)
    with graph.inserting_after(fused):
        normed = emit_item(graph, fused, 0)
    value.replace_all_uses_with(normed)
    replacements = [Replacement(value.name, normed)]
    if addends is not None:
        with graph.inserting_after(fused):
            new_total = emit_item(graph, fused, 1)
        total.replace_all_uses_with(new_total)
        replacements.append(Replacement(total.name, new_total))
    return replacements


def _addends(total: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return the two addends if the value is their sum and both have its shape and dtype; otherwise None."""
    if not is_call(total, aten.add.Tensor) or total.kwargs or len(total.args) != 2:
        return None
    like = total.meta["val"]
    for addend in total.args:
        if not isinstance(addend, fx.Node) or addend.meta["val"].shape != like.shape:
            return None
        if addend.meta["val"].dtype != like.dtype:
            return None
    return total.args
