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
        flags_ptr = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags_ptr + slot * num_ranks + rank, epoch, sem="release", scope="sys")
    own_address = tl.load(addresses_ptr + rank)
    flags_ptr = own_address.to(tl.pointer_type(tl.int32)) + slot * num_ranks
    for peer in range(num_ranks):
        while tl.atomic_add(flags_ptr + peer, 0, sem="acquire", scope="sys") - epoch < 0:
            pass
    tl.debug_barrier()
    return own_address
