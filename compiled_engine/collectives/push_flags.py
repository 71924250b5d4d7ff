"""What kernels that write into a PushBuffer do between writing a slot's rows and reading them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exchange_flags(
    addresses_ptr: tl.tensor, slot: tl.tensor, rank: tl.tensor, num_ranks: tl.tensor, epoch: tl.tensor
) -> tl.tensor:
    """Raise this rank's flag for the slot to `epoch` everywhere, and wait for the flags of all ranks.

    Returns the address of this rank's memory, where the rows of all are then. They are not to be read from the first
    cache, which does not see what others write.
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
    """This rank's for the slot, in a peer's memory. A barrier comes before: all threads have written their rows."""
    flags_ptr = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags_ptr + slot * num_ranks + rank, epoch, sem="release", scope="sys")


@triton.jit
def await_flag(
    own_address: tl.tensor, peer: tl.tensor, slot: tl.tensor, num_ranks: tl.tensor, epoch: tl.tensor
) -> None:
    """A peer's for the slot, in this rank's memory. A barrier comes after, before any thread reads the peer's row."""
    flags_ptr = own_address.to(tl.pointer_type(tl.int32)) + slot * num_ranks
    while tl.atomic_add(flags_ptr + peer, 0, sem="acquire", scope="sys") - epoch < 0:
        pass
