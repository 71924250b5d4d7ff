"""Compute the thresholds of filters.py without a sort: by bisection over counts for top-k, over probability for top-p.

The sets {logit >= threshold} shrink as the threshold rises. The result is the largest threshold whose set still has at
least k tokens, or at least the probability top_p. Each pass over a row narrows the interval of possible thresholds.
Once at most CANDIDATES logits are in the interval, the search continues in registers. One program handles a row, so
sums have a fixed order whatever else is in the batch, and programs of rows without filters end immediately.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launcher import quick_launches

BLOCK_V = 8192
CANDIDATES = 2048
# One program reads a whole row, usually alone on its multiprocessor: many warps hide memory latency.
NUM_WARPS = 16


@triton.jit
def _ordered(value: tl.tensor) -> tl.tensor:
    """Return integers that are in the same order as the float32 values.

    They are int64, since their differences would not fit into 32 bits.
    """
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _value(ordered: tl.tensor) -> tl.tensor:
    """Return the float32 values from which `_ordered` made these numbers."""
    bits = ordered.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low: tl.tensor, high: tl.tensor, step: tl.tensor) -> tl.tensor:
    """Return a number strictly between low and high, integers made by `_ordered` that differ by more than 1.

    In even steps it is the mean of the floats, near which logits lie. In odd steps it is the mean of the integers,
    which limits the search to 64 steps.
    """
    by_value = _ordered(_value(low) * 0.5 + _value(high) * 0.5)
    middle = tl.where(step % 2 == 0, by_value, (low + high) >> 1)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _weights(logits: tl.tensor, top: tl.tensor, inverse_temperature: tl.tensor, BY_MASS: tl.constexpr) -> tl.tensor:
    """Return the weight with which each logit counts in the search for a threshold.

    With BY_MASS, for top-p, it is the logit's probability divided by that of the logit `top`. Otherwise, for top-k, it
    is 1.
    """
    if BY_MASS:
        return tl.exp((logits - top) * inverse_temperature)
    return tl.full(logits.shape, 1.0, tl.float32)


@triton.jit
def _at_least(
    row_ptr: tl.tensor,
    pivot: tl.tensor,
    top: tl.tensor,
    inverse_temperature: tl.tensor,
    BY_MASS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (number of a row's logits at or above the pivot, int32; sum of their weights, float32).

    Logits of minus infinity do not count. row_ptr: logits of the row. top, BY_MASS: see _weights.
    """
    counts = tl.zeros([BLOCK_V], dtype=tl.int32)
    sums = tl.zeros([BLOCK_V], dtype=tl.float32)
    for start in range(0, VOCAB_SIZE, BLOCK_V):
        token_ids = start + tl.arange(0, BLOCK_V)
        logits = tl.load(row_ptr + token_ids, mask=token_ids < VOCAB_SIZE, other=-float("inf")).to(tl.float32)
        kept = (logits >= pivot) & (logits > -float("inf"))
        counts += kept.to(tl.int32)
        sums += tl.where(kept, _weights(logits, top, inverse_temperature, BY_MASS), 0.0)
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0)


@triton.jit
def _largest_holding(
    row_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    low: tl.tensor,
    count_low: tl.tensor,
    high: tl.tensor,
    target: tl.tensor,
    top: tl.tensor,
    inverse_temperature: tl.tensor,
    BY_MASS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (largest threshold in [low, high), sum of the weights of logits above it).

    The weights of the logits at or above the threshold sum to at least `target`. This must hold for `low` too, and no
    logit may be at or above `high`. low, high and the threshold are integers that _ordered makes of logits.

    count_low: number of logits at or above `low`.
    candidates_ptr: float32 [CANDIDATES], scratch memory of the row. top, BY_MASS: see _weights.
    """
    count_high = tl.zeros((), dtype=tl.int32)
    sum_high = tl.zeros((), dtype=tl.float32)
    step = 0
    while (high - low > 1) & (count_low - count_high > CANDIDATES):
        middle = _middle(low, high, step)
        count, total = _at_least(row_ptr, _value(middle), top, inverse_temperature, BY_MASS, VOCAB_SIZE, BLOCK_V)
        if total >= target:
            low = middle
            count_low = count
        else:
            high = middle
            count_high = count
            sum_high = total
        step += 1
    if high - low > 1:
        # Collect the logits in [low, high), in the order of the vocabulary.
        lowest, end = _value(low), _value(high)
        found = tl.zeros((), dtype=tl.int32)
        for start in range(0, VOCAB_SIZE, BLOCK_V):
            token_ids = start + tl.arange(0, BLOCK_V)
            logits = tl.load(row_ptr + token_ids, mask=token_ids < VOCAB_SIZE, other=-float("inf")).to(tl.float32)
            inside = (logits >= lowest) & (logits < end)
            ones = inside.to(tl.int32)
            slots = found + tl.cumsum(ones, axis=0) - 1
            tl.store(candidates_ptr + slots, logits, mask=inside & (slots < CANDIDATES))
            found += tl.sum(ones, axis=0)
        tl.debug_barrier()
        slots = tl.arange(0, CANDIDATES)
        logits = tl.load(candidates_ptr + slots, mask=slots < found, other=-float("inf"))
        weights = tl.where(slots < found, _weights(logits, top, inverse_temperature, BY_MASS), 0.0)
        sum_above = sum_high
        while high - low > 1:
            middle = _middle(low, high, step)
            total = sum_above + tl.sum(tl.where(logits >= _value(middle), weights, 0.0), axis=0)
            if total >= target:
                low = middle
            else:
                high = middle
                sum_high = total
            step += 1
        # The next search uses the same memory.
        tl.debug_barrier()
    return low, sum_high


@quick_launches
@triton.jit(do_not_specialize_on_alignment=["row_index_ptr"])
def threshold_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    row_index_ptr: tl.tensor,
    inverse_temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    """Compute the threshold of a row, see `thresholds`; one program per row of logits.

    logits_ptr: [S, VOCAB_SIZE], rows logits_stride apart; threshold_ptr: float32 [S], the results.
    row_index_ptr: int32 [S], index of a row's parameters in inverse_temperature_ptr to min_p_ptr [N]; -1 for padding.
    candidates_ptr: float32 [S, CANDIDATES], scratch memory.
    """
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(row_index_ptr + sample)
    threshold = -float("inf")
    inverse_temperature = 0.0
    top_k = tl.zeros((), dtype=tl.int32)
    top_p = 1.0
    min_p = 0.0
    if row >= 0:
        inverse_temperature = tl.load(inverse_temperature_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
    limited = (top_k > 0) & (top_k < VOCAB_SIZE)
    if (inverse_temperature > 0) & (limited | (top_p < 1) | (min_p > 0)):
        row_ptr = logits_ptr + sample * logits_stride
        own_candidates_ptr = candidates_ptr + sample * CANDIDATES
        tops = tl.full([BLOCK_V], -float("inf"), tl.float32)
        bottoms = tl.full([BLOCK_V], float("inf"), tl.float32)
        counts = tl.zeros([BLOCK_V], dtype=tl.int32)
        for start in range(0, VOCAB_SIZE, BLOCK_V):
            token_ids = start + tl.arange(0, BLOCK_V)
            logits = tl.load(row_ptr + token_ids, mask=token_ids < VOCAB_SIZE, other=-float("inf")).to(tl.float32)
            possible = logits > -float("inf")
            tops = tl.maximum(tops, logits)
            bottoms = tl.minimum(bottoms, tl.where(possible, logits, float("inf")))
            counts += possible.to(tl.int32)
        top, bottom, num_possible = tl.max(tops, axis=0), tl.min(bottoms, axis=0), tl.sum(counts, axis=0)
        if (top > -float("inf")) & (top < float("inf")):
            if min_p > 0:
                threshold = top + tl.log(min_p) / inverse_temperature
            high = _ordered(top) + 1
            remaining = -1.0  # weight of the tokens that min-p and top-k keep; negative: not known yet
            if limited & (top_k <= num_possible):
                kth, above = _largest_holding(
                    row_ptr, own_candidates_ptr, _ordered(bottom), num_possible, high, top_k.to(tl.float32),
                    top, inverse_temperature, False, VOCAB_SIZE, BLOCK_V, CANDIDATES,
                )  # fmt: skip
                if _value(kth) >= threshold:
                    threshold = _value(kth)
                    if top_p < 1:
                        # All logits equal to the k-th are kept, but only as many as make up k count here.
                        _, remaining = _at_least(
                            row_ptr, _value(kth + 1), top, inverse_temperature, True, VOCAB_SIZE, BLOCK_V
                        )
                        equal = top_k.to(tl.float32) - above
                        remaining += equal * tl.exp((threshold - top) * inverse_temperature)
            if top_p < 1:
                threshold = tl.maximum(threshold, bottom)
                count, total = _at_least(row_ptr, threshold, top, inverse_temperature, True, VOCAB_SIZE, BLOCK_V)
                if remaining < 0:
                    remaining = total
                nucleus, _ = _largest_holding(
                    row_ptr, own_candidates_ptr, _ordered(threshold), count, high, top_p * remaining,
                    top, inverse_temperature, True, VOCAB_SIZE, BLOCK_V, CANDIDATES,
                )  # fmt: skip
                threshold = _value(nucleus)
    tl.store(threshold_ptr + sample, threshold)


def thresholds(
    logits_SV: torch.Tensor,
    row_index_S: torch.Tensor,
    inverse_temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
) -> torch.Tensor:
    """Return the smallest kept logit of each row, or a value that keeps the same tokens: float32 [S].

    Minus infinity keeps all tokens. logits_SV: any floating dtype, contiguous within a row. row_index_S: int32 [S],
    index of a row's parameters in the tensors [N] (top_k int32, the others float32); -1 is padding.
    """
    num_samples, vocab_size = logits_SV.shape
    threshold_S = torch.empty(num_samples, dtype=torch.float32, device=logits_SV.device)
    if num_samples == 0:
        return threshold_S
    assert logits_SV.stride(1) == 1
    candidates_SC = torch.empty(num_samples, CANDIDATES, dtype=torch.float32, device=logits_SV.device)
    threshold_kernel[(num_samples,)](
        logits_SV,
        logits_SV.stride(0),
        row_index_S,
        inverse_temperature_N,
        top_k_N,
        top_p_N,
        min_p_N,
        threshold_S,
        candidates_SC,
        VOCAB_SIZE=vocab_size,
        BLOCK_V=BLOCK_V,
        CANDIDATES=CANDIDATES,
        num_warps=NUM_WARPS,
    )
    return threshold_S
