"""Triton kernel: attention of a request's newest token and its drafts over a short context, with the norm and rotation
of q and k and the write of k and v before it.

One program reads all keys of a request and K/V head. Keys of earlier steps do not depend on the kernels just before
this one, so it loads the first of them before it waits for these (programmatic dependent launch). The keys of this step
never go through the cache: they are a tile of their own.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.backends.triton_tile import (
    LOWEST,
    add_values,
    attend_tile,
    blocks_of,
    first_seen,
    load_rows,
    normalised,
    scales,
    scores_of,
    seen,
)
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring
from compiled_engine.attention.triton_codes import key_offset
from compiled_engine.attention.triton_rotation import normed_and_rotated
from compiled_engine.kernels.launch_arguments import dependent_launch
from compiled_engine.kernels.launcher import quick_launches

# Keys of a tile, and warps: a program has a multiprocessor to itself.
KEYS, WARPS = 128, 8
# Rows and columns of the smallest product of the tensor cores, and most rows that leave registers for a tile of keys.
SMALLEST, MOST_ROWS = 16, 32


@quick_launches
@triton.jit(
    do_not_specialize=["table_stride", "q_stride", "k_stride", "v_stride", "cos_stride", "sin_stride", "out_stride"],
    do_not_specialize_on_alignment=["slot_mapping_ptr", "seq_lens_ptr", "block_table_ptr", "sinks_ptr"],
)
def rope_drafts_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    out_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    eps: tl.tensor,
    scale_log2: tl.tensor,
    table_stride: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    out_stride: tl.tensor,
    STRIDE_MULTIPLE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """One program per (K/V head, request). The strides without HEAD are those of tokens. Rows of a request follow one
    another, those of padding last; see draft_decode."""
    kv_head = tl.program_id(0)
    first_row = tl.program_id(1).to(tl.int64) * QUERIES
    # Lengths, block table and slots were written before the kernels that this one may overlap with.
    q_Q = tl.arange(0, TILE_Q)
    row_Q = first_row + q_Q
    seq_len_Q = tl.load(seq_lens_ptr + row_Q, mask=q_Q < QUERIES, other=0)
    slot_Q = tl.load(slot_mapping_ptr + row_Q, mask=q_Q < QUERIES, other=-1)
    # Without a slot a row's key is what stands in the cache.
    new_Q = (seq_len_Q > 0) & (slot_Q >= 0)
    last_row = first_row + tl.maximum(tl.sum((seq_len_Q > 0).to(tl.int32), 0) - 1, 0)
    first_key = first_seen(tl.load(seq_lens_ptr + first_row), WINDOW)
    end_key = tl.max(seq_len_Q, 0) - tl.sum(new_Q.to(tl.int32), 0)  # of those in the cache

    d_D = tl.arange(0, TILE_D)
    # A row's table ends with its own context.
    table_ptr = block_table_ptr + last_row * table_stride
    head_cache_ptr = cache_ptr + kv_head * HEAD_DIM
    V_OFFSET: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
    n_N = tl.arange(0, TILE_N)
    keys_N = first_key + n_N
    cached_N = keys_N < end_key
    block_N = blocks_of(table_ptr, keys_N, end_key, BLOCK_SIZE)
    k_ptrs_N = head_cache_ptr + key_offset(block_N, keys_N, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM)
    k_ND = load_rows(k_ptrs_N, cached_N, True, HEAD_DIM, TILE_D)
    v_ND = load_rows(k_ptrs_N + V_OFFSET, cached_N, True, HEAD_DIM, TILE_D)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        # Not earlier: the next kernels' weights would be loaded before this kernel's keys.
        gdc_launch_dependents()

    m_M = tl.arange(0, TILE_M)
    mask_M = m_M < QUERIES * GROUP
    row_M = first_row + tl.where(mask_M, m_M // GROUP, 0)
    head_M = kv_head * GROUP + m_M % GROUP
    position_M = tl.load(seq_lens_ptr + row_M, mask=mask_M, other=0) - 1
    mask_MD = mask_M[:, None] & (d_D[None, :] < HEAD_DIM)
    q_MD = normed_and_rotated(
        q_ptr,
        q_weight_ptr,
        cos_ptr + tl.multiple_of(row_M * cos_stride, STRIDE_MULTIPLE)[:, None],
        sin_ptr + tl.multiple_of(row_M * sin_stride, STRIDE_MULTIPLE)[:, None],
        (tl.multiple_of(row_M * q_stride, STRIDE_MULTIPLE) + head_M * Q_HEAD_STRIDE)[:, None],
        d_D[None, :],
        mask_MD,
        eps,
        HEAD_DIM,
        OFFSET,
        WIDE,
    )
    own_Q = tl.where(new_Q, row_Q, first_row)
    mask_QD = new_Q[:, None] & (d_D[None, :] < HEAD_DIM)
    k_QD = normed_and_rotated(
        k_ptr,
        k_weight_ptr,
        cos_ptr + tl.multiple_of(own_Q * cos_stride, STRIDE_MULTIPLE)[:, None],
        sin_ptr + tl.multiple_of(own_Q * sin_stride, STRIDE_MULTIPLE)[:, None],
        (tl.multiple_of(own_Q * k_stride, STRIDE_MULTIPLE) + kv_head * K_HEAD_STRIDE)[:, None],
        d_D[None, :],
        mask_QD,
        eps,
        HEAD_DIM,
        OFFSET,
        WIDE,
    )
    v_rows_Q = tl.multiple_of(own_Q * v_stride, STRIDE_MULTIPLE) + kv_head * V_HEAD_STRIDE
    v_QD = tl.load(v_ptr + v_rows_Q[:, None] + d_D[None, :], mask=mask_QD, other=0.0)
    slot_Q = tl.where(new_Q, slot_Q, 0)
    new_ptrs_Q = head_cache_ptr + key_offset(slot_Q // BLOCK_SIZE, slot_Q, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM)
    tl.store(new_ptrs_Q[:, None] + d_D[None, :], k_QD, mask=mask_QD)
    tl.store(new_ptrs_Q[:, None] + V_OFFSET + d_D[None, :], v_QD, mask=mask_QD)

    # One maximum of both tiles, so that neither waits for the other.
    seen_MQ = new_Q[None, :] & seen(seq_len_Q - 1, position_M, WINDOW)
    scores_MQ = tl.where(seen_MQ, scores_of(q_MD, k_QD, None, None, scale_log2, CAP_SCALE), float("-inf"))
    seen_MN = cached_N[None, :] & seen(keys_N, position_M, WINDOW)
    scores_MN = tl.where(seen_MN, scores_of(q_MD, k_ND, None, None, scale_log2, CAP_SCALE), float("-inf"))
    max_M = tl.maximum(tl.maximum(tl.max(scores_MQ, 1), tl.max(scores_MN, 1)), LOWEST)
    weights_MQ = tl.exp2(scores_MQ * scale_log2 - (max_M * scale_log2)[:, None])
    weights_MN = tl.exp2(scores_MN * scale_log2 - (max_M * scale_log2)[:, None])
    sum_M = tl.sum(weights_MQ, 1) + tl.sum(weights_MN, 1)
    acc_MD = add_values(tl.zeros([TILE_M, TILE_D], tl.float32), weights_MQ, v_QD, q_MD.dtype)
    acc_MD = add_values(acc_MD, weights_MN, v_ND, q_MD.dtype)
    for key in range(first_key + TILE_N, end_key, TILE_N):
        acc_MD, max_M, sum_M = attend_tile(
            q_MD,
            acc_MD,
            max_M,
            sum_M,
            position_M,
            key,
            end_key,
            blocks_of(table_ptr, key + n_N, end_key, BLOCK_SIZE),
            head_cache_ptr,
            None,
            scale_log2,
            True,
            WINDOW,
            CAP_SCALE,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            HEAD_DIM,
            HEAD_DIM,
            TILE_N,
            TILE_D,
        )
    out_MD = normalised(acc_MD, max_M, sum_M, sinks_ptr, head_M, mask_M, scale_log2)
    out_rows_M = tl.multiple_of(row_M * out_stride, 8) + head_M * OUT_HEAD_STRIDE
    tl.store(out_ptr + out_rows_M[:, None] + d_D[None, :], out_MD.to(out_ptr.dtype.element_ty), mask=mask_MD)


def fits_one_program(queries: int, group: int) -> bool:
    """Return whether the kernel serves so many rows of a request, of which each has `group` heads."""
    return queries * group <= MOST_ROWS


def rope_drafts(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    rotation: Rotation,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    queries: int,
    scoring: Scoring,
) -> None:
    """Launch the kernel for rows of one query each, of which as many as `queries` in turn share a request; they fit one
    program, see fits_one_program. The cache has the dtype of q."""
    num_rows, num_heads, head_dim = q_THd.shape
    block_size, num_kv_heads = kv_cache_N2PKd.shape[2:4]
    group = num_heads // num_kv_heads
    scale_log2, cap_scale = scales(scoring)
    token_strides = [t.stride(0) for t in (q_THd, k_TKd, v_TKd, rotation.cos_T1d, rotation.sin_T1d)]
    rope_drafts_kernel[(num_kv_heads, num_rows // queries)](
        q_THd,
        k_TKd,
        v_TKd,
        rotation.q_norm_weight_d,
        rotation.k_norm_weight_d,
        rotation.cos_T1d,
        rotation.sin_T1d,
        kv_cache_N2PKd,
        out_THd,
        inputs.slot_mapping_T,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scoring.sinks_H,
        rotation.eps,
        scale_log2,
        inputs.block_table_RB.stride(0),
        *token_strides,
        out_THd.stride(0),
        STRIDE_MULTIPLE=math.gcd(8, *token_strides),
        Q_HEAD_STRIDE=q_THd.stride(1),
        K_HEAD_STRIDE=k_TKd.stride(1),
        V_HEAD_STRIDE=v_TKd.stride(1),
        OUT_HEAD_STRIDE=out_THd.stride(1),
        OFFSET=rotation.norm_offset,
        WIDE=rotation.norm_wide,
        WINDOW=scoring.sliding_window,
        CAP_SCALE=cap_scale,
        GROUP=group,
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        QUERIES=queries,
        TILE_Q=max(SMALLEST, triton.next_power_of_2(queries)),
        TILE_M=max(SMALLEST, triton.next_power_of_2(queries * group)),
        TILE_N=KEYS,
        TILE_D=triton.next_power_of_2(head_dim),
        num_warps=WARPS,
        num_stages=2,
        enable_fp_fusion=True,
        **dependent_launch(q_THd.device),
    )
