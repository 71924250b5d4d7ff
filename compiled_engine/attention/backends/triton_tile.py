"""Steps of attention over the paged cache: queries against a tile of keys, with the online softmax, and one query
against many of them.

Online softmax: Milakov & Gimelshein 2018; its use in tiles: Dao et al. 2022 (FlashAttention).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Lower than any score, yet finite: a row that has seen no key so far must not turn into NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def load_rows(
    ptrs_N: tl.tensor, stored_N: tl.tensor, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr
) -> tl.tensor:
    """[N, D] from the start of each row on, with no more of a mask than is needed; zeros where it hides."""
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
def attend_tile(
    q_MD: tl.tensor,
    acc_MD: tl.tensor,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    positions_M: tl.tensor,
    first_key: tl.tensor,
    end_key: tl.tensor,
    block_N: tl.tensor,
    head_cache_ptr: tl.tensor,
    scale_log2: tl.tensor,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold the keys first_key .. first_key + TILE_N - 1 into the running (acc, max, sum) of every query row.

    block_N is each key's block, any that exists from end_key on; head_cache_ptr the cache [N, 2, P, K, d] offset to the
    head.
    Without MASKED the caller promises that every row sees every key of the tile. max_M holds unscaled scores;
    scale_log2 is the softmax scale times log2(e).
    """
    keys_N = first_key + tl.arange(0, TILE_N)
    stored_N = keys_N < end_key
    # 64 bits: a cache may hold more than 2**31 elements.
    rows_N = block_N.to(tl.int64) * (2 * BLOCK_SIZE) + keys_N % BLOCK_SIZE
    k_ptrs_N = head_cache_ptr + rows_N * (NUM_KV_HEADS * HEAD_DIM)
    k_ND = load_rows(k_ptrs_N, stored_N, MASKED, HEAD_DIM, TILE_D)
    scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    if MASKED:
        visible_MN = stored_N[None, :] & (keys_N[None, :] <= positions_M[:, None])
        if WINDOW > 0:
            visible_MN &= keys_N[None, :] > positions_M[:, None] - WINDOW
        scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))

    new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1))
    rescale_M = tl.exp2((max_M - new_max_M) * scale_log2)
    weights_MN = tl.exp2(scores_MN * scale_log2 - (new_max_M * scale_log2)[:, None])
    sum_M = sum_M * rescale_M + tl.sum(weights_MN, 1)
    acc_MD = acc_MD * rescale_M[:, None]
    v_ND = load_rows(k_ptrs_N + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM, stored_N, MASKED, HEAD_DIM, TILE_D)
    acc_MD = tl.dot(weights_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision="ieee")
    return acc_MD, new_max_M, sum_M


@triton.jit
def attend_keys(
    q_token_ptr: tl.tensor,
    table_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    kv_head: tl.tensor,
    first_key: tl.tensor,
    end_key: tl.tensor,
    scale_log2: tl.tensor,
    Q_HEAD_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One query, the heads of one K/V head, over the keys first_key .. end_key - 1: acc, max and sum."""
    rows_M = tl.arange(0, TILE_M)
    heads_M = kv_head * GROUP + rows_M
    d_D = tl.arange(0, TILE_D)
    mask_MD = (rows_M[:, None] < GROUP) & (d_D[None, :] < HEAD_DIM)
    q_MD = tl.load(q_token_ptr + heads_M[:, None] * Q_HEAD_STRIDE + d_D[None, :], mask=mask_MD, other=0.0)
    positions_M = tl.full([TILE_M], 0, tl.int32) + end_key - 1
    acc_MD = tl.zeros([TILE_M, TILE_D], tl.float32)
    max_M = tl.full([TILE_M], LOWEST, tl.float32)
    sum_M = tl.zeros([TILE_M], tl.float32)
    for key in range(first_key, end_key, TILE_N):
        keys_N = key + tl.arange(0, TILE_N)
        block_N = tl.load(table_ptr + keys_N // BLOCK_SIZE, mask=keys_N < end_key, other=0)
        acc_MD, max_M, sum_M = attend_tile(
            q_MD,
            acc_MD,
            max_M,
            sum_M,
            positions_M,
            key,
            end_key,
            block_N,
            cache_ptr + kv_head * HEAD_DIM,
            scale_log2,
            True,
            0,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            HEAD_DIM,
            TILE_N,
            TILE_D,
        )
    return acc_MD, max_M, sum_M
