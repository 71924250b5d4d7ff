"""Gumbel-max sampling as Triton kernels: the best token of each vocabulary block, then of the row, then of all ranks.

Greedy rows take the same path without noise, so one launch serves mixed batches. Tokens agree with gumbel.py: the hash
is bit-identical, the noise except for the last bits of the logarithm.

With a divided vocabulary best_of_ranks_kernel replaces row_best_kernel: it pushes a key into the other ranks' memory
and waits for their keys. If the group has no push buffer, or too few slots in it, the keys are gathered instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launch_arguments import cdiv, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.parallel.group import Group, PushBuffer
from compiled_engine.parallel.push_kernels import exchange_flags
from compiled_engine.sampling.edits import StepMasks
from compiled_engine.sampling.gumbel import (
    GOLDEN_GAMMA,
    LARGEST_UNIFORM,
    MULTIPLIER_1,
    MULTIPLIER_2,
    SMALLEST_UNIFORM,
)
from compiled_engine.sampling.ranks import VocabularySlice, keys_of, tokens_of
from compiled_engine.sampling.sampled_tokens import NOT_A_NUMBER, NOTHING_ALLOWED
from compiled_engine.sampling.token_mask import BITS
from compiled_engine.sampling.value_checks import FLOAT32_MAX

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
    """Choose a row's best token of all ranks; one program per row of logits.

    Each rank writes a key of its best token, which orders tokens by score (ranks.keys_of), into the other ranks'
    memory, and waits for theirs. So all ranks must launch the kernel. A row's program uses the slot of the PushBuffer
    with the program's number.

    best_score_ptr, best_token_ptr: [S, NUM_BLOCKS], see block_best_kernel; row_index_ptr: int32 [S], -1 for padding.
    token_ids_ptr: int64 [S], receives a token, an error code, or 0 for padding. addresses_ptr, epochs_ptr, rank,
    num_ranks, num_slots, data_offset, row_bytes: fields of PushBuffer.
    """
    slot = tl.program_id(0)
    is_row = tl.load(row_index_ptr + slot) >= 0
    blocks = tl.arange(0, TILE_B)
    first_block = slot.to(tl.int64) * NUM_BLOCKS
    in_row = blocks < tl.where(is_row, NUM_BLOCKS, 0)
    scores = tl.load(best_score_ptr + first_block + blocks, in_row, other=-float("inf"))
    score, best = tl.max(scores, axis=0, return_indices=True)
    token_id = tl.load(best_token_ptr + first_block + best)  # arbitrary for padding, which is not read
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
    """Write each row's best token of all ranks to token_ids_S. All ranks call this together.

    best_score_SB, best_token_SB: block_best_kernel's results for this rank's columns, by block. row_index_S: -1 for
    padding, which gets token 0.
    """
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
    """Do the work of `best_of_ranks` by launching best_of_ranks_kernel, in which ranks write to each other's memory.

    pushed: that memory. All ranks launch the kernel together, with the same number of rows, at most pushed.num_slots.
    """
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


_GOLDEN_GAMMA = tl.constexpr(GOLDEN_GAMMA)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)
_SMALLEST_UNIFORM = tl.constexpr(SMALLEST_UNIFORM)
_LARGEST_UNIFORM = tl.constexpr(LARGEST_UNIFORM)
_BITS = tl.constexpr(BITS)
_LARGEST_FLOAT = tl.constexpr(FLOAT32_MAX)

BLOCK_V = 2048


@triton.jit
def splitmix64(seed: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Return output `index` (from 0) of SplitMix64 seeded with `seed`. Arguments and result are uint64."""
    bits = seed + (index + 1) * _GOLDEN_GAMMA
    bits = (bits ^ (bits >> 30)) * _MULTIPLIER_1
    bits = (bits ^ (bits >> 27)) * _MULTIPLIER_2
    return bits ^ (bits >> 31)


@triton.jit
def gumbel(bits: tl.tensor) -> tl.tensor:
    """Return Gumbel noise, float32, made of the upper 63 of 64 random bits (uint64)."""
    u = (bits >> 1).to(tl.int64).to(tl.float32) * _SMALLEST_UNIFORM
    u = tl.minimum(tl.maximum(u, _SMALLEST_UNIFORM), _LARGEST_UNIFORM)
    rest = 1.0 - u
    return -tl.log((u - (1.0 - rest)) - tl.log(rest))


@quick_launches
@triton.jit(
    do_not_specialize=["first_token"],
    do_not_specialize_on_alignment=["row_index_ptr", "positions_ptr", "threshold_ptr", "mask_index_ptr"],
)
def block_best_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    row_index_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    inverse_temperature_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    mask_index_ptr: tl.tensor,
    known_ids_ptr: tl.tensor,
    sharpness_ptr: tl.tensor,
    best_score_ptr: tl.tensor,
    best_token_ptr: tl.tensor,
    first_token: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Find the best of BLOCK_V consecutive tokens of a row, and its score; one program per row of logits and block.

    logits_ptr: [S, VOCAB_SIZE], rows logits_stride apart. row_index_ptr to known_ids_ptr, sharpness_ptr: arguments of
        `sample`; masks_ptr and mask_index_ptr are fields of its `masks`.
    best_score_ptr: float32 [S, blocks], infinity if a score is NaN; best_token_ptr: int32 [S, blocks]. Rows of padding
        are not written.
    first_token: token id of the first column.
    """
    sample = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(row_index_ptr + sample)
    if row >= 0:
        token_ids = block * BLOCK_V + tl.arange(0, BLOCK_V)
        logits_ptrs = logits_ptr + sample * logits_stride + token_ids
        inside = token_ids < VOCAB_SIZE
        if mask_index_ptr is not None:
            mask = tl.load(mask_index_ptr + sample).to(tl.int64)
            if mask >= 0:
                words_ptr = masks_ptr + mask * ((VOCAB_SIZE + _BITS - 1) // _BITS)
                words = tl.load(words_ptr + token_ids // _BITS, mask=inside, other=0)
                inside = inside & (((words >> (token_ids % _BITS)) & 1) != 0)
        logits = tl.load(logits_ptrs, mask=inside, other=-float("inf")).to(tl.float32)
        scores = logits
        inverse_temperature = tl.load(inverse_temperature_ptr + row)
        if inverse_temperature > 0:
            seed = tl.load(seeds_ptr + row).to(tl.uint64)
            key = splitmix64(seed, tl.load(positions_ptr + sample).to(tl.uint64))
            named_ids = first_token + token_ids
            if known_ids_ptr is not None:
                named_ids = tl.load(known_ids_ptr + token_ids, mask=token_ids < VOCAB_SIZE, other=0)
            noise = gumbel(splitmix64(key, named_ids.to(tl.uint64)))
            if sharpness_ptr is not None:
                inverse_temperature *= tl.load(sharpness_ptr)
            scores = logits * inverse_temperature + noise
            if threshold_ptr is not None:
                scores = tl.where(logits < tl.load(threshold_ptr + sample), -float("inf"), scores)
        # NaN becomes infinity, which no other score is: comparisons with NaN would fail.
        is_nan = scores != scores  # noqa: PLR0124
        scores = tl.where(is_nan, float("inf"), tl.minimum(scores, _LARGEST_FLOAT))
        best_score, best = tl.max(scores, axis=0, return_indices=True)
        slot = sample * tl.num_programs(1) + block
        tl.store(best_score_ptr + slot, best_score)
        best_token = first_token + block * BLOCK_V + best
        if known_ids_ptr is not None:
            # A column beyond the last is only best if no token is allowed.
            best_token = tl.load(known_ids_ptr + tl.minimum(best_token, VOCAB_SIZE - 1)).to(tl.int32)
        tl.store(best_token_ptr + slot, best_token)


@quick_launches
@triton.jit(do_not_specialize_on_alignment=["row_index_ptr", "token_ids_ptr"])
def row_best_kernel(
    best_score_ptr: tl.tensor,
    best_token_ptr: tl.tensor,
    row_index_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    TILE_B: tl.constexpr,
) -> None:
    """Choose a row's best token from the best tokens of its blocks; one program per row of logits.

    best_score_ptr, best_token_ptr: [S, NUM_BLOCKS], see block_best_kernel; row_index_ptr: int32 [S], -1 for padding.
    token_ids_ptr: int64 [S], receives a token, an error code (sampled_tokens.py), or 0 for padding.
    """
    sample = tl.program_id(0).to(tl.int64)
    token_id = tl.zeros((), dtype=tl.int64)
    if tl.load(row_index_ptr + sample) >= 0:
        blocks = tl.arange(0, TILE_B)
        in_row = blocks < NUM_BLOCKS
        scores = tl.load(best_score_ptr + sample * NUM_BLOCKS + blocks, mask=in_row, other=-float("inf"))
        best_score, best = tl.max(scores, axis=0, return_indices=True)
        token_id = tl.load(best_token_ptr + sample * NUM_BLOCKS + best).to(tl.int64)
        token_id = tl.where(best_score == float("inf"), _NOT_A_NUMBER, token_id)
        token_id = tl.where(best_score == -float("inf"), _NOTHING_ALLOWED, token_id)
    tl.store(token_ids_ptr + sample, token_id)


def sample(
    logits_SV: torch.Tensor,
    row_index_S: torch.Tensor,
    positions_S: torch.Tensor,
    inverse_temperature_N: torch.Tensor,
    seeds_N: torch.Tensor,
    threshold_S: torch.Tensor | None,
    token_ids_S: torch.Tensor,
    masks: StepMasks | None = None,
    vocabulary: VocabularySlice | None = None,
    known_ids_V: torch.Tensor | None = None,
    sharpness_1: torch.Tensor | None = None,
) -> None:
    """Draw tokens like gumbel.sample, from logits of any floating dtype and row stride.

    masks: the tokens that each row may choose; None: all. Logits of forbidden tokens are not read. vocabulary: this
    rank's columns, and the group of ranks that choose together; None: this rank has all columns. known_ids_V: int64,
    token id of each column; None: columns are consecutive token ids. sharpness_1: float32, a factor on all logits of
    rows that are not greedy; None: 1.

    No launch depends on values that the host reads from the device, so a CUDA graph may capture all of them.
    """
    num_samples, vocab_size = logits_SV.shape
    if num_samples == 0:
        return
    assert logits_SV.stride(1) == 1
    num_blocks = cdiv(vocab_size, BLOCK_V)
    best_score_SB = torch.empty(num_samples, num_blocks, dtype=torch.float32, device=logits_SV.device)
    best_token_SB = torch.empty(num_samples, num_blocks, dtype=torch.int32, device=logits_SV.device)
    block_best_kernel[(num_samples, num_blocks)](
        logits_SV,
        logits_SV.stride()[0],
        row_index_S,
        positions_S,
        inverse_temperature_N,
        seeds_N,
        threshold_S,
        None if masks is None else masks.masks_MW,
        None if masks is None else masks.mask_index_S,
        known_ids_V,
        sharpness_1,
        best_score_SB,
        best_token_SB,
        0 if vocabulary is None else vocabulary.first,
        VOCAB_SIZE=vocab_size,
        BLOCK_V=BLOCK_V,
    )
    if vocabulary is not None and vocabulary.is_divided:
        best_of_ranks(best_score_SB, best_token_SB, row_index_S, token_ids_S, vocabulary.group)
        return
    row_best_kernel[(num_samples,)](
        best_score_SB,
        best_token_SB,
        row_index_S,
        token_ids_S,
        NUM_BLOCKS=num_blocks,
        TILE_B=next_power_of_2(num_blocks),
    )
