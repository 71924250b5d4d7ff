"""Replaces each RMSNorm that is not fused with a residual add, such as a model's first norm, by one kernel.

Why: Inductor would generate an equivalent kernel. With the pass, the part of the graph before the first attention has
no pointwise op left, and needs no compilation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import fx
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import aten, emit, rewrite_calls
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.norm.norms import (
    has_normed_addend,
    is_deviation,
    is_sum,
    norm_of,
    rounded,
    scaled_by_roots,
    why_no_norm,
)


@triton.jit
def normed(
    x_K: tl.tensor,
    weight_K: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Return RMSNorm(x) * (weight + OFFSET) for one row, rounded to `dtype`.

    x_K, weight_K: fp32, K elements padded with zeros. WIDE: round only the product with the weight; otherwise round the
    norm too, before it is multiplied by the weight.
    """
    normed_K = x_K * tl.rsqrt(tl.sum(x_K * x_K, 0) / K + eps)
    if not WIDE:
        normed_K = normed_K.to(dtype).to(tl.float32)
    if OFFSET != 0:
        weight_K += OFFSET
    return (normed_K * weight_K).to(dtype)


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
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write RMSNorm(x) * (weight + OFFSET). Program (token) computes one row.

    x_ptr: [T, K], with consecutive rows x_stride elements apart. weight_ptr: [K]. out_ptr: [T, K], contiguous. OFFSET,
    WIDE: see `normed`. BLOCK_K: K rounded up to a power of two.
    """
    column_K = tl.arange(0, BLOCK_K)
    mask_K = column_K < K
    weight_K = tl.load(weight_ptr + column_K, mask=mask_K, other=0.0).to(tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    x_K = tl.load(x_ptr + token * x_stride + column_K, mask=mask_K, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + token * K + column_K,
        normed(x_K, weight_K, eps, K, OFFSET, WIDE, out_ptr.dtype.element_ty),
        mask=mask_K,
    )


def reference(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float = 0.0, wide: bool = False
) -> torch.Tensor:
    """Return RMSNorm(x) * (offset + weight) over the last dimension of x, in the dtype of x. The norm is in fp32.

    wide: multiply by the weight in fp32 and round the product, as Gemma does; otherwise round the norm and multiply in
    the dtype of x, as Llama does.
    """
    x_fp32 = x.float()
    normed = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    if wide:
        return (normed * (weight_D.float() + offset)).to(x.dtype)
    return (weight_D + offset if offset else weight_D) * normed.to(x.dtype)


def launch(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float = 0.0, wide: bool = False
) -> torch.Tensor:
    """Return RMSNorm(x) * (offset + weight), [T, D], by the kernel; see `reference`. The last stride of x must be 1."""
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
        OFFSET=offset,
        WIDE=wide,
        num_warps=max(1, min(8, block // 512)),
        **dependent_launch(x_TD.device),
    )
    return out_TD


rms_norm = define_op(
    "rms_norm(Tensor x_TD, Tensor weight_D, float eps, float offset=0.0, bool wide=False) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=lambda x_TD: torch.empty_like(x_TD, memory_format=torch.contiguous_format),
    reference=reference,
)


class RMSNorm(GraphPass):
    name = "rms_norm"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of RMSNorms over hidden states [T, D] that residual_rms_norm does not fuse: a match each.

        residual_rms_norm fuses norms of a sum, and norms of an addend of such a sum.
        """
        scaled = list(scaled_by_roots(graph))
        sums = list(filter(is_sum, scaled))
        inner = list(filter(has_normed_addend, sums))
        return len(scaled) - sum(map(is_deviation, scaled)) - len(sums) - len(inner)

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, aten.mul.Tensor, _rewrite)


def _rewrite(graph: fx.Graph, product: fx.Node) -> list[Replacement] | str | None:
    value = rounded(product)
    if value.meta["val"].dim() != 2:
        return None
    norm = norm_of(value)
    if norm is None or norm.centred:
        return why_no_norm(value)
    with graph.inserting_before(value):
        fused = emit(graph, rms_norm, norm.x, norm.weight, *norm.how)
    value.replace_all_uses_with(fused)
    return [Replacement(value.name, fused)]
