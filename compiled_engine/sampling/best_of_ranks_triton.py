"""The best token of each row over all ranks as one Triton kernel, which pushes a key into the others' memory and waits.

It follows block_best_kernel in place of row_best_kernel. Where the group has no memory for that, or not enough, the
keys are gathered instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.block_sizes import next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.parallel.group import Group, PushBuffer
from compiled_engine.parallel.push_kernels import exchange_flags
from compiled_engine.sampling.no_token import NOT_A_NUMBER, NOTHING_ALLOWED
from compiled_engine.sampling.ranks import keys_of, tokens_of

_NOT_A_NUMBER = tl.constexpr(NOT_A_NUMBER)
_NOTHING_ALLOWED = tl.constexpr(NOTHING_ALLOWED)
_SIGN_MASK = tl.constexpr(2**31 - 1)


@quick_launches
@triton.jit(
    do_not_specialize=["rank", "num_ranks", "num_slots", "data_offset", "row_bytes"],
    do_not_specialize_on_alignment=["row_index_ptr", "token_ids_ptr"],
)
def best_of_ranks_kernel(
    best_score_ptr: tl.tensor,
    best_token_ptr: tl.tensor,
    row_index_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    rank: tl.tensor,
    num_ranks: tl.tensor,
    num_slots: tl.tensor,
    data_offset: tl.tensor,
    row_bytes: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    TILE_B: tl.constexpr,
) -> None:
    """Program (logits row), which is the slot of a PushBuffer. The key orders as ranks.keys_of has it."""
    slot = tl.program_id(0)
    is_row = tl.load(row_index_ptr + slot) >= 0
    blocks = tl.arange(0, TILE_B)
    first_block = slot.to(tl.int64) * NUM_BLOCKS
    in_row = blocks < tl.where(is_row, NUM_BLOCKS, 0)
    scores = tl.load(best_score_ptr + first_block + blocks, in_row, other=-float("inf"))
    score, best = tl.max(scores, axis=0, return_indices=True)
    token_id = tl.load(best_token_ptr + first_block + best)  # of padding anything, and nobody reads it
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ _SIGN_MASK, bits)
    key = (ordered.to(tl.int64) << 32) | (token_id ^ _SIGN_MASK).to(tl.int64)
    epoch = tl.load(epochs_ptr + slot) + 1
    first_row = ((epoch & 1) * num_slots + slot).to(tl.int64) * num_ranks
    for peer in range(num_ranks):
        row = tl.load(addresses_ptr + peer) + data_offset + (first_row + rank) * row_bytes
        tl.store(row.to(tl.pointer_type(tl.int64)), key)
    own_address = exchange_flags(addresses_ptr, slot, rank, num_ranks, epoch)
    for peer in range(num_ranks):
        row = own_address + data_offset + (first_row + peer) * row_bytes
        key = tl.maximum(key, tl.load(row.to(tl.pointer_type(tl.int64)), cache_modifier=".cg"))
    ordered = (key >> 32).to(tl.int32)
    score = tl.where(ordered < 0, ordered ^ _SIGN_MASK, ordered).to(tl.float32, bitcast=True)
    chosen = (key & _SIGN_MASK) ^ _SIGN_MASK
    chosen = tl.where(score == float("inf"), _NOT_A_NUMBER, chosen)
    chosen = tl.where(score == -float("inf"), _NOTHING_ALLOWED, chosen)
    tl.store(token_ids_ptr + slot, tl.where(is_row, chosen, 0))
    tl.store(epochs_ptr + slot, epoch)


def best_of_ranks(
    best_score_SB: torch.Tensor,
    best_token_SB: torch.Tensor,
    row_index_S: torch.Tensor,
    token_ids_S: torch.Tensor,
    group: Group,
) -> None:
    """Write the tokens that all ranks agree on, from what block_best_kernel has found in this rank's columns."""
    if group.pushed is not None and len(row_index_S) <= group.pushed.num_slots:
        push_best(best_score_SB, best_token_SB, row_index_S, token_ids_S, group.pushed)
        return
    keys_S1 = keys_of(best_score_SB, best_token_SB).amax(1, keepdim=True)
    token_ids_S.copy_(tokens_of(group.gather_columns(keys_S1).amax(1), row_index_S))


def push_best(
    best_score_SB: torch.Tensor,
    best_token_SB: torch.Tensor,
    row_index_S: torch.Tensor,
    token_ids_S: torch.Tensor,
    pushed: PushBuffer,
) -> None:
    """All ranks launch it together, each with as many rows."""
    num_samples, num_blocks = best_score_SB.shape
    best_of_ranks_kernel[(num_samples,)](
        best_score_SB,
        best_token_SB,
        row_index_S,
        token_ids_S,
        pushed.addresses,
        pushed.epochs,
        pushed.rank,
        pushed.num_ranks,
        pushed.num_slots,
        pushed.data_offset,
        pushed.row_bytes,
        NUM_BLOCKS=num_blocks,
        TILE_B=next_power_of_2(num_blocks),
    )
