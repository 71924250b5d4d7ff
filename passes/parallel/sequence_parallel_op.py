"""Defines the op of sequence parallelism: all-reduce, residual add and RMSNorm, with tokens divided among the ranks.

Every rank gets the normed rows of all tokens, but the sums with the residual only for its own tokens. The next op of
this kind reads no other sums. If ranks can write to each other's memory, one kernel does all of this: each rank sends
its summand of a token's row to the rank that owns the token, and the owner sends back the normed row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.parallel.group import PushBuffer, current_group
from compiled_engine.parallel.push_kernels import await_flag, raise_flag
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.norm import residual_rms_norm, rms_norm
from compiled_engine.passes.parallel import all_reduce_residual_rms_norm

# With fewer tokens latency dominates, and exchanging whole rows takes one message less.
LEAST_TOKENS = 1024


@quick_launches
@triton.jit(do_not_specialize=["eps", "rank", "num_ranks", "num_slots", "data_offset"])
def sequence_parallel_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    inner_weight_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    rank: tl.tensor,
    num_ranks: tl.tensor,
    num_slots: tl.tensor,
    data_offset: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """All-reduce x, add the residual and norm the sum. Program (token) handles a row; rank token % num_ranks owns it.

    The owner adds the summands of all ranks and the residual, and writes the normed row to all ranks. Each other rank
    sends its summand to the owner and receives the normed row. All ranks launch the kernel together.

    x_ptr: [T, D], this rank's summand; normed_ptr: [T, D], written in all rows.
    residual_ptr, sum_ptr: [T, D], read and written only in the rows that this rank owns.
    weight_ptr: [D]. inner_weight_ptr: [D], the weight of an RMSNorm of the all-reduced row before the residual add;
        None: the row is added as it is. OFFSET, WIDE: see rms_norm.normed.
    addresses_ptr, epochs_ptr, rank, num_ranks, num_slots, data_offset: fields of PushBuffer; a token's index is its
        slot there.
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    slot = tl.program_id(0)
    owner = slot % num_ranks
    start = slot.to(tl.int64) * D
    column_D = tl.arange(0, BLOCK_D)
    inside_D = column_D < D
    epoch = tl.load(epochs_ptr + slot) + 1
    first_row = ((epoch & 1) * num_slots + slot).to(tl.int64) * num_ranks
    own_address = tl.load(addresses_ptr + rank)
    rows_ptr = (own_address + data_offset).to(tl.pointer_type(dtype)) + first_row * D
    x_D = tl.load(x_ptr + start + column_D, inside_D, other=0.0)
    if rank == owner:
        for peer in range(num_ranks):
            if peer != rank:
                await_flag(own_address, peer, slot, num_ranks, epoch)
        tl.debug_barrier()
        reduced_D = tl.zeros((BLOCK_D,), tl.float32)
        for peer in range(num_ranks):
            row_ptr = tl.multiple_of(rows_ptr + peer * D, 16)
            others_D = column_D < tl.where(peer == rank, 0, D)
            row_D = tl.load(row_ptr + column_D, others_D, other=0.0, cache_modifier=".cg")
            reduced_D += tl.where(peer == rank, x_D, row_D).to(tl.float32)
        reduced_D = reduced_D.to(dtype).to(tl.float32)
        if inner_weight_ptr is not None:
            inner_D = tl.load(inner_weight_ptr + column_D, inside_D, other=0.0).to(tl.float32)
            reduced_D = rms_norm.normed(reduced_D, inner_D, eps, D, OFFSET, WIDE, dtype).to(tl.float32)
        residual_D = tl.load(residual_ptr + start + column_D, inside_D, other=0.0).to(tl.float32)
        total_D = (reduced_D + residual_D).to(dtype)
        tl.store(sum_ptr + start + column_D, total_D, inside_D)
        weight_D = tl.load(weight_ptr + column_D, inside_D, other=0.0).to(tl.float32)
        normed_D = rms_norm.normed(total_D.to(tl.float32), weight_D, eps, D, OFFSET, WIDE, dtype)
        for peer in range(num_ranks):
            peers_ptr = (tl.load(addresses_ptr + peer) + data_offset).to(tl.pointer_type(dtype))
            row_ptr = tl.multiple_of(peers_ptr + (first_row + rank) * D, 16)
            tl.store(row_ptr + column_D, normed_D, column_D < tl.where(peer == rank, 0, D))
        tl.debug_barrier()  # the rows of all threads are written before one raises the flags
        for peer in range(num_ranks):
            if peer != rank:
                raise_flag(addresses_ptr, peer, slot, rank, num_ranks, epoch)
        tl.store(normed_ptr + start + column_D, normed_D, inside_D)
    else:
        owners_ptr = (tl.load(addresses_ptr + owner) + data_offset).to(tl.pointer_type(dtype))
        tl.store(tl.multiple_of(owners_ptr + (first_row + rank) * D, 16) + column_D, x_D, inside_D)
        tl.debug_barrier()
        raise_flag(addresses_ptr, owner, slot, rank, num_ranks, epoch)
        await_flag(own_address, owner, slot, num_ranks, epoch)
        tl.debug_barrier()
        row_ptr = tl.multiple_of(rows_ptr + owner * D, 16)
        normed_D = tl.load(row_ptr + column_D, inside_D, other=0.0, cache_modifier=".cg")
        tl.store(normed_ptr + start + column_D, normed_D, inside_D)
    tl.store(epochs_ptr + slot, epoch)


def reference(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    wide: bool = False,
    inner_weight_D: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the RMSNorm of total, total), [T, D] each. total: the sum of x over ranks, plus the residual.

    Only the rows that this rank owns are read from residual_TD. The second result is valid in these rows, and NaN in
    all others. For the other arguments see residual_rms_norm.reference.
    """
    group = current_group()
    rows, total_TD = group.rows(x_TD.shape[0]), torch.full_like(x_TD, torch.nan)
    normed_SD, total_TD[rows] = residual_rms_norm.reference(
        group.reduce_scatter(x_TD), residual_TD[rows], weight_D, eps, offset, wide, inner_weight_D
    )
    return group.gather_rows(normed_SD, x_TD.shape[0]), total_TD


def launch(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    wide: bool = False,
    inner_weight_D: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum over ranks plus the residual, and this sum, [T, D] each, computed on GPUs.

    For fewer than LEAST_TOKENS tokens, every rank computes all rows after an all-reduce, and the second result is valid
    in all rows. Otherwise a rank computes its own rows, and the second result is uninitialised in all others. One
    kernel does all of this if x fits into the group's push buffer. All ops of a step have the same number of tokens, so
    a rank owns the same rows in all of them. See `reference`.
    """
    group, num_tokens = current_group(), x_TD.shape[0]
    norm = weight_D, eps, offset, wide, inner_weight_D
    if num_tokens < LEAST_TOKENS:
        if inner_weight_D is None and not offset and not wide:
            return all_reduce_residual_rms_norm.launch(x_TD, residual_TD, weight_D, eps)
        return residual_rms_norm.launch(group.all_reduce(x_TD), residual_TD, *norm)
    if group.pushed is not None and group.pushed.takes(x_TD):
        return push(group.pushed, x_TD, residual_TD, *norm)
    rows, total_TD = group.rows(num_tokens), torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    normed_SD, total_TD[rows] = residual_rms_norm.launch(group.reduce_scatter(x_TD), residual_TD[rows], *norm)
    return group.gather_rows(normed_SD, num_tokens), total_TD


def push(
    pushed: PushBuffer,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    wide: bool = False,
    inner_weight_D: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum over ranks plus the residual, and this sum, by one kernel on all ranks together.

    Rank r owns rows r, r + num_ranks, r + 2 * num_ranks, ... Other rows of the second result are uninitialised.
    pushed: the group's push buffer. For the other arguments see residual_rms_norm.reference.
    """
    x_TD, residual_TD = x_TD.contiguous(), residual_TD.contiguous()
    normed_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    num_tokens, hidden_size = x_TD.shape
    block = next_power_of_2(hidden_size)
    sequence_parallel_kernel[(num_tokens,)](
        x_TD,
        residual_TD,
        weight_D,
        normed_TD,
        total_TD,
        inner_weight_D,
        pushed.addresses,
        pushed.epochs,
        pushed.rank,
        pushed.num_ranks,
        pushed.num_slots,
        pushed.data_offset,
        eps,
        D=hidden_size,
        BLOCK_D=block,
        OFFSET=offset,
        WIDE=wide,
        num_warps=max(1, min(16, block // 512)),
        **dependent_launch(x_TD.device),
    )
    return normed_TD, total_TD


sequence_parallel_norm = define_op(
    "sequence_parallel_norm(Tensor x_TD, Tensor residual_TD, Tensor weight_D, float eps, float offset=0.0, "
    "bool wide=False, Tensor? inner_weight_D=None) -> (Tensor, Tensor)",
    cpu=reference,
    cuda=launch,
    fake=lambda x_TD: (torch.empty_like(x_TD), torch.empty_like(x_TD)),
)
