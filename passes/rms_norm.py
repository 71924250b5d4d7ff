"""RMSNorm of a value that is not a residual sum becomes one kernel: a model's first norm, and what others have left.

Why: it is one read and one write of the hidden state. Without the pass Inductor makes the same of it; with it no
pointwise op is left in the first piece, which then needs no compiling.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import fx
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.block_sizes import next_power_of_2
from compiled_engine.kernels.dependent_launch import dependent_launch
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.graph_inputs import is_parameter
from compiled_engine.passes.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.matching import arg, aten, emit, factors, is_call, rewrite_calls, through_cast
from compiled_engine.passes.op_library import define_op
from compiled_engine.passes.structure import Structure


@quick_launches
@triton.jit(do_not_specialize=["x_stride", "eps"])
def rms_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (token): RMSNorm(x) * weight of one row, rounded where the textbook rounds."""
    column_K = tl.arange(0, BLOCK_K)
    mask_K = column_K < K
    weight_K = tl.load(weight_ptr + column_K, mask=mask_K, other=0.0).to(tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    x_K = tl.load(x_ptr + token * x_stride + column_K, mask=mask_K, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_K * x_K, 0) / K + eps)
    normed_K = (x_K * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token * K + column_K, (normed_K * weight_K).to(out_ptr.dtype.element_ty), mask=mask_K)


def reference(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm(x) * weight over the last dimension of x, the norm in fp32 as the models compute it."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * normed.to(x.dtype)


def launch(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """The kernel behind `reference`; rows of consecutive elements."""
    num_tokens, hidden_size = x_TD.shape
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    block = next_power_of_2(hidden_size)
    rms_norm_kernel[(num_tokens,)](
        x_TD,
        weight_D,
        out_TD,
        x_TD.stride()[0],
        eps,
        K=hidden_size,
        BLOCK_K=block,
        num_warps=max(1, min(8, block // 512)),
        **dependent_launch(x_TD.device),
    )
    return out_TD


def _fake(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format)


rms_norm = define_op(
    "rms_norm(Tensor x_TD, Tensor weight_D, float eps) -> Tensor", cpu=reference, cuda=launch, fake=_fake
)


class RMSNorm(GraphPass):
    name = "rms_norm"

    def contract(self, structure: Structure, compile_range: CompileRange) -> int:
        return structure.norms

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, aten.mul.Tensor, _rewrite)


def _rewrite(graph: fx.Graph, product: fx.Node) -> list[Replacement] | str | None:
    found = match_rms_norm(product) if product.meta["val"].dim() == 2 else None
    if found is None or isinstance(found, str):
        return found
    with graph.inserting_before(product):
        fused = emit(graph, rms_norm, *found)
    product.replace_all_uses_with(fused)
    return [Replacement(product.name, fused)]


def match_rms_norm(value: fx.Node) -> tuple[fx.Node, fx.Node, float] | str | None:
    """(x, weight, eps) of RMSNorm(x) * weight as the models compute it; why it is another norm; None for no norm."""
    found = [
        (weight, scaled, wide, rsqrt)
        for weight, scaled in factors(through_cast(value))
        for wide, rsqrt in factors(through_cast(scaled))
        if is_call(rsqrt, aten.rsqrt.default)
    ]
    if not found:
        return None
    weight, scaled, wide, rsqrt = found[0]
    x = through_cast(wide)
    size, dtype = x.meta["val"].shape[-1], x.meta["val"].dtype
    eps = _eps(rsqrt, wide)
    if eps is None:
        return "its norm is not over the mean of its squares plus a constant"
    if wide.meta["val"].dtype != torch.float32 or scaled.meta["val"].dtype != dtype:
        return "its norm is not computed in fp32 and rounded before the weight"
    if not is_parameter(weight) or weight.meta["val"].dtype != dtype or weight.meta["val"].shape != (size,):
        return "the weight of its norm is not a parameter of its dtype with an element for each of the last dimension"
    return x, weight, eps


def _eps(rsqrt: fx.Node, wide: fx.Node) -> float | None:
    """eps of rsqrt(mean(wide ** 2) + eps) over the last dimension."""
    shifted: Any = arg(rsqrt, 0)
    if not is_call(shifted, aten.add.Tensor) or shifted.kwargs or not isinstance(shifted.args[1], float):
        return None
    mean, eps = shifted.args
    if not is_call(mean, aten.mean.dim) or mean.kwargs or mean.args[1:] != ([-1], True):
        return None
    return eps if is_call(mean.args[0], aten.pow.Tensor_Scalar) and mean.args[0].args == (wide, 2) else None
