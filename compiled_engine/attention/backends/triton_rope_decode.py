"""Triton kernel: decode attention that first norms and rotates q and k, and writes k and v.

It is for few requests, where a kernel takes longer to start than to run. Keys of earlier steps do not depend on the
kernels just before this one, so each program loads its first tile before it waits for them (programmatic dependent
launch). This step's key is not read from the cache: the last split begins with it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.backends.decode_splits import GRAIN, Splits
from compiled_engine.attention.backends.kernel_arguments import (
    STEP_NUMBERS,
    STEP_TENSORS,
    RotatingArguments,
    paged_constants,
    rows_of,
)
from compiled_engine.attention.backends.triton_combine import Partials, combine_splits, store_partials
from compiled_engine.attention.backends.triton_decode import decode_tiles
from compiled_engine.attention.backends.triton_tile import (
    LOWEST,
    HeadCache,
    add_values,
    blocks_of,
    capped,
    first_seen,
    fold_keys,
    load_rows,
    normalised,
    scales,
    scores_of,
    sum_of,
    weigh,
)
from compiled_engine.attention.backends.work_list import split_length
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring
from compiled_engine.attention.triton_codes import (
    key_offset,
    load_scales,
    numbers,
    product_type,
    rounded_head,
    scale_pointers,
    scales_of,
)
from compiled_engine.attention.triton_rotation import normed_and_rotated
from compiled_engine.kernels.launch_arguments import dependent_launch
from compiled_engine.kernels.launcher import quick_launches


@quick_launches
@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_TENSORS)
def rope_decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
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
    min_keys: tl.tensor,
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
    WIDTH: tl.constexpr,
    TILE_M: tl.constexpr,
    FIRST_N: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    GRAIN: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute decode attention. Program (K/V head, request, split) computes a query's GROUP heads over a split's keys.

    A program norms and rotates q. The split with the last key also norms and rotates the new key, and writes it and the
    new value to the cache if they have a slot. Results are written as in decode_kernel: to out, or as partial results.

    q_ptr, out_ptr: [R, H, d]; k_ptr, v_ptr: [R, K, d]; strides without HEAD in their names are those of tokens.
    q_weight_ptr, k_weight_ptr: [d], or None without norms; cos_ptr, sin_ptr: [R, d]. OFFSET, WIDE: see Rotation.
    cache_ptr: [N, 2, P, K, WIDTH]; scales_ptr: see triton_codes. sinks_ptr: [H] or None.
    partial_ptr, partial_max_ptr, partial_sum_ptr: see triton_combine.Partials.
    slot_mapping_ptr, seq_lens_ptr, block_table_ptr: see AttentionInputs.
    scale_log2, CAP_SCALE: see triton_tile.scales. min_keys, GRAIN: see work_list.split_length. WINDOW: keys that a
        query sees, 0: all.
    FIRST_N: keys of the first tile; TILE_N: keys of later tiles; TILE_M, TILE_D: GROUP and HEAD_DIM, rounded up.
    STRIDE_MULTIPLE: a divisor of all token strides but out's.
    """
    kv_head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    # Lengths, block table and slots were written before the kernels that this one may overlap with.
    seq_len = tl.load(seq_lens_ptr + request)
    slot = tl.load(slot_mapping_ptr + request)
    first_key = first_seen(seq_len, WINDOW)
    num_keys = seq_len - first_key
    length = split_length(num_keys, num_splits, min_keys, GRAIN)
    first_key += split * length
    end_key = tl.minimum(first_key + length, seq_len)
    # Without a slot, the cache already holds this step's key.
    writes = (slot >= 0) & (end_key == seq_len) & (first_key < end_key)
    end_cached = end_key - writes.to(tl.int32)

    d_D = tl.arange(0, TILE_D)
    table_ptr = block_table_ptr + request * table_stride
    head_cache_ptr = cache_ptr + kv_head * HEAD_DIM
    head_scales_ptr = None
    if scales_ptr is not None:
        head_scales_ptr = scales_ptr + kv_head
    V_OFFSET: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS * WIDTH
    keys_N = first_key + tl.arange(0, FIRST_N)
    cached_N = keys_N < end_cached
    block_N = blocks_of(table_ptr, keys_N, end_cached, BLOCK_SIZE)
    k_ptrs_N = head_cache_ptr + key_offset(block_N, keys_N, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH)
    k_ND = load_rows(k_ptrs_N, cached_N, True, HEAD_DIM, TILE_D)
    v_ND = load_rows(k_ptrs_N + V_OFFSET, cached_N, True, HEAD_DIM, TILE_D)
    k_scale_N = None
    v_scale_N = None
    if head_scales_ptr is not None:
        k_scale_N, v_scale_N = load_scales(
            head_scales_ptr, block_N, keys_N, cached_N, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH
        )
    if DEPENDENT_LAUNCH:
        gdc_wait()
        # Not earlier: the next kernels' weights would be loaded before this kernel's keys.
        gdc_launch_dependents()
    if (split > 0) & (first_key >= end_key):
        return

    rows_M = tl.arange(0, TILE_M)
    mask_M = rows_M < GROUP
    mask_MD = mask_M[:, None] & (d_D[None, :] < HEAD_DIM)
    heads_M = kv_head * GROUP + rows_M
    cos_ptr += tl.multiple_of(request * cos_stride, STRIDE_MULTIPLE)
    sin_ptr += tl.multiple_of(request * sin_stride, STRIDE_MULTIPLE)
    q_MD = normed_and_rotated(
        q_ptr + tl.multiple_of(request * q_stride, STRIDE_MULTIPLE),
        q_weight_ptr,
        cos_ptr,
        sin_ptr,
        heads_M[:, None] * Q_HEAD_STRIDE,
        d_D[None, :],
        mask_MD,
        eps,
        HEAD_DIM,
        OFFSET,
        WIDE,
    )
    q_MD = product_type(q_MD, cache_ptr.dtype.element_ty)
    acc_MD = tl.zeros([TILE_M, TILE_D], tl.float32)
    max_M = tl.full([TILE_M], LOWEST, tl.float32)
    sum_M = tl.zeros([TILE_M], tl.float32)
    if writes:
        mask_D = d_D < HEAD_DIM
        k_D = normed_and_rotated(
            k_ptr + tl.multiple_of(request * k_stride, STRIDE_MULTIPLE),
            k_weight_ptr,
            cos_ptr,
            sin_ptr,
            kv_head * K_HEAD_STRIDE,
            d_D,
            mask_D,
            eps,
            HEAD_DIM,
            OFFSET,
            WIDE,
        )
        v_row = tl.multiple_of(request * v_stride, STRIDE_MULTIPLE) + kv_head * V_HEAD_STRIDE
        v_D = tl.load(v_ptr + v_row + d_D, mask=mask_D, other=0.0)
        new_ptrs_D = (
            head_cache_ptr + key_offset(slot // BLOCK_SIZE, slot, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH) + d_D
        )
        if cache_ptr.dtype.element_ty != q_ptr.dtype.element_ty:
            # This step attends to the quantised key and value, as later steps will.
            element: tl.constexpr = cache_ptr.dtype.element_ty
            k_scale_ptr, v_scale_ptr = scale_pointers(
                head_scales_ptr,  # type: ignore[arg-type]
                slot // BLOCK_SIZE,
                slot,
                BLOCK_SIZE,
                NUM_KV_HEADS,
                HEAD_DIM,
                WIDTH,
            )
            k_D, k_scale = rounded_head(k_D, k_scale_ptr, element)
            v_D, v_scale = rounded_head(v_D, v_scale_ptr, element)
            tl.store(new_ptrs_D, k_D, mask=mask_D)
            tl.store(new_ptrs_D + V_OFFSET, v_D, mask=mask_D)
            k_D = numbers(k_D, tl.float32)
            v_D = numbers(v_D, tl.float32)
            score_M = tl.sum(q_MD.to(tl.float32) * k_D[None, :], 1) * k_scale
            max_M = capped(score_M, CAP_SCALE) + tl.log2(v_scale) / scale_log2
            sum_M += 1.0 / v_scale
        else:
            tl.store(new_ptrs_D, k_D, mask=mask_D)
            tl.store(new_ptrs_D + V_OFFSET, v_D, mask=mask_D)
            max_M = capped(tl.sum(q_MD.to(tl.float32) * k_D.to(tl.float32)[None, :], 1), CAP_SCALE)
            sum_M += 1.0
        acc_MD += v_D.to(tl.float32)[None, :]

    scores_MN = scores_of((q_MD,), (k_ND,), k_scale_N, v_scale_N, scale_log2, CAP_SCALE)
    scores_MN = tl.where(cached_N[None, :], scores_MN, float("-inf"))
    weights_MN, rescale_M, max_M = weigh(scores_MN, max_M, scale_log2)
    acc_MD *= rescale_M[:, None]
    sum_M = sum_M * rescale_M + sum_of(weights_MN, v_scale_N)
    acc_parts = add_values((acc_MD,), weights_MN, (v_ND,), q_MD.dtype)
    acc_parts, max_M, sum_M = fold_keys(
        (q_MD,),
        acc_parts,
        max_M,
        sum_M,
        None,
        table_ptr,
        HeadCache(head_cache_ptr, head_scales_ptr, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH),
        first_key + FIRST_N,
        end_cached,
        scale_log2,
        0,
        CAP_SCALE,
        TILE_N,
        TILE_D,
        False,
    )
    out_ptr += tl.multiple_of(request * out_stride, 8)
    if length >= num_keys:
        out_MD = normalised(acc_parts[0], max_M, sum_M, sinks_ptr, heads_M, mask_M, scale_log2)
        out_ptrs_MD = out_ptr + heads_M[:, None] * OUT_HEAD_STRIDE + d_D[None, :]
        tl.store(out_ptrs_MD, out_MD.to(out_ptr.dtype.element_ty), mask=mask_MD)
        return
    partials_M = (request * (NUM_KV_HEADS * GROUP) + heads_M) * num_splits + split
    partials = partial_ptr, partial_max_ptr, partial_sum_ptr
    store_partials(*partials, partials_M, mask_M, acc_parts, max_M, sum_M, HEAD_DIM, TILE_D)


def rope_decode(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    rotation: Rotation,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    num_decodes: int,
    splits: Splits,
    scoring: Scoring,
) -> None:
    """Norm and rotate q and k, store k and v, and write the attention of the first num_decodes tokens to out_THd.

    These tokens are the queries of the first requests. q_THd, out_THd: [T, H, d]; k_TKd, v_TKd: [T, K, d]; d
    contiguous. If there are several splits, a second kernel combines them.
    """
    tiles = decode_tiles(q_THd.shape[2], q_THd.element_size(), splits.programs)
    rotating = RotatingArguments.of(q_THd, k_TKd, v_TKd, rotation)
    constants = paged_constants(q_THd, kv_cache_N2PKd, out_THd, scoring, tiled=True)
    partials = Partials.of(out_THd, num_decodes, splits.count)
    rope_decode_kernel[(kv_cache_N2PKd.shape[3], num_decodes, splits.count)](
        *rotating.tensors,
        kv_cache_N2PKd,
        scales_of(kv_cache_N2PKd, scoring.kv_scales_2K),
        out_THd,
        *partials,
        inputs.slot_mapping_T,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scoring.sinks_H,
        rotation.eps,
        scales(scoring)[0],
        inputs.block_table_RB.stride(0),
        *rotating.token_strides,
        out_THd.stride(0),
        splits.min_keys,
        **rotating.constants,
        **constants,
        TILE_M=rows_of(constants["GROUP"]),
        FIRST_N=tiles.keys,
        TILE_N=tiles.keys,
        GRAIN=GRAIN,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
        **dependent_launch(q_THd.device),
    )
    if splits.count > 1:
        combine_splits(partials, out_THd, inputs, splits, scoring)
