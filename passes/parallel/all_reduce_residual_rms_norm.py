"""Fuses three ops after a sharded linear into one kernel: the all-reduce, the residual add and the RMSNorm.

Why: in decode steps each of the three costs little more than its launch, and synchronisation dominates the all-reduce.
Each rank writes its rows into the other ranks' memory, waits for their rows, and adds them in registers. Small batches
are sent by `tagged_sum` instead. Large batches on more than two ranks keep the two-step all-reduce, which moves fewer
bytes, and the kernel of residual_rms_norm. The pass runs before small_batch_linear, which would otherwise absorb the
norm.
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
from compiled_engine.parallel.group import TAGGED_SLOTS, PushBuffer, current_group
from compiled_engine.parallel.push_kernels import exchange_flags, tagged_sum
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import arg, emit_named, is_call, named, only_user, rewrite_calls
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.linear import round_inputs
from compiled_engine.passes.linear.round_inputs import store_rounded
from compiled_engine.passes.norm import residual_rms_norm
from compiled_engine.passes.norm.norms import has_normed_addend, is_sum, scaled_by_roots
from compiled_engine.passes.parallel.tensor_parallel import all_reduce


@quick_launches
@triton.jit(do_not_specialize=["eps", "rank", "num_ranks", "num_slots", "data_offset"])
def all_reduce_residual_rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    rank: tl.tensor,
    num_ranks: tl.tensor,
    num_slots: tl.tensor,
    data_offset: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    static_ptr: tl.tensor = None,
    scales_ptr: tl.tensor = None,
    scale_stride: tl.tensor = 0,
    COLUMNS: tl.constexpr = 0,
    GROUPS: tl.constexpr = 0,
    LARGEST: tl.constexpr = 0.0,
    SMALLEST: tl.constexpr = 0.0,
) -> None:
    """All-reduce x, add the residual, and write this sum and its RMSNorm. Program (token) computes one row of both.

    A program writes this rank's row to the other ranks' buffers, waits for their rows, and adds the rows of all ranks
    in the order of the ranks, so that every rank gets the same bits. All ranks launch the kernel together.

    x_ptr: [T, D], this rank's summand; residual_ptr, normed_ptr, sum_ptr: [T, D]; weight_ptr: [D].
    addresses_ptr, epochs_ptr, rank, num_ranks, num_slots, data_offset: fields of PushBuffer; a token's index is its
        slot there.
    scales_ptr: None: normed_ptr receives the norm. Otherwise the norm is quantised: normed_ptr receives codes, and
        scales_ptr their scales. static_ptr and the arguments after scales_ptr are then those of
        round_inputs.store_rounded.
    """
    slot = tl.program_id(0)
    start = slot.to(tl.int64) * D
    column_D = tl.arange(0, BLOCK_D)
    inside_D = column_D < D
    weight_D = tl.load(weight_ptr + column_D, inside_D, other=0.0).to(tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    epoch = tl.load(epochs_ptr + slot) + 1
    first_row = ((epoch & 1) * num_slots + slot).to(tl.int64) * num_ranks
    x_D = tl.load(x_ptr + start + column_D, inside_D, other=0.0)
    residual_D = tl.load(residual_ptr + start + column_D, inside_D, other=0.0).to(tl.float32)
    for peer in range(num_ranks):
        rows_ptr = (tl.load(addresses_ptr + peer) + data_offset).to(tl.pointer_type(x_ptr.dtype.element_ty))
        row_ptr = tl.multiple_of(rows_ptr + (first_row + rank) * D, 16)
        tl.store(row_ptr + column_D, x_D, column_D < tl.where(peer == rank, 0, D))
    own_address = exchange_flags(addresses_ptr, slot, rank, num_ranks, epoch)
    rows_ptr = (own_address + data_offset).to(tl.pointer_type(x_ptr.dtype.element_ty)) + first_row * D
    reduced_D = tl.zeros((BLOCK_D,), tl.float32)
    for peer in range(num_ranks):
        row_ptr = tl.multiple_of(rows_ptr + peer * D, 16)
        others_D = column_D < tl.where(peer == rank, 0, D)
        row_D = tl.load(row_ptr + column_D, others_D, other=0.0, cache_modifier=".cg")
        reduced_D += tl.where(peer == rank, x_D, row_D).to(tl.float32)  # in the same order on all ranks
    reduced_D = reduced_D.to(x_ptr.dtype.element_ty).to(tl.float32)
    total_D = (reduced_D + residual_D).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + start + column_D, total_D, inside_D)
    total_D = total_D.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total_D * total_D, 0) / D + eps)
    dtype: tl.constexpr = sum_ptr.dtype.element_ty
    normed_D = ((total_D * scale).to(dtype).to(tl.float32) * weight_D).to(dtype)
    if scales_ptr is not None:
        row, token = normed_D.to(tl.float32), slot.to(tl.int64)
        store_rounded(
            row,
            static_ptr,
            None,
            normed_ptr,
            scales_ptr,
            token,
            scale_stride,
            0,
            D,
            COLUMNS,
            GROUPS,
            LARGEST,
            SMALLEST,
        )
    else:
        tl.store(normed_ptr + start + column_D, normed_D, inside_D)
    tl.store(epochs_ptr + slot, epoch)


def reference(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (RMSNorm(total) * weight, total), [T, D] each. total: the sum of x over all ranks, plus the residual."""
    return residual_rms_norm.reference(all_reduce(x_TD), residual_TD, weight_D, eps)


def launch(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-reduce x, add the residual, and return the RMSNorm of the sum and the sum, [T, D] each; see `reference`.

    One kernel computes both if x fits into the group's push buffer. Otherwise the group's all-reduce runs first, then
    the kernel of residual_rms_norm.
    """
    pushed = current_group().pushed
    if pushed is not None and pushed.takes(x_TD):
        return push(pushed, x_TD, residual_TD, weight_D, eps)
    return residual_rms_norm.launch(current_group().all_reduce(x_TD), residual_TD, weight_D, eps)


def push(
    pushed: PushBuffer, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of the all-reduced x plus the residual, and this sum, by one kernel that exchanges rows.

    All ranks call this function together, with the same number of tokens. pushed: the group's push buffer.
    """
    x_TD, residual_TD = x_TD.contiguous(), residual_TD.contiguous()
    if pushed.tags(x_TD) and x_TD.dtype == residual_TD.dtype == weight_D.dtype:
        return tagged_sum(pushed, x_TD, residual_TD, weight_D, eps)
    normed_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    _launch(pushed, x_TD, residual_TD, weight_D, eps, normed_TD, total_TD)
    return normed_TD, total_TD


def _launch(
    pushed: PushBuffer,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    normed_TD: torch.Tensor,
    total_TD: torch.Tensor,
    **rounding: Any,
) -> None:
    """Launch the kernel, which writes normed_TD and total_TD.

    rounding: the kernel's keyword arguments from static_ptr on, to write codes to normed_TD; empty: write the norm.
    """
    num_tokens, hidden_size = x_TD.shape
    block = next_power_of_2(hidden_size)
    all_reduce_residual_rms_norm_kernel[(num_tokens,)](
        x_TD,
        residual_TD,
        weight_D,
        normed_TD,
        total_TD,
        pushed.addresses,
        pushed.epochs,
        pushed.rank,
        pushed.num_ranks,
        pushed.num_slots,
        pushed.data_offset,
        eps,
        D=hidden_size,
        BLOCK_D=block,
        num_warps=max(1, min(16, block // 512)),
        **rounding,
        **dependent_launch(x_TD.device),
    )


all_reduce_residual_rms_norm = define_op(
    "all_reduce_residual_rms_norm(Tensor x_TD, Tensor residual_TD, Tensor weight_D, float eps) -> (Tensor, Tensor)",
    cpu=reference,
    cuda=launch,
    fake=lambda x_TD: (torch.empty_like(x_TD), torch.empty_like(x_TD)),
    reference=reference,
)


def rounded_reference(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    static_1: torch.Tensor | None,
    rounding: str,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of the all-reduced x plus the residual as codes [T, D] and scales [C, T], and the sum [T, D].

    static_1: a scale from the checkpoint; None: compute scales from each row. rounding: the text form of a Rounding.
    """
    return round_inputs.sum_reference(all_reduce(x_TD), residual_TD, weight_D, static_1, rounding, eps)


def rounded_launch(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    static_1: torch.Tensor | None,
    rounding: str,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the all-reduced sum's norm as codes and scales, and the sum; see `rounded_reference`.

    One kernel computes them if the group has a push buffer with room for x, and if the kernel can round to this format.
    Otherwise the group's all-reduce runs first, then `round_inputs.sum_launch`.
    """
    pushed, parsed = current_group().pushed, round_inputs.rounding_of(rounding)
    by_kernel = round_inputs.why_not_by_kernel(x_TD.shape[1], parsed, x_TD.device) is None
    if by_kernel and pushed is not None and pushed.takes(x_TD):
        return push_rounded(pushed, x_TD, residual_TD, weight_D, static_1, rounding, eps)
    return round_inputs.sum_launch(current_group().all_reduce(x_TD), residual_TD, weight_D, static_1, rounding, eps)


def push_rounded(
    pushed: PushBuffer,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    static_1: torch.Tensor | None,
    rounding: str,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of `rounded_reference`: codes, scales and the sum. One kernel exchanges the rows.

    All ranks call this function together, with the same number of tokens. Unlike `push`, this function never uses
    `tagged_sum`.
    """
    x_TD, residual_TD = x_TD.contiguous(), residual_TD.contiguous()
    num_tokens, hidden_size = x_TD.shape
    parsed = round_inputs.rounding_of(rounding)
    codes_TD, scales_CT, constants = round_inputs.results_for(num_tokens, hidden_size, parsed, x_TD.device)
    total_TD = torch.empty_like(x_TD)
    given = {name: constants[name] for name in ("COLUMNS", "GROUPS", "LARGEST", "SMALLEST")}
    given |= {"static_ptr": static_1, "scales_ptr": scales_CT, "scale_stride": scales_CT.stride(0)}
    _launch(pushed, x_TD, residual_TD, weight_D, eps, codes_TD, total_TD, **given)
    return codes_TD, scales_CT, total_TD


all_reduce_residual_rms_norm_rounded = define_op(
    "all_reduce_residual_rms_norm_rounded(Tensor x_TD, Tensor residual_TD, Tensor weight_D, Tensor? static_1, "
    "str rounding, float eps) -> (Tensor, Tensor, Tensor)",
    cpu=rounded_reference,
    cuda=rounded_launch,
    fake=round_inputs.fake_sum,
)


class AllReduceResidualRMSNorm(GraphPass):
    name = "all_reduce_residual_rms_norm"
    requires = ("tensor_parallel", "residual_rms_norm")
    kernel_token_counts = (TAGGED_SLOTS,)

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of RMSNorms of a sum of two hidden states [T, D] that are not normed: one match each."""
        sums = filter(is_sum, scaled_by_roots(graph))
        return sum(1 for total in sums if not has_normed_addend(total))

    def run(self, graph: fx.Graph) -> PassResult:
        graph.eliminate_dead_code()
        return rewrite_calls(graph, torch.ops.compiled_engine.residual_rms_norm.default, _rewrite)


def _rewrite(graph: fx.Graph, norm: fx.Node) -> list[Replacement] | str | None:
    arguments = named(norm)
    x, residual = arguments["x_TD"], arguments["residual_TD"]
    if not is_call(x, all_reduce):
        x, residual = residual, x
    if not is_call(x, all_reduce):
        return None
    if only_user(x) is not norm:
        return "something else reads the sum"
    if arguments["inner_weight_D"] is not None:
        return None  # the reduced value is normed before the residual add
    if arguments["offset"] or arguments["wide"]:
        return "the norm has an offset"
    with graph.inserting_before(norm):
        arguments |= {"x_TD": arg(x, 0), "residual_TD": residual}
        fused = emit_named(graph, all_reduce_residual_rms_norm, arguments)
    items: list[Any] = list(norm.users)
    norm.replace_all_uses_with(fused)
    return [Replacement(item.name, item) for item in items]
