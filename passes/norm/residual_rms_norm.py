"""Fuses a residual add and the RMSNorm after it into one kernel, which returns the normed sum and the sum.

Some models, such as Gemma, also norm the value that is added to the residual. The kernel computes this norm too.

Why: the add and the norm each read and write the hidden state, so one kernel halves the traffic and saves a launch.
Inductor finds the same fusion with two loops over the row; this kernel keeps the row in registers. For few tokens,
small_batch_linear absorbs both ops.
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
    aten,
    emit,
    emit_item,
    is_call,
    only_user,
    other_factor,
    rewrite_calls,
    through_cast,
    user_through_cast,
)
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.norm import rms_norm
from compiled_engine.passes.norm.norms import Norm, is_sum, norm_of, rounded, scaled_by_roots, why_no_norm


@quick_launches
@triton.jit(do_not_specialize=["eps"])
def residual_rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    inner_weight_ptr: tl.tensor,
    eps: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write the sum x + residual and the RMSNorm of the sum. Program (token) computes one row of both.

    x_ptr, residual_ptr, normed_ptr, sum_ptr: [T, HIDDEN_SIZE], contiguous. weight_ptr: [HIDDEN_SIZE].
    inner_weight_ptr: [HIDDEN_SIZE], the weight of an RMSNorm of x before the addition; None: x is added as it is.
    BLOCK: HIDDEN_SIZE rounded up to a power of two. OFFSET, WIDE: see rms_norm.normed.
    """
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN_SIZE
    # Weights are read from HBM and no earlier kernel writes them, so they are loaded before the wait.
    weight = tl.load(weight_ptr + column, mask, other=0.0).to(tl.float32)
    if inner_weight_ptr is not None:
        inner_weight = tl.load(inner_weight_ptr + column, mask, other=0.0).to(tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * HIDDEN_SIZE
    x = tl.load(x_ptr + start + column, mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + start + column, mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = sum_ptr.dtype.element_ty
    if inner_weight_ptr is not None:
        x = rms_norm.normed(x, inner_weight, eps, HIDDEN_SIZE, OFFSET, WIDE, dtype).to(tl.float32)
    total = (x + residual).to(dtype)
    tl.store(sum_ptr + start + column, total, mask)
    normed = rms_norm.normed(total.to(tl.float32), weight, eps, HIDDEN_SIZE, OFFSET, WIDE, dtype)
    tl.store(normed_ptr + start + column, normed, mask)


def reference(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    wide: bool = False,
    inner_weight_D: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (RMSNorm(x + residual) * (offset + weight), x + residual), [T, D] each.

    inner_weight_D: the weight of an RMSNorm of x before the addition; None: x is added as it is. offset, wide: for both
    norms, see rms_norm.reference.
    """
    if inner_weight_D is not None:
        x_TD = rms_norm.reference(x_TD, inner_weight_D, eps, offset, wide)
    total_TD = x_TD + residual_TD
    return rms_norm.reference(total_TD, weight_D, eps, offset, wide), total_TD


def launch(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    wide: bool = False,
    inner_weight_D: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of x + residual, and x + residual, [T, D] each, computed by the kernel; see `reference`."""
    x_TD, residual_TD = x_TD.contiguous(), residual_TD.contiguous()
    normed_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    hidden_size = x_TD.shape[-1]
    block = next_power_of_2(hidden_size)
    residual_rms_norm_kernel[(x_TD.shape[0],)](
        x_TD,
        residual_TD,
        weight_D,
        normed_TD,
        total_TD,
        inner_weight_D,
        eps,
        HIDDEN_SIZE=hidden_size,
        BLOCK=block,
        OFFSET=offset,
        WIDE=wide,
        num_warps=max(1, min(16, block // 512)),
        **dependent_launch(x_TD.device),
    )
    return normed_TD, total_TD


residual_rms_norm = define_op(
    "residual_rms_norm(Tensor x_TD, Tensor residual_TD, Tensor weight_D, float eps, float offset=0.0, "
    "bool wide=False, Tensor? inner_weight_D=None) -> (Tensor, Tensor)",
    cpu=reference,
    cuda=launch,
    fake=lambda x_TD: (torch.empty_like(x_TD), torch.empty_like(x_TD)),
    reference=reference,
)


class ResidualRMSNorm(GraphPass):
    name = "residual_rms_norm"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of RMSNorms whose input is a sum of two hidden states [T, D]: one match each."""
        return sum(map(is_sum, scaled_by_roots(graph)))

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, aten.rsqrt.default, _rewrite)


def _rewrite(graph: fx.Graph, rsqrt: fx.Node) -> list[Replacement] | str | None:
    """Fuse the RMSNorm that this rsqrt belongs to with the addition before it, and return the replacements.

    Returns the reason if the pattern does not match, or None if the rsqrt belongs to no norm of a sum.
    """
    scaled: Any = user_through_cast(rsqrt)
    if not is_call(scaled, aten.mul.Tensor):
        return None
    total = through_cast(other_factor(scaled, rsqrt))
    if not (is_call(total, aten.add.Tensor) and total.meta["val"].dim() == 2):
        return None
    product: Any = user_through_cast(scaled)
    value: Any = None if product is None else rounded(product)
    norm = norm_of(value)
    if norm is None:
        return why_no_norm(value) or "no multiplication with a weight follows"
    left, right = total.args[:2]
    if not all(isinstance(a, fx.Node) and a.meta["val"].shape == total.meta["val"].shape for a in (left, right)):
        return "the addends differ in shape"
    if total.kwargs or any(a.meta["val"].dtype != total.meta["val"].dtype for a in (left, right)):
        return "the addends are scaled or differ in dtype"
    # The residual was computed before the branch's result, in whichever order the code adds them.
    residual, x = sorted((left, right))
    x, residual, inner_weight = _with_inner_norm(total, x, residual, norm)
    with graph.inserting_after(total):
        fused = emit(graph, residual_rms_norm, x, residual, norm.weight, *norm.how, inner_weight)
    with graph.inserting_after(fused):
        new_total = emit_item(graph, fused, 1)
    with graph.inserting_after(fused):
        normed = emit_item(graph, fused, 0)
    replacements = [Replacement(total.name, new_total), Replacement(value.name, normed)]
    value.replace_all_uses_with(normed)
    total.replace_all_uses_with(new_total)
    return replacements


def _with_inner_norm(
    total: fx.Node, x: fx.Node, residual: fx.Node, norm: Norm
) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Return the operands (x, residual, inner weight) of the fused op for the addition `total` = x + residual.

    If an addend is itself an RMSNorm with the eps, offset and rounding of `norm` and no other reader, the kernel
    computes it: x is then the input of that RMSNorm, and the inner weight its weight. Otherwise the inner weight is
    None.
    """
    for normed, other in ((x, residual), (residual, x)):
        inner = norm_of(normed)
        if inner is not None and not inner.centred and only_user(normed) is total and inner.how == norm.how:
            return inner.x, other, inner.weight
    return x, residual, None
