"""Device functions that attention kernels share: addresses of keys and values, masks, and the online softmax.

Letters of a tile's dimensions: M rows (query heads, each of one query), N keys, D elements of a head, of which those
from HEAD_DIM on are padding. All other letters are those of attention/inputs.py.

A head of more than TILE_D elements has a tail, which has a tile of its own (wide_tiles.py). So queries, keys, values
and accumulators are *parts*: tuples of one tile, or of two for a head with a tail.

The online softmax is by Milakov & Gimelshein 2018; its use in tiles by Dao et al. 2022 (FlashAttention). Gluon kernels
call these functions too, except those that load or multiply tiles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

from compiled_engine.attention.inputs import Scoring
from compiled_engine.attention.triton_codes import key_offset, load_scales, numbers, product_type

# Lower than any score, yet finite: a row that has seen no key so far must not turn into NaN.
LOWEST = tl.constexpr(-1.0e30)
LOG2_E = tl.constexpr(math.log2(math.e))
# Every kernel's tile of keys divides this number, and dequantised contexts begin at a multiple of it.
TILES_OF_KEYS = tl.constexpr(128)
# Fewest elements that the tensor cores add up in a product.
SMALLEST_PRODUCT = 16


class HeadCache(NamedTuple):
    """The part of a paged cache [N, 2, P, K, WIDTH] that belongs to a K/V head: an argument of device functions.

    Construct it in the argument list of a call: if it is assigned to a variable, Triton turns its sizes into tensors.
    """

    ptr: tl.tensor  # the cache from the head on
    scales_ptr: tl.tensor | None  # its scales from the head on, see triton_codes
    BLOCK_SIZE: tl.constexpr
    NUM_KV_HEADS: tl.constexpr
    HEAD_DIM: tl.constexpr
    WIDTH: tl.constexpr


def scales(scoring: Scoring) -> tuple[float, float]:
    """Return (scale_log2, CAP_SCALE), the factors by which kernels turn dot products of queries and keys into weights.

    The weight of a key is 2 ** (score * scale_log2). Its score is the dot product, or tanh(dot product * CAP_SCALE) if
    scores have a soft cap; CAP_SCALE 0: no soft cap.
    """
    if scoring.soft_cap:
        return scoring.soft_cap * LOG2_E.value, scoring.scale / scoring.soft_cap
    return scoring.scale * LOG2_E.value, 0.0


@triton.jit
def blocks_of(table_ptr: tl.tensor, keys: tl.tensor, end_key: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """Return the block id of each key; 0, a block that exists, from end_key on.

    table_ptr: the request's row of the block table. keys: positions in its context.
    """
    return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end_key, other=0)


@triton.jit
def first_seen(seq_len: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Return the first key that the last query of a context sees. WINDOW: keys that a query sees, 0: all."""
    if WINDOW > 0:
        return tl.maximum(seq_len - WINDOW, 0)
    else:
        return 0


@triton.jit
def keys_of_rows(
    seq_lens_ptr: tl.tensor, first_row: tl.tensor, QUERY_LEN: tl.constexpr, WINDOW: tl.constexpr, TILE_Q: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (first key that any query of a request sees, end of the keys, the request's last row that is no padding).

    The request has the rows first_row .. first_row + QUERY_LEN - 1, padding last. TILE_Q: QUERY_LEN rounded up to a
    power of two.
    """
    q_Q = tl.arange(0, TILE_Q)
    seq_len_Q = tl.load(seq_lens_ptr + first_row + q_Q, mask=q_Q < QUERY_LEN, other=0)
    last_row = first_row + tl.maximum(tl.sum((seq_len_Q > 0).to(tl.int32), 0) - 1, 0)
    return first_seen(tl.load(seq_lens_ptr + first_row), WINDOW), tl.max(seq_len_Q, 0), last_row


@triton.jit
def first_read(first_position: tl.tensor, WINDOW: tl.constexpr, TILE_N: tl.constexpr) -> tl.tensor:
    """Return the position of the first key that a program reads for queries from first_position on.

    It is a multiple of TILE_N, and 0 without a window. Keys of the first tile that are before the window have weight 0.
    Keys and values there must not be NaN, since zero times NaN is NaN. A kernel that writes them for other kernels
    therefore passes TILES_OF_KEYS, a multiple of every TILE_N.
    """
    tl.static_assert(TILES_OF_KEYS % TILE_N == 0, "decoded contexts begin at a multiple of TILES_OF_KEYS")
    if WINDOW > 0:
        return tl.maximum(first_position - WINDOW + 1, 0) // TILE_N * TILE_N
    else:
        return first_position * 0


@triton.jit
def seen(
    keys_N: tl.tensor, positions_M: tl.tensor, WINDOW: tl.constexpr, ahead_M: tl.tensor | None = None
) -> tl.tensor:
    """Return a mask [M, N] of keys that each query sees: up to its position, and within its window if WINDOW > 0.

    ahead_M: number of later keys that each query sees too; None: 0.
    """
    last_M = positions_M
    if ahead_M is not None:
        last_M += ahead_M
    seen_MN = keys_N[None, :] <= last_M[:, None]
    if WINDOW > 0:
        seen_MN &= keys_N[None, :] > positions_M[:, None] - WINDOW
    return seen_MN


@triton.constexpr_function
def tail_of(head_dim: int, tile_d: int) -> int:
    """Return the size of the tile for a head's tail, a power of two; 0 if the head has at most tile_d elements."""
    return max(SMALLEST_PRODUCT, triton.next_power_of_2(head_dim - tile_d)) if head_dim > tile_d else 0


@triton.jit
def head_elements(HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return the indices of a head's elements in each of its parts, [D] each.

    A head has one part, or two if it has more than TILE_D elements: the first TILE_D, and the rest, its tail.
    """
    TAIL_D: tl.constexpr = tail_of(HEAD_DIM, TILE_D)
    if TAIL_D == 0:
        return (tl.arange(0, TILE_D),)
    else:
        return tl.arange(0, TILE_D), TILE_D + tl.arange(0, TAIL_D)


@triton.jit
def head_masks(mask_M: tl.tensor, elements: tl.tuple, HEAD_DIM: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return a mask [M, D] for each part of M heads: elements that exist (not padding), in the rows of mask_M.

    elements: the indices of each part's elements, from head_elements.
    """
    return [mask_M[:, None] & (d_D[None, :] < HEAD_DIM) for d_D in elements]  # type: ignore[return-value]


@triton.jit
def load_queries(
    ptrs_M1: tl.tensor, elements: tl.tuple, masks: tl.tuple, CACHE_MODIFIER: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Load query heads, in parts [M, D]: one tile, or two for heads with a tail. Elements of padding are zeros.

    ptrs_M1: pointers to the heads, [M, 1]. elements, masks: results of head_elements and head_masks.
    """
    first_MD = tl.load(ptrs_M1 + elements[0][None, :], mask=masks[0], other=0.0, cache_modifier=CACHE_MODIFIER)
    if len(masks) == 1:
        return (first_MD,)
    else:
        ptrs_MD = ptrs_M1 + elements[1][None, :]
        return first_MD, tl.load(ptrs_MD, mask=masks[1], other=0.0, cache_modifier=CACHE_MODIFIER)


@triton.jit
def store_parts(ptr: tl.tensor, offsets_M1: tl.tensor, parts: tl.tuple, elements: tl.tuple, masks: tl.tuple) -> None:
    """Store M heads in the dtype of ptr.

    offsets_M1: offsets of the heads from ptr, [M, 1]. parts: the heads' elements, in one tile [M, D], or two for heads
    with a tail. elements, masks: results of head_elements and head_masks.
    """
    for part in tl.static_range(len(elements)):
        ptrs_MD = ptr + offsets_M1 + elements[part][None, :]
        tl.store(ptrs_MD, parts[part].to(ptr.dtype.element_ty), mask=masks[part])


@triton.jit
def load_rows(
    ptrs_N: tl.tensor, stored_N: tl.tensor, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr
) -> tl.tensor:
    """Load keys or values [N, D]: HEAD_DIM elements from each pointer on; zeros elsewhere, and for keys not stored.

    MASKED: some keys of the tile may not be stored; otherwise stored_N is not read.
    """
    d_D = tl.arange(0, TILE_D)
    ptrs_ND = ptrs_N[:, None] + d_D[None, :]
    if MASKED and TILE_D != HEAD_DIM:
        return tl.load(ptrs_ND, mask=stored_N[:, None] & (d_D[None, :] < HEAD_DIM), other=0.0)
    elif MASKED:
        return tl.load(ptrs_ND, mask=stored_N[:, None], other=0.0)
    elif TILE_D != HEAD_DIM:
        return tl.load(ptrs_ND, mask=d_D[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(ptrs_ND)


@triton.jit
def load_parts(
    ptrs_N: tl.tensor, stored_N: tl.tensor, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Load keys or values in parts [N, D]: one tile, or two for heads with a tail. See load_rows for the arguments."""
    TAIL_D: tl.constexpr = tail_of(HEAD_DIM, TILE_D)
    if TAIL_D == 0:
        return (load_rows(ptrs_N, stored_N, MASKED, HEAD_DIM, TILE_D),)
    else:
        first_ND = load_rows(ptrs_N, stored_N, MASKED, TILE_D, TILE_D)
        return first_ND, load_rows(ptrs_N + TILE_D, stored_N, MASKED, HEAD_DIM - TILE_D, TAIL_D)


@triton.jit
def capped(scores: tl.tensor, CAP_SCALE: tl.constexpr) -> tl.tensor:
    """Return dot products of queries and keys with the soft cap applied, if any. CAP_SCALE: see `scales`."""
    if CAP_SCALE > 0:
        scores = 1 - 2 / (tl.exp2(scores * (2 * CAP_SCALE * LOG2_E)) + 1)  # tanh
    return scores


@triton.jit
def scores_of(
    q_parts: tl.tuple,
    k_parts: tl.tuple,
    k_scale_N: tl.tensor | None,
    v_scale_N: tl.tensor | None,
    scale_log2: tl.tensor,
    CAP_SCALE: tl.constexpr,
) -> tl.tensor:
    """Return scores [M, N] of queries and keys: their dot products, with the soft cap applied, if any.

    q_parts, k_parts: queries [M, D] and keys [N, D], in one tile each, or two for heads with a tail. scale_log2,
    CAP_SCALE: see `scales`.

    k_scale_N, v_scale_N: fp32 scales of 8-bit keys and values; None: there are none. The scales of values are added to
    the scores as logarithms. So weights are multiplied by codes, and the largest weight is 1: none of the precision of
    the weights' type is lost, whatever the scales are.
    """
    dtype: tl.constexpr = q_parts[0].dtype
    products_MN = tl.dot(q_parts[0], tl.trans(numbers(k_parts[0], dtype)), input_precision="ieee")
    if len(q_parts) > 1:
        products_MN = tl.dot(q_parts[1], tl.trans(numbers(k_parts[1], dtype)), products_MN, input_precision="ieee")
    if k_scale_N is not None:
        shift_N = tl.log2(v_scale_N) / scale_log2  # type: ignore[arg-type]
        return capped(products_MN * k_scale_N[None, :], CAP_SCALE) + shift_N[None, :]
    else:
        return capped(products_MN, CAP_SCALE)


@triton.jit
def weigh(scores_MN: tl.tensor, max_M: tl.tensor, scale_log2: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (weights [M, N] of a tile, factor [M], new max_M).

    The online softmax's acc and sum must be multiplied by the factor before the tile is added.

    max_M: the largest score of each row before this tile.
    """
    new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1))
    rescale_M = tl.exp2((max_M - new_max_M) * scale_log2)
    weights_MN = tl.exp2(scores_MN * scale_log2 - (new_max_M * scale_log2)[:, None])
    return weights_MN, rescale_M, new_max_M


@triton.jit
def sum_of(weights_MN: tl.tensor, v_scale_N: tl.tensor | None) -> tl.tensor:
    """Return the sum [M] of a tile's weights, without the scales of values that scores_of has included in them."""
    if v_scale_N is not None:
        return tl.sum(weights_MN * (1.0 / v_scale_N)[None, :], 1)
    else:
        return tl.sum(weights_MN, 1)


@triton.jit
def add_values(
    acc_parts: tl.tuple, weights_MN: tl.tensor, v_parts: tl.tuple, dtype: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return acc (the weighted sum of values) plus a tile's values times their weights.

    acc_parts, v_parts: sums [M, D] and values [N, D], in one tile each, or two for heads with a tail. dtype: the dtype
    of the multiplication.
    """
    weights_MN = weights_MN.to(dtype)
    first_MD = tl.dot(weights_MN, numbers(v_parts[0], dtype), acc_parts[0], input_precision="ieee")
    if len(acc_parts) > 1:
        return first_MD, tl.dot(weights_MN, numbers(v_parts[1], dtype), acc_parts[1], input_precision="ieee")
    else:
        return (first_MD,)


@triton.jit
def rescaled(acc_parts: tl.tuple, factor_M: tl.tensor) -> tuple[tl.tensor, ...]:
    """Return acc (weighted sums of values, in one tile or two) times the factor of each row."""
    return [acc_MD * factor_M[:, None] for acc_MD in acc_parts]  # type: ignore[return-value]


@triton.jit
def attend_tile(
    q_parts: tl.tuple,
    acc_parts: tl.tuple,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    positions_M: tl.tensor,
    first_key: tl.tensor,
    end_key: tl.tensor,
    block_N: tl.tensor,
    cache: HeadCache,
    scale_log2: tl.tensor,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    ahead_M: tl.tensor | None = None,
) -> tuple[tuple[tl.tensor, ...], tl.tensor, tl.tensor]:
    """Return the online softmax's (acc, max, sum) of all rows, updated with TILE_N keys from first_key on.

    q_parts, acc_parts: queries [M, D], and weighted sums of values (acc), in one tile each, or two for heads with a
        tail.
    positions_M: the position of each query. ahead_M: see `seen`.
    end_key: end of the keys that are stored.
    block_N: the block of each key, see blocks_of.
    max_M: the largest score of each row, not yet multiplied by scale_log2.
    MASKED: hide keys that a query does not see; without it, every query sees every key of the tile.
    """
    keys_N = first_key + tl.arange(0, TILE_N)
    stored_N = keys_N < end_key
    k_ptrs_N = cache.ptr + key_offset(
        block_N, keys_N, cache.BLOCK_SIZE, cache.NUM_KV_HEADS, cache.HEAD_DIM, cache.WIDTH
    )
    k_parts = load_parts(k_ptrs_N, stored_N, MASKED, cache.HEAD_DIM, TILE_D)
    k_scale_N = None
    v_scale_N = None
    if cache.scales_ptr is not None:
        k_scale_N, v_scale_N = load_scales(
            cache.scales_ptr,
            block_N,
            keys_N,
            stored_N,
            cache.BLOCK_SIZE,
            cache.NUM_KV_HEADS,
            cache.HEAD_DIM,
            cache.WIDTH,
        )
    scores_MN = scores_of(q_parts, k_parts, k_scale_N, v_scale_N, scale_log2, CAP_SCALE)
    if MASKED:
        seen_MN = seen(keys_N, positions_M, WINDOW, ahead_M)
        scores_MN = tl.where(stored_N[None, :] & seen_MN, scores_MN, float("-inf"))
    weights_MN, rescale_M, max_M = weigh(scores_MN, max_M, scale_log2)
    acc_parts = rescaled(acc_parts, rescale_M)
    sum_M = sum_M * rescale_M + sum_of(weights_MN, v_scale_N)
    v_ptrs_N = k_ptrs_N + cache.BLOCK_SIZE * cache.NUM_KV_HEADS * cache.WIDTH
    v_parts = load_parts(v_ptrs_N, stored_N, MASKED, cache.HEAD_DIM, TILE_D)
    return add_values(acc_parts, weights_MN, v_parts, q_parts[0].dtype), max_M, sum_M


@triton.jit
def fold_keys(
    q_parts: tl.tuple,
    acc_parts: tl.tuple,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    positions_M: tl.tensor | None,
    table_ptr: tl.tensor,
    cache: HeadCache,
    first_key: tl.tensor,
    end_key: tl.tensor,
    scale_log2: tl.tensor,
    WINDOW: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    LOOK_AHEAD: tl.constexpr,
) -> tuple[tuple[tl.tensor, ...], tl.tensor, tl.tensor]:
    """Return the online softmax's (acc, max, sum) of a request's queries, updated with keys first_key .. end_key - 1.

    positions_M: the position of each query; None: there is one query, which sees all these keys.
    table_ptr: the request's row of the block table. Other arguments are those of attend_tile.
    LOOK_AHEAD: look up blocks one tile ahead, so that several tiles are in flight. That is faster for long contexts of
        few requests; with many programs it gains nothing and takes registers.
    """
    SINGLE: tl.constexpr = positions_M is None
    if SINGLE:
        positions_M = tl.zeros_like(max_M).to(tl.int32) + end_key - 1
    n_N = tl.arange(0, TILE_N)
    if LOOK_AHEAD or not SINGLE:  # with several queries, this lookup makes the code of the loop smaller
        block_N = blocks_of(table_ptr, first_key + n_N, end_key, cache.BLOCK_SIZE)
    for key in range(first_key, end_key, TILE_N):
        if LOOK_AHEAD:
            next_block_N = blocks_of(table_ptr, key + TILE_N + n_N, end_key, cache.BLOCK_SIZE)
        else:
            block_N = blocks_of(table_ptr, key + n_N, end_key, cache.BLOCK_SIZE)
        acc_parts, max_M, sum_M = attend_tile(
            q_parts,
            acc_parts,
            max_M,
            sum_M,
            positions_M,
            key,
            end_key,
            block_N,
            cache,
            scale_log2,
            True,
            0 if SINGLE else WINDOW,
            CAP_SCALE,
            TILE_N,
            TILE_D,
        )
        if LOOK_AHEAD:
            block_N = next_block_N
    return acc_parts, max_M, sum_M


@triton.jit
def attend_keys(
    q_ptrs_M: tl.tensor,
    mask_M: tl.tensor,
    positions_M: tl.tensor | None,
    table_ptr: tl.tensor,
    cache: HeadCache,
    first_key: tl.tensor,
    end_key: tl.tensor,
    scale_log2: tl.tensor,
    WINDOW: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    LOOK_AHEAD: tl.constexpr,
) -> tuple[tuple[tl.tensor, ...], tl.tensor, tl.tensor]:
    """Return the online softmax's (acc, max [M], sum [M]) of a request's queries over keys first_key .. end_key - 1.

    acc, the weighted sums of values, is a tuple of one tile [M, D], or two for heads with a tail. q_ptrs_M: pointers to
    each row's query head. mask_M: rows that exist. Other arguments are those of fold_keys.
    """
    elements = head_elements(cache.HEAD_DIM, TILE_D)
    masks = head_masks(mask_M, elements, cache.HEAD_DIM)
    q_parts = load_queries(q_ptrs_M[:, None], elements, masks, "")
    return fold_keys(
        [product_type(q_MD, cache.ptr.dtype.element_ty) for q_MD in q_parts],
        no_sums(TILE_M, elements),
        tl.full([TILE_M], LOWEST, tl.float32),
        tl.zeros([TILE_M], tl.float32),
        positions_M,
        table_ptr,
        cache,
        first_key,
        end_key,
        scale_log2,
        WINDOW,
        CAP_SCALE,
        TILE_N,
        TILE_D,
        LOOK_AHEAD,
    )


@triton.jit
def no_sums(TILE_M: tl.constexpr, elements: tl.tuple) -> tuple[tl.tensor, ...]:
    """Return zeros [TILE_M, D] for each tile of acc, the weighted sum of values. elements: see head_elements."""
    return [tl.zeros([TILE_M, d_D.shape[0]], tl.float32) for d_D in elements]  # type: ignore[return-value]


@triton.jit
def normalised(
    acc_MD: tl.tensor,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    sinks_ptr: tl.tensor,
    heads_M: tl.tensor,
    mask_M: tl.tensor,
    scale_log2: tl.tensor,
) -> tl.tensor:
    """Return acc divided by the sum of the weights, including that of the head's sink; zeros for rows that saw no key.

    acc_MD: weighted sums of values. max_M, sum_M: largest scores and sums of weights. sinks_ptr: [H], see Scoring;
    None: no sinks. heads_M: the query head of each row. mask_M: rows whose head exists.
    """
    if sinks_ptr is not None:
        sink_M = tl.load(sinks_ptr + heads_M, mask=mask_M, other=0.0).to(tl.float32)
        sum_M += tl.exp2(sink_M * LOG2_E - max_M * scale_log2)
    # A padding row (seq_len 0) saw no key: zeros.
    return acc_MD / tl.where(sum_M > 0, sum_M, 1.0)[:, None]


@triton.jit
def normalised_parts(
    acc_parts: tl.tuple,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    sinks_ptr: tl.tensor,
    heads_M: tl.tensor,
    mask_M: tl.tensor,
    scale_log2: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """Apply `normalised` to each tile of acc: one, or two for heads with a tail. Returns the results."""
    return [normalised(acc_MD, max_M, sum_M, sinks_ptr, heads_M, mask_M, scale_log2) for acc_MD in acc_parts]  # type: ignore[return-value]
