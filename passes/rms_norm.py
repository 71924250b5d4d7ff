"""RMSNorm of a value that is not a residual sum becomes one kernel: a model's first norm, and what others have left.

Why: it is one read and one write of the hidden state. Without the pass Inductor makes the same of it; with it no
pointwise op is left in the first piece, which then needs no compiling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from compiled_engine.passes.matching import arg, aten, emit, factors, is_call, only_user, rewrite_calls, through_cast
from compiled_engine.passes.op_library import define_op
from compiled_engine.passes.structure import Structure


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
    """RMSNorm(x) * (weight + OFFSET) of a row in fp32, rounded to the dtype before the product unless WIDE."""
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
    """Program (token): RMSNorm(x) * weight of one row, rounded where the model rounds."""
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
    """RMSNorm(x) * (offset + weight) over the last dimension of x, the norm in fp32 as the models compute it.

    wide: the product with the weight is in fp32 too, and rounded after it (Gemma), else before it (Llama).
    """
    x_fp32 = x.float()
    normed = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    if wide:
        return (normed * (weight_D.float() + offset)).to(x.dtype)
    return (weight_D + offset if offset else weight_D) * normed.to(x.dtype)


def launch(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float = 0.0, wide: bool = False
) -> torch.Tensor:
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
        OFFSET=offset,
        WIDE=wide,
        num_warps=max(1, min(8, block // 512)),
        **dependent_launch(x_TD.device),
    )
    return out_TD


def _fake(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float = 0.0, wide: bool = False
) -> torch.Tensor:
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format)


rms_norm = define_op(
    "rms_norm(Tensor x_TD, Tensor weight_D, float eps, float offset=0.0, bool wide=False) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=_fake,
)


class RMSNorm(GraphPass):
    name = "rms_norm"

    def contract(self, structure: Structure, compile_range: CompileRange) -> int:
        return structure.norms

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, aten.mul.Tensor, _rewrite)


class Norm(NamedTuple):
    """RMSNorm(x) * (offset + weight); wide: see `reference`. The arguments of the op."""

    x: fx.Node
    weight: fx.Node
    eps: float
    offset: float
    wide: bool


def _rewrite(graph: fx.Graph, product: fx.Node) -> list[Replacement] | str | None:
    value = rounded(product)
    found = match_rms_norm(value) if value.meta["val"].dim() == 2 else None
    if found is None or isinstance(found, str):
        return found
    with graph.inserting_before(value):
        fused = emit(graph, rms_norm, *found)
    value.replace_all_uses_with(fused)
    return [Replacement(value.name, fused)]


def rounded(product: fx.Node) -> fx.Node:
    """What a product is rounded to before anybody reads it; the product itself if it is not."""
    user = only_user(product)
    return user if user is not None and through_cast(user) is product else product


def match_rms_norm(value: fx.Node) -> Norm | str | None:
    """RMSNorm(x) * weight as the models compute it; why it is another norm; None for no norm."""
    product = through_cast(value)
    found = [
        (weight, scaled, wide, rsqrt)
        for weight, scaled in factors(product)
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
    in_fp32 = scaled.meta["val"].dtype == product.meta["val"].dtype == torch.float32 != dtype
    if wide.meta["val"].dtype != torch.float32 or not (in_fp32 or scaled.meta["val"].dtype == dtype):
        return "its norm is not computed in fp32 and rounded before or after the weight"
    if value.meta["val"].dtype != dtype:
        return f"its norm is not rounded to the {dtype} of its input"
    parameter, offset = _weight_and_offset(weight)
    if offset and weight.meta["val"].dtype != torch.float32:
        return "the weight of its norm plus a constant is rounded"
    is_vector = is_parameter(parameter) and parameter.meta["val"].shape == (size,)
    if not is_vector or parameter.meta["val"].dtype not in ((dtype, torch.float32) if in_fp32 else (dtype,)):
        return "the weight of its norm is not a parameter of its dtype with an element for each of the last dimension"
    # In a model of fp32 nothing is rounded; Gemma's norm is the same op there.
    return Norm(x, parameter, eps, offset, in_fp32)


def _weight_and_offset(weight: fx.Node) -> tuple[fx.Node, float]:
    """(w, c) of w + c, w maybe converted; c is 0 where nothing is added."""
    if is_call(weight, aten.add.Tensor) and not weight.kwargs and isinstance(weight.args[1], int | float):
        return through_cast(weight.args[0]), float(weight.args[1])
    return through_cast(weight), 0.0


def _eps(rsqrt: fx.Node, wide: fx.Node) -> float | None:
    """eps of rsqrt(mean(wide ** 2) + eps) over the last dimension."""
    shifted: Any = arg(rsqrt, 0)
    if not is_call(shifted, aten.add.Tensor) or shifted.kwargs or not isinstance(shifted.args[1], float):
        return None
    mean, eps = shifted.args
    if not is_call(mean, aten.mean.dim) or mean.kwargs or mean.args[1:] != ([-1], True):
        return None
    return eps if is_call(mean.args[0], aten.pow.Tensor_Scalar) and mean.args[0].args == (wide, 2) else None
