"""Gumbel-max sampling as two Triton kernels: the best token of each block of the vocabulary, then of the row.

The tokens are those of gumbel.py: the hash is the same to the bit, the noise but for the last bits of the
logarithm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.sampling.noise import (
    GOLDEN_GAMMA,
    LARGEST_UNIFORM,
    MULTIPLIER_1,
    MULTIPLIER_2,
    SMALLEST_UNIFORM,
)

_GOLDEN_GAMMA = tl.constexpr(GOLDEN_GAMMA)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)
_SMALLEST_UNIFORM = tl.constexpr(SMALLEST_UNIFORM)
_LARGEST_UNIFORM = tl.constexpr(LARGEST_UNIFORM)

BLOCK_V = 2048


@triton.jit
def splitmix64(seed: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Output `index` of SplitMix64 seeded with `seed`, both uint64."""
    bits = seed + (index + 1) * _GOLDEN_GAMMA
    bits = (bits ^ (bits >> 30)) * _MULTIPLIER_1
    bits = (bits ^ (bits >> 27)) * _MULTIPLIER_2
    return bits ^ (bits >> 31)


@triton.jit
def gumbel(bits: tl.tensor) -> tl.tensor:
    """Gumbel noise from the upper 63 of 64 random bits (uint64)."""
    u = (bits >> 1).to(tl.int64).to(tl.float32) * _SMALLEST_UNIFORM
    u = tl.minimum(tl.maximum(u, _SMALLEST_UNIFORM), _LARGEST_UNIFORM)
    rest = 1.0 - u
    return -tl.log((u - (1.0 - rest)) - tl.log(rest))


@triton.jit(do_not_specialize_on_alignment=["inverse_temperature_ptr", "seeds_ptr", "positions_ptr", "threshold_ptr"])
def block_best_kernel(
    logits_ptr: tl.tensor,
    inverse_temperature_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    best_score_ptr: tl.tensor,
    best_token_ptr: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Program (row, block): the best of BLOCK_V consecutive tokens, and its score.

    best_score_ptr: float32 [R, blocks]; best_token_ptr: int32 [R, blocks].
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token_ids = block * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = tl.load(logits_ptr + row * VOCAB_SIZE + token_ids, mask=token_ids < VOCAB_SIZE, other=-float("inf")).to(
        tl.float32
    )

    scores = logits
    inverse_temperature = tl.load(inverse_temperature_ptr + row)
    if inverse_temperature > 0:
        seed = tl.load(seeds_ptr + row).to(tl.uint64)
        key = splitmix64(seed, tl.load(positions_ptr + row).to(tl.uint64))
        noise = gumbel(splitmix64(key, token_ids.to(tl.uint64)))
        left_out = logits < tl.load(threshold_ptr + row)
        scores = tl.where(left_out, -float("inf"), logits * inverse_temperature + noise)
    best_score, best = tl.max(scores, axis=0, return_indices=True)
    slot = row * tl.num_programs(1) + block
    tl.store(best_score_ptr + slot, best_score)
    tl.store(best_token_ptr + slot, block * BLOCK_V + best)


@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr"])
def row_best_kernel(
    best_score_ptr: tl.tensor,
    best_token_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    TILE_B: tl.constexpr,
) -> None:
    """Program (row): the best of its blocks' best tokens. token_ids_ptr: int64 [R]."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, TILE_B)
    scores = tl.load(best_score_ptr + row * NUM_BLOCKS + blocks, mask=blocks < NUM_BLOCKS, other=-float("inf"))
    best = tl.argmax(scores, axis=0)
    tl.store(token_ids_ptr + row, tl.load(best_token_ptr + row * NUM_BLOCKS + best).to(tl.int64))


def sample_tokens(
    logits_RV: torch.Tensor,
    inverse_temperature_R: torch.Tensor,
    seeds_R: torch.Tensor,
    positions_R: torch.Tensor,
    threshold_R: torch.Tensor,
) -> torch.Tensor:
    """As gumbel.sample_tokens, but logits_RV may be of any floating dtype, and all have to be contiguous."""
    num_rows, vocab_size = logits_RV.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK_V)
    best_score_RB = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits_RV.device)
    best_token_RB = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits_RV.device)
    token_ids_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    block_best_kernel[(num_rows, num_blocks)](
        logits_RV,
        inverse_temperature_R,
        seeds_R,
        positions_R,
        threshold_R,
        best_score_RB,
        best_token_RB,
        VOCAB_SIZE=vocab_size,
        BLOCK_V=BLOCK_V,
    )
    row_best_kernel[(num_rows,)](
        best_score_RB,
        best_token_RB,
        token_ids_R,
        NUM_BLOCKS=num_blocks,
        TILE_B=triton.next_power_of_2(num_blocks),
    )
    return token_ids_R
