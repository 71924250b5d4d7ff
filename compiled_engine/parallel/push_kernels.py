"""Triton kernels that exchange rows through a PushBuffer, with flags or with tagged words.

A tagged sum is the sum over ranks, residual add and RMSNorm of a few bfloat16 rows. A 64-bit word holds two elements
and the slot's epoch, counted for tagged exchanges alone. A word arrives as a whole, so a rank that sees the epoch has
the elements, without waiting for a flag and the fence before it. This doubles the bytes, so it is only for few rows.
NCCL's low-latency protocol works the same way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.parallel.group import PushBuffer


@triton.jit
def exchange_flags(
    addresses_ptr: tl.tensor, slot: tl.tensor, rank: tl.tensor, num_ranks: tl.tensor, epoch: tl.tensor
) -> tl.tensor:
    """Raise this rank's flag for the slot to `epoch` in all buffers, and wait for the flags of all ranks.

    slot: index of the exchanged row in the batch. epoch: number of this exchange through the slot (group.py explains
    both). Returns the address of this rank's memory, which then holds the rows of all ranks. Loads of these rows must
    bypass the L1 cache, which does not see peers' writes.
    """
    tl.debug_barrier()  # the rows of all threads are written before one raises the flags
    for peer in range(num_ranks):
        raise_flag(addresses_ptr, peer, slot, rank, num_ranks, epoch)
    own_address = tl.load(addresses_ptr + rank)
    for peer in range(num_ranks):
        await_flag(own_address, peer, slot, num_ranks, epoch)
    tl.debug_barrier()
    return own_address


@triton.jit
def raise_flag(
    addresses_ptr: tl.tensor,
    peer: tl.tensor,
    slot: tl.tensor,
    rank: tl.tensor,
    num_ranks: tl.tensor,
    epoch: tl.tensor,
) -> None:
    """Raise this rank's flag for the slot to `epoch` in a peer's memory; see exchange_flags for the arguments.

    The caller must put a barrier before the call, so that all threads have written their rows.
    """
    flags_ptr = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags_ptr + slot * num_ranks + rank, epoch, sem="release", scope="sys")


@triton.jit
def await_flag(
    own_address: tl.tensor, peer: tl.tensor, slot: tl.tensor, num_ranks: tl.tensor, epoch: tl.tensor
) -> None:
    """Wait until a peer's flag for the slot, in this rank's memory, has reached `epoch`; see exchange_flags.

    The caller must put a barrier after the call, before threads read the peer's row.
    """
    flags_ptr = own_address.to(tl.pointer_type(tl.int32)) + slot * num_ranks
    while tl.atomic_add(flags_ptr + peer, 0, sem="acquire", scope="sys") - epoch < 0:
        pass


# The type in which x, residual, weight and results are read and written: two elements.
WORD = torch.int32


@quick_launches
@triton.jit(do_not_specialize=["eps", "rank", "num_ranks", "num_slots", "data_offset"])
def tagged_sum_kernel(
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
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Sum x over ranks, exchanged in words that contain the epoch, and add the residual; write the sum and its RMSNorm.

    Program (token) handles one row.

    x_ptr, residual_ptr, normed_ptr, sum_ptr: int32 [T, W], words of two bfloat16; weight_ptr: int32 [W]. addresses_ptr,
    epochs_ptr, num_slots, data_offset: the PushBuffer's addresses, tagged_epochs, num_tagged_slots and tagged_offset.
    The token's index is also its slot in the PushBuffer.
    """
    slot = tl.program_id(0)
    start = slot.to(tl.int64) * W
    column_W = tl.arange(0, BLOCK_W)
    inside_W = column_W < W
    weight_W = tl.load(weight_ptr + column_W, inside_W, other=0)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    epoch = tl.load(epochs_ptr + slot) + 1
    first_row = ((epoch & 1) * num_slots + slot).to(tl.int64) * num_ranks
    x_W = tl.load(x_ptr + start + column_W, inside_W, other=0)
    residual_W = tl.load(residual_ptr + start + column_W, inside_W, other=0)
    tagged_W = (x_W.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
    for peer in range(num_ranks):
        rows_ptr = (tl.load(addresses_ptr + peer) + data_offset).to(tl.pointer_type(tl.int64))
        row_ptr = tl.multiple_of(rows_ptr + (first_row + rank) * W, 16)
        tl.store(row_ptr + column_W, tagged_W, column_W < tl.where(peer == rank, 0, W))
    own_ptr = (tl.load(addresses_ptr + rank) + data_offset).to(tl.pointer_type(tl.int64)) + first_row * W
    even_W = tl.zeros((BLOCK_W,), tl.float32)
    odd_W = tl.zeros((BLOCK_W,), tl.float32)
    for peer in range(num_ranks):  # in the same order on all ranks
        part_W = x_W
        if peer != rank:
            part_W = _awaited(tl.multiple_of(own_ptr + peer * W, 16) + column_W, inside_W, epoch)
        even_W += _even(part_W)
        odd_W += _odd(part_W)
    even_W = _rounded(_rounded(even_W) + _even(residual_W))
    odd_W = _rounded(_rounded(odd_W) + _odd(residual_W))
    tl.store(sum_ptr + start + column_W, _word(even_W, odd_W), inside_W)
    scale = tl.rsqrt(tl.sum(even_W * even_W + odd_W * odd_W, 0) / (2 * W) + eps)
    even_W = _rounded(even_W * scale) * _even(weight_W)
    odd_W = _rounded(odd_W * scale) * _odd(weight_W)
    tl.store(normed_ptr + start + column_W, _word(even_W, odd_W), inside_W)
    tl.store(epochs_ptr + slot, epoch)


@triton.jit
def _awaited(row_ptr_W: tl.tensor, inside_W: tl.tensor, epoch: tl.tensor) -> tl.tensor:
    """Wait until all words of a peer's row have this epoch. Return their elements: int32, two bfloat16 each."""
    found_W = tl.load(row_ptr_W, inside_W, other=0, volatile=True)
    while tl.max((inside_W & ((found_W >> 32).to(tl.int32) != epoch)).to(tl.int32), 0) != 0:
        found_W = tl.load(row_ptr_W, inside_W, other=0, volatile=True)
    return found_W.to(tl.int32)


@triton.jit
def _even(word_W: tl.tensor) -> tl.tensor:
    return (word_W << 16).to(tl.float32, bitcast=True)


@triton.jit
def _odd(word_W: tl.tensor) -> tl.tensor:
    return (word_W & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(values_W: tl.tensor) -> tl.tensor:
    return values_W.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _word(even_W: tl.tensor, odd_W: tl.tensor) -> tl.tensor:
    """Return two fp32 elements packed into an int32 word, each rounded to bfloat16."""
    even_W = even_W.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return even_W | (odd_W.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


def tagged_sum(
    pushed: PushBuffer, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of the sum, and the sum: x summed over ranks, plus the residual.

    pushed.tags(x_TD) must be true. All ranks launch the kernel, tagged_sum_kernel, together. x_TD, residual_TD:
    bfloat16, contiguous.
    """
    normed_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    num_tokens, hidden_size = x_TD.shape
    block = next_power_of_2(hidden_size // 2)
    tagged_sum_kernel[(num_tokens,)](
        *(each.view(WORD) for each in (x_TD, residual_TD, weight_D, normed_TD, total_TD)),
        pushed.addresses,
        pushed.tagged_epochs,
        pushed.rank,
        pushed.num_ranks,
        pushed.num_tagged_slots,
        pushed.tagged_offset,
        eps,
        W=hidden_size // 2,
        BLOCK_W=block,
        num_warps=max(1, min(16, block // 256)),
        **dependent_launch(x_TD.device),
    )
    return normed_TD, total_TD
