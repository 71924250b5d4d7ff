"""Triton kernels that choose the experts of each token and sort the tokens by expert.

A pair is a token and one of its TOP_K experts. Pair number token * TOP_K + slot has the token's expert number `slot`.
S is the number of pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launcher import quick_launches


@triton.jit
def chosen_experts(
    logits_ptr: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    RENORMALISE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (experts with a token's TOP_K largest logits, their probabilities), [BLOCK_X] each; the first wins a tie.

    logits_ptr: the token's logits, [NUM_EXPERTS]. BLOCK_E, BLOCK_X: NUM_EXPERTS and TOP_K rounded up to powers of two.
    RENORMALISE: the probabilities of the chosen experts add up to 1; otherwise those of all experts do.
    """
    e_E = tl.arange(0, BLOCK_E)
    x_X = tl.arange(0, BLOCK_X)
    left_E = tl.load(logits_ptr + e_E, mask=e_E < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    largest = tl.max(left_E, 0)
    total = tl.sum(tl.exp(left_E - largest), 0)
    expert_X = tl.zeros([BLOCK_X], tl.int32)
    weight_X = tl.zeros([BLOCK_X], tl.float32)
    for i in tl.static_range(TOP_K):
        value, best = tl.max(left_E, 0, return_indices=True)
        expert_X = tl.where(x_X == i, best, expert_X)
        weight_X = tl.where(x_X == i, tl.exp(value - largest), weight_X)
        left_E = tl.where(e_E == best, float("-inf"), left_E)
    if RENORMALISE:
        total = tl.sum(weight_X, 0)
    # If logits are NaN no expert is found, but its index must still be in range.
    return tl.minimum(expert_X, NUM_EXPERTS - 1), weight_X / total


@quick_launches
@triton.jit(do_not_specialize=["logits_stride"])
def route_kernel(
    logits_ptr: tl.tensor,
    given_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sorted_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    logits_stride: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    RENORMALISE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Choose the experts of each token; program (token) also adds the token's pairs to the counts of their experts.

    logits_ptr: [T, NUM_EXPERTS], rows logits_stride apart; with given_ptr, the weights of the given experts, [T,
        TOP_K].
    given_ptr: [T, TOP_K], experts that are chosen already, or None.
    chosen_ptr: int32 [S], and weights_ptr: float32 [S], the experts and their weights by pair.
    rank_ptr: int32 [S], the index of each pair among its expert's pairs, in any order.
    counts_ptr: int32 [NUM_EXPERTS], zero before the launch, then the number of pairs per expert.
    sorted_ptr, blocks_ptr: for the only token of a step, whose pairs are blocks of their own; see place_kernel, which
        is then left out, as are ranks and counts. Otherwise None.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    logits_ptr += token.to(tl.int64) * logits_stride
    x_X = tl.arange(0, BLOCK_X)
    mask_X = x_X < TOP_K
    if given_ptr is None:
        expert_X, weight_X = chosen_experts(logits_ptr, NUM_EXPERTS, BLOCK_E, TOP_K, BLOCK_X, RENORMALISE)
    else:
        expert_X = tl.load(given_ptr + token * TOP_K + x_X, mask=mask_X, other=0).to(tl.int32)
        weight_X = tl.load(logits_ptr + x_X, mask=mask_X, other=0.0).to(tl.float32)
    pair_X = token * TOP_K + x_X
    tl.store(weights_ptr + pair_X, weight_X, mask=mask_X)
    if blocks_ptr is not None:
        tl.store(sorted_ptr + pair_X, pair_X, mask=mask_X)
        tl.store(blocks_ptr + 4 * pair_X, expert_X, mask=mask_X)
        tl.store(blocks_ptr + 4 * pair_X + 1, pair_X, mask=mask_X)
        tl.store(blocks_ptr + 4 * pair_X + 2, pair_X * 0 + 1, mask=mask_X)
    else:
        rank_X = tl.atomic_add(counts_ptr + expert_X, 1, mask=mask_X, sem="relaxed")
        tl.store(chosen_ptr + pair_X, expert_X, mask=mask_X)
        tl.store(rank_ptr + pair_X, rank_X, mask=mask_X)


@quick_launches
@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def place_kernel(
    chosen_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sorted_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_blocks: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOKENS: tl.constexpr,
    PLACED: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Sort the pairs by expert, and divide them into blocks of up to TOKENS pairs of one expert.

    A program handles PLACED pairs and PLACED blocks.

    chosen_ptr, rank_ptr, counts_ptr: see route_kernel. sorted_ptr: int32 [S], the pairs in the order of experts.
    blocks_ptr: int32 [num_blocks, 4]: expert (-1: an empty block), index of the block's first pair in sorted_ptr,
        number of pairs; the last element is not written.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    e_E = tl.arange(0, BLOCK_E)
    count_E = tl.load(counts_ptr + e_E, mask=e_E < NUM_EXPERTS, other=0)
    start_E = tl.cumsum(count_E, 0) - count_E
    pair_P = tl.program_id(0) * PLACED + tl.arange(0, PLACED)
    expert_P = tl.load(chosen_ptr + pair_P, mask=pair_P < num_pairs, other=0)
    start_P = tl.sum(tl.where(expert_P[:, None] == e_E[None, :], start_E[None, :], 0), 1)
    rank_P = tl.load(rank_ptr + pair_P, mask=pair_P < num_pairs, other=0)
    tl.store(sorted_ptr + start_P + rank_P, pair_P, mask=pair_P < num_pairs)

    num_blocks_E = (count_E + TOKENS - 1) // TOKENS
    end_block_E = tl.cumsum(num_blocks_E, 0)
    block_P = pair_P
    owner_P = tl.sum((end_block_E[None, :] <= block_P[:, None]).to(tl.int32), 1)
    is_owner_PE = owner_P[:, None] == e_E[None, :]
    first_block_P = tl.sum(tl.where(is_owner_PE, (end_block_E - num_blocks_E)[None, :], 0), 1)
    before_P = (block_P - first_block_P) * TOKENS
    first_P = tl.sum(tl.where(is_owner_PE, start_E[None, :], 0), 1) + before_P
    count_P = tl.minimum(tl.sum(tl.where(is_owner_PE, count_E[None, :], 0), 1) - before_P, TOKENS)
    mask_P = block_P < num_blocks
    tl.store(blocks_ptr + 4 * block_P, tl.where(owner_P < NUM_EXPERTS, owner_P, -1), mask=mask_P)
    tl.store(blocks_ptr + 4 * block_P + 1, first_P, mask=mask_P)
    tl.store(blocks_ptr + 4 * block_P + 2, count_P, mask=mask_P)
