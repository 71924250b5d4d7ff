"""Gluon kernel for Hopper: decode attention over an 8-bit cache, which can also rotate q and k and write k and v.

Tiles of codes (quantised values) pass through a ring buffer in shared memory. Codes are converted to half precision in
registers, in the order in which the tensor cores take them: four codes need two byte permutations and at most two
subtractions (int8), or two conversions (FP8). For a thread to read neighbouring bytes of a value, the columns of
results are permuted, see `column_of`.

Scales are applied to scores, weights or sums, never to elements. Keys are split between programs as in
triton_decode.py, and the same kernel combines the splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.backends.decode_splits import (
    GRAIN,
    LONG_SPLIT,
    MAX_SPLITS,
    SHORT_CONTEXTS,
    Splits,
    short_splits,
)
from compiled_engine.attention.backends.kernel_arguments import (
    STEP_NUMBERS,
    STEP_TENSORS,
    NewKeys,
    RotatingArguments,
    paged_constants,
)
from compiled_engine.attention.backends.short_decode import ROWS, barrier, copy_ahead
from compiled_engine.attention.backends.triton_combine import Partials, combine_splits
from compiled_engine.attention.backends.triton_tile import LOWEST, capped, first_seen, normalised, scales
from compiled_engine.attention.backends.work_list import split_length
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.attention.triton_codes import (
    ONE_SCALE,
    bfloat16_values,
    codes_of,
    key_offset,
    numbers,
    scale_offset,
    scale_pointers,
    scales_of,
    stored_scale,
)
from compiled_engine.attention.triton_rotation import turned
from compiled_engine.kernels.launcher import quick_launches

# Neighbouring codes that a thread copies at once: 16 bytes.
COPIED = gl.constexpr(16)
# Consecutive keys that are looked up together, since they share a block.
PART = gl.constexpr(16)
# 1024 + a byte is 0x6400 | the byte in half precision; 1152 is 1024 + the bias of codes.
INT8_RAW_HALVES = gl.constexpr(
    "{ .reg .b32 c; mov.b32 c, 0x64646464; prmt.b32 $0, $2, c, 0x4140; prmt.b32 $1, $2, c, 0x4342; }"
)
RAW_BIAS = gl.constexpr(1152.0)
INT8_HALVES = gl.constexpr(
    "{ .reg .b32 c; mov.b32 c, 0x64646464; prmt.b32 $0, $2, c, 0x4140; prmt.b32 $1, $2, c, 0x4342;"
    " mov.b32 c, 0x64806480; sub.rn.f16x2 $0, $0, c; sub.rn.f16x2 $1, $1, c; }"
)
FP8_HALVES = gl.constexpr(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)


@gluon.jit
def halves(codes):  # type: ignore[no-untyped-def]
    """Return the numbers that 8-bit codes of keys or values stand for, float16, not yet multiplied by their scales."""
    if codes.dtype == gl.uint8:
        values = gl.inline_asm_elementwise(INT8_HALVES, "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4)
    else:
        values = gl.inline_asm_elementwise(FP8_HALVES, "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4)
    return values


@gluon.jit
def raw_halves(codes):  # type: ignore[no-untyped-def]
    """Return what `halves` does for int8 codes, but with the constant RAW_BIAS added to each number.

    This saves a subtraction for each code. The caller instead subtracts RAW_BIAS times the sum of a query's elements
    from the query's scores.
    """
    return gl.inline_asm_elementwise(INT8_RAW_HALVES, "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4)


@gluon.constexpr_function
def value_layout(keys: int, head_dim: int, warps: int) -> Any:
    """Return the register layout of a tile of values (V), [keys, head_dim], in a program of `warps` warps.

    Each thread reads neighbouring elements of the values that it needs for its part of the matrix product.
    """
    near = head_dim // (8 * warps)
    registers = [[0, 1 << i] for i in range(near.bit_length() - 1)] + [[1, 0]]
    registers += [[8 << i, 0] for i in range((keys // 8).bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, near], [0, 2 * near], [0, 4 * near]]
    by_warp = [[0, (8 * near) << i] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, by_warp, [], [keys, head_dim])


@gluon.jit
def column_of(d_D, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return which element of the head is in column d_D of the results, whose columns are permuted; see the module."""
    return d_D % (8 * WARPS) * (HEAD_DIM // (8 * WARPS)) + d_D // (8 * WARPS)


@gluon.jit
def _values_of(v_smem, layout: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the values (V) of a tile whose codes are in shared memory, float16 [KEYS, HEAD_DIM], not yet scaled.

    The result is laid out as the right operand of the tensor cores. Its columns are permuted as in `column_of`.
    """
    near: gl.constexpr = HEAD_DIM // (8 * WARPS)
    v_ND = halves(v_smem.load(value_layout(KEYS, HEAD_DIM, WARPS)))
    v_ND = v_ND.reshape([KEYS, 8 * WARPS, near]).permute((0, 2, 1)).reshape([KEYS, HEAD_DIM])
    return gl.convert_layout(v_ND, gl.DotOperandLayout(1, layout, 2), assert_trivial=True)


@gluon.jit
def _blocks(table_ptr, first_key, end_key, n_N, KEYS: gl.constexpr, BLOCK_SIZE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the block id of each key of a tile; 0 for keys from position end_key on.

    table_ptr: the request's row of the block table, read once for each PART consecutive keys, which share a block.
    first_key: position of the tile's first key, a multiple of PART. n_N: the tile's keys, counted from first_key.
    """
    block_N = n_N * 0
    for part in gl.static_range(KEYS // PART):
        key = first_key + part * PART
        block = gl.load(table_ptr + key.to(gl.uint32) // BLOCK_SIZE, mask=key < end_key, other=0)
        block_N = gl.where(n_N // PART == part, block, block_N)
    return block_N


@gluon.jit
def _slots(first_key, n_N, KEYS: gl.constexpr, BLOCK_SIZE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offset of each key of a tile within its block. first_key, n_N: as in _blocks."""
    slot_N = n_N % PART
    if BLOCK_SIZE != PART:
        for part in gl.static_range(KEYS // PART):
            start = ((first_key + part * PART).to(gl.uint32) % BLOCK_SIZE).to(gl.int32)
            slot_N = gl.where(n_N // PART == part, start + n_N % PART, slot_N)
    return slot_N


@gluon.jit
def _copy_tile(  # type: ignore[no-untyped-def]
    k_smem,
    v_smem,
    block_N,
    head_cache_ptr,
    first_key,
    end_key,
    layout: gl.constexpr,
    KEYS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """Start to copy a tile's key and value codes to shared memory, [KEYS, HEAD_DIM] each; zeros from end_key on.

    block_N: the block id of each key. head_cache_ptr: the cache from the K/V head on.
    """
    n_N = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    d_D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    slot_N = _slots(first_key, n_N, KEYS, BLOCK_SIZE)
    offset_N = key_offset(block_N, slot_N, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH)
    pointers_ND = head_cache_ptr + offset_N[:, None] + d_D[None, :]
    stored_N1 = (n_N < end_key - first_key)[:, None]
    copy_ahead(k_smem, pointers_ND, mask=stored_N1)
    copy_ahead(v_smem, pointers_ND + BLOCK_SIZE * NUM_KV_HEADS * WIDTH, mask=stored_N1)
    async_copy.commit_group()


@gluon.jit
def _load_scales(  # type: ignore[no-untyped-def]
    head_scales_ptr,
    block_N,
    first_key,
    end_key,
    n_N,
    KEYS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """Return (scales of a tile's int8 keys, scales of its values) as bits of bfloat16; scale 1 from key end_key on."""
    slot_N = _slots(first_key, n_N, KEYS, BLOCK_SIZE)
    offset_N = scale_offset(block_N, slot_N, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH)
    stored_N = n_N < end_key - first_key
    k_bits_N = gl.load(head_scales_ptr + offset_N, mask=stored_N, other=ONE_SCALE)
    v_ptrs_N = head_scales_ptr + offset_N + BLOCK_SIZE * NUM_KV_HEADS * WIDTH // 2
    return k_bits_N, gl.load(v_ptrs_N, mask=stored_N, other=ONE_SCALE)


@gluon.jit
def _log2(x):  # type: ignore[no-untyped-def]
    """Return log2(x) in one instruction. x: positive and normal."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _inverse(x):  # type: ignore[no-untyped-def]
    """Return 1 / x in one instruction. x: positive and normal."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _stored_scale(x_1D, scale_ptr, writes):  # type: ignore[no-untyped-def]
    """Return the fp32 scale for quantising a head to int8, and store it at scale_ptr if `writes` is set.

    x_1D: the head, fp32.
    """
    stored = stored_scale(gl.max(gl.max(gl.abs(x_1D), 1), 0), gl.uint8)
    gl.store(scale_ptr, stored, mask=writes)
    return bfloat16_values(stored)


@quick_launches
@gluon.jit(
    do_not_specialize=STEP_NUMBERS,
    do_not_specialize_on_alignment=[*STEP_TENSORS, "partial_max_ptr", "partial_sum_ptr"],
)
def coded_decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    scales_ptr,
    out_ptr,
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    block_table_ptr,
    sinks_ptr,
    eps,
    scale_log2,
    table_stride,
    q_stride,
    k_stride,
    v_stride,
    cos_stride,
    sin_stride,
    out_stride,
    min_keys,
    STRIDE_MULTIPLE: gl.constexpr,
    Q_HEAD_STRIDE: gl.constexpr,
    K_HEAD_STRIDE: gl.constexpr,
    V_HEAD_STRIDE: gl.constexpr,
    OUT_HEAD_STRIDE: gl.constexpr,
    OFFSET: gl.constexpr,
    WIDE: gl.constexpr,
    WINDOW: gl.constexpr,
    CAP_SCALE: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WIDTH: gl.constexpr,
    KEYS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    RAW_KEYS: gl.constexpr,
    GRAIN: gl.constexpr,
):
    """Compute decode attention. Program (K/V head, request, split) computes a query's GROUP heads over a split's keys.

    It first norms and rotates q. The split with the last key also norms and rotates the new key, and writes it and the
    new value to the cache if they have a slot. With k_ptr None, queries are rotated already, and keys and values are in
    the cache. Results are written as in triton_decode.decode_kernel: to out, or as partial results.

    q_ptr, out_ptr: [R, H, d]; k_ptr, v_ptr: [R, K, d]; strides without HEAD in their names are those of tokens.
    q_weight_ptr, k_weight_ptr: [d], or None without norms; cos_ptr, sin_ptr: [R, d]. OFFSET, WIDE: see Rotation.
    cache_ptr: codes [N, 2, P, K, WIDTH]; scales_ptr: see triton_codes. sinks_ptr: [H] or None.
    partial_ptr, partial_max_ptr, partial_sum_ptr: see triton_combine.Partials.
    slot_mapping_ptr, seq_lens_ptr, block_table_ptr: see AttentionInputs.
    scale_log2, CAP_SCALE: see triton_tile.scales. min_keys, GRAIN: see work_list.split_length. WINDOW: keys that a
        query sees, 0: all.
    KEYS: keys of a tile; STAGES: tiles in the ring buffer; RAW_KEYS: see raw_halves.
    STRIDE_MULTIPLE: a divisor of all token strides but out's.
    """
    kv_head = gl.program_id(0)
    request = gl.program_id(1).to(gl.int64)
    split = gl.program_id(2)
    num_splits = gl.num_programs(2)
    # Lengths, block table and slots were written before the kernels that this one may overlap with.
    seq_len = gl.load(seq_lens_ptr + request)
    first_key = first_seen(seq_len, WINDOW)
    num_keys = seq_len - first_key
    length = split_length(num_keys, num_splits, min_keys, GRAIN)
    first_key += split * length
    end_key = gl.minimum(first_key + length, seq_len)
    if k_ptr is not None:
        slot = gl.load(slot_mapping_ptr + request)
        # Without a slot, the cache already holds this step's key.
        writes = (slot >= 0) & (end_key == seq_len) & (first_key < end_key)
        end_cached = end_key - writes.to(gl.int32)
    else:
        end_cached = end_key
        gdc_wait()
        gdc_launch_dependents()
    if (split > 0) & (first_key >= end_key):
        return

    element: gl.constexpr = cache_ptr.dtype.element_ty
    scaled: gl.constexpr = WIDTH != HEAD_DIM
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    # Layouts of 16-bit elements and of codes; a thread reads or copies 16 bytes at a time.
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    copy_layout: gl.constexpr = gl.BlockedLayout(
        [1, COPIED], [32 * COPIED // HEAD_DIM, HEAD_DIM // COPIED], [WARPS, 1], [1, 0]
    )
    shared: gl.constexpr = gl.SwizzledSharedLayout(COPIED, 128 // HEAD_DIM, HEAD_DIM // COPIED, [1, 0])
    # Neighbouring elements of a key that a thread multiplies, so that one product takes a whole head.
    NEAR: gl.constexpr = HEAD_DIM // 8
    q_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    table_ptr = block_table_ptr + request * table_stride
    head_cache_ptr = cache_ptr + kv_head * HEAD_DIM
    head_scales_ptr = scales_ptr + kv_head
    q_smem = gl.allocate_shared_memory(gl.float16, [ROWS, HEAD_DIM], q_shared)
    k_ring = gl.allocate_shared_memory(element, [STAGES, KEYS, HEAD_DIM], shared)
    v_ring = gl.allocate_shared_memory(element, [STAGES, KEYS, HEAD_DIM], shared)

    copy_N = gl.arange(0, KEYS, layout=gl.SliceLayout(1, copy_layout))
    n_N = gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
    start = first_key
    if WINDOW > 0:
        start = first_key // PART * PART
    num_tiles = (end_cached - start + KEYS - 1) // KEYS
    block_N = _blocks(table_ptr, start, end_cached, copy_N, KEYS, BLOCK_SIZE)
    for stage in gl.static_range(STAGES - 1):
        next_block_N = _blocks(table_ptr, start + (stage + 1) * KEYS, end_cached, copy_N, KEYS, BLOCK_SIZE)
        _copy_tile(
            k_ring.index(stage),
            v_ring.index(stage),
            block_N,
            head_cache_ptr,
            start + stage * KEYS,
            end_cached,
            copy_layout,
            KEYS,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            HEAD_DIM,
            WIDTH,
        )
        block_N = next_block_N
    if scaled:
        scale_block_N = _blocks(table_ptr, start, end_cached, n_N, KEYS, BLOCK_SIZE)
        k_bits_N, v_bits_N = _load_scales(
            head_scales_ptr,
            scale_block_N,
            start,
            end_cached,
            n_N,
            KEYS,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            HEAD_DIM,
            WIDTH,
        )
        scale_block_N = _blocks(table_ptr, start + KEYS, end_cached, n_N, KEYS, BLOCK_SIZE)
        k_scale = 1.0
        v_scale = 1.0
    else:
        k_scale = gl.load(head_scales_ptr)
        v_scale = gl.load(head_scales_ptr + NUM_KV_HEADS)
    # From here on a weight is 2 ** score.
    product_scale = scale_log2
    if CAP_SCALE > 0:
        product_scale = 1.0

    d_1D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, row_layout))[None, :]
    row_M = gl.arange(0, ROWS, layout=gl.SliceLayout(1, row_layout))
    column_D = column_of(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout)), HEAD_DIM, WARPS)
    q_ptr += gl.multiple_of(request * q_stride, STRIDE_MULTIPLE)
    q_ptrs_M1 = q_ptr + (kv_head * GROUP + row_M)[:, None] * Q_HEAD_STRIDE
    mask_M1 = (row_M < GROUP)[:, None]
    max_M = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, layout))
    sum_M = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    acc_MD = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout)
    if k_ptr is None:
        q_MD = gl.load(q_ptrs_M1 + d_1D, mask=mask_M1, other=0.0).to(gl.float16)
    else:
        other_1D = (d_1D + HEAD_DIM // 2) % HEAD_DIM
        q_weight_1D = None
        other_q_weight_1D = None
        k_weight_1D = None
        other_k_weight_1D = None
        if q_weight_ptr is not None:
            q_weight_1D = gl.load(q_weight_ptr + d_1D)
            other_q_weight_1D = gl.load(q_weight_ptr + other_1D)
            k_weight_1D = gl.load(k_weight_ptr + d_1D)
            other_k_weight_1D = gl.load(k_weight_ptr + other_1D)
        gdc_wait()
        # Not earlier: the next kernels' weights would be loaded before this kernel's keys.
        gdc_launch_dependents()
        # All loads are issued before the first wait.
        k_ptr += gl.multiple_of(request * k_stride, STRIDE_MULTIPLE) + kv_head * K_HEAD_STRIDE
        v_ptr += gl.multiple_of(request * v_stride, STRIDE_MULTIPLE) + kv_head * V_HEAD_STRIDE
        q_MD = gl.load(q_ptrs_M1 + d_1D, mask=mask_M1, other=0.0).to(gl.float32)
        other_q_MD = gl.load(q_ptrs_M1 + other_1D, mask=mask_M1, other=0.0).to(gl.float32)
        k_1D = gl.load(k_ptr + d_1D).to(gl.float32)
        other_k_1D = gl.load(k_ptr + other_1D).to(gl.float32)
        cos_1D = gl.load(cos_ptr + gl.multiple_of(request * cos_stride, STRIDE_MULTIPLE) + d_1D).to(gl.float32)
        sin_1D = gl.load(sin_ptr + gl.multiple_of(request * sin_stride, STRIDE_MULTIPLE) + d_1D).to(gl.float32)
        v_1D = gl.load(v_ptr + d_1D).to(gl.float32)
        v_D = gl.load(v_ptr + column_D).to(gl.float32)
        q_MD = turned(
            q_MD, other_q_MD, q_weight_1D, other_q_weight_1D, cos_1D, sin_1D, d_1D, eps, HEAD_DIM, OFFSET, WIDE, dtype
        ).to(gl.float16)
        k_1D = turned(
            k_1D, other_k_1D, k_weight_1D, other_k_weight_1D, cos_1D, sin_1D, d_1D, eps, HEAD_DIM, OFFSET, WIDE, dtype
        )
        # This step attends to the quantised key and value, as later steps will.
        k_1D = k_1D.to(gl.float32)
        new_k_scale = k_scale
        new_v_scale = v_scale
        if scaled:
            k_scale_ptr, v_scale_ptr = scale_pointers(
                head_scales_ptr, slot // BLOCK_SIZE, slot, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH
            )
            new_k_scale = _stored_scale(k_1D, k_scale_ptr, writes)
            new_v_scale = _stored_scale(v_1D, v_scale_ptr, writes)
        k_1D = codes_of(k_1D, new_k_scale, element)
        v_D = codes_of(v_D, new_v_scale, element)
        new_ptr = head_cache_ptr + key_offset(slot // BLOCK_SIZE, slot, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH)
        gl.store(new_ptr + d_1D, k_1D, mask=(d_1D < HEAD_DIM) & writes)
        v_ptrs_D = new_ptr + BLOCK_SIZE * NUM_KV_HEADS * WIDTH + column_D
        gl.store(v_ptrs_D, v_D, mask=(column_D < HEAD_DIM) & writes)
        score_M = gl.sum(q_MD.to(gl.float32) * numbers(k_1D, gl.float32), 1) * (new_k_scale * product_scale)
        score_M = gl.convert_layout(score_M, gl.SliceLayout(1, layout))
        if CAP_SCALE > 0:
            score_M = capped(score_M, CAP_SCALE) * scale_log2
        if scaled:
            score_M += _log2(new_v_scale)
            sum_M = gl.where(writes, sum_M + _inverse(new_v_scale), 0.0)
        else:
            sum_M = gl.where(writes, sum_M + 1.0, 0.0)
        max_M = gl.where(writes, score_M, LOWEST)
        acc_MD += gl.where(writes, numbers(v_D, gl.float32), 0.0)[None, :]
    none_MN = gl.zeros([ROWS, KEYS], gl.float32, layout)
    RAW: gl.constexpr = scaled and RAW_KEYS
    if RAW:
        bias_M = gl.sum(q_MD.to(gl.float32), 1) * -RAW_BIAS
        none_MN += gl.convert_layout(bias_M, gl.SliceLayout(1, layout))[:, None]
    q_smem.store(q_MD)
    q_MD = q_smem.load(gl.DotOperandLayout(0, layout, NEAR))

    for tile in range(num_tiles):
        async_copy.wait_group(STAGES - 2)
        barrier()
        free = (tile + STAGES - 1) % STAGES
        _copy_tile(
            k_ring.index(free),
            v_ring.index(free),
            block_N,
            head_cache_ptr,
            start + (STAGES - 1) * KEYS,
            end_cached,
            copy_layout,
            KEYS,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            HEAD_DIM,
            WIDTH,
        )
        block_N = _blocks(table_ptr, start + STAGES * KEYS, end_cached, copy_N, KEYS, BLOCK_SIZE)
        hidden_N = n_N >= end_cached - start
        if WINDOW > 0:
            hidden_N = hidden_N | (n_N < first_key - start)
        if scaled:
            k_scale_N = bfloat16_values(k_bits_N) * product_scale
            v_scale_N = bfloat16_values(v_bits_N)
            k_bits_N, v_bits_N = _load_scales(
                head_scales_ptr,
                scale_block_N,
                start + KEYS,
                end_cached,
                n_N,
                KEYS,
                BLOCK_SIZE,
                NUM_KV_HEADS,
                HEAD_DIM,
                WIDTH,
            )
            scale_block_N = _blocks(table_ptr, start + 2 * KEYS, end_cached, n_N, KEYS, BLOCK_SIZE)
            # Scales of values are added to the scores as logarithms, see scores_of.
            shift_N = gl.where(hidden_N, float("-inf"), _log2(v_scale_N))
            part_N = _inverse(v_scale_N)
        else:
            k_scale_N = gl.where(hidden_N, k_scale, k_scale) * product_scale
            shift_N = gl.where(hidden_N, float("-inf"), 0.0)
            part_N = None
        k_DN = k_ring.index(tile % STAGES).permute((1, 0)).load(gl.DotOperandLayout(1, layout, NEAR))
        k_DN = raw_halves(k_DN) if RAW else halves(k_DN)
        scores_MN = mma_v2(q_MD, k_DN, none_MN)
        if CAP_SCALE > 0:
            scores_MN = capped(scores_MN * k_scale_N[None, :], CAP_SCALE) * scale_log2 + shift_N[None, :]
        else:
            scores_MN = scores_MN * k_scale_N[None, :] + shift_N[None, :]
        new_max_M = gl.maximum(max_M, gl.max(scores_MN, 1))
        rescale_M = gl.exp2(max_M - new_max_M)
        max_M = new_max_M
        weights_MN = gl.exp2(scores_MN - max_M[:, None])
        if scaled:
            sum_M = sum_M * rescale_M + gl.sum(weights_MN * part_N[None, :], 1)
        else:
            sum_M = sum_M * rescale_M + gl.sum(weights_MN, 1)
        weights_MN = gl.convert_layout(weights_MN.to(gl.float16), gl.DotOperandLayout(0, layout, 2))
        v_ND = _values_of(v_ring.index(tile % STAGES), layout, KEYS, HEAD_DIM, WARPS)
        acc_MD = mma_v2(weights_MN, v_ND, acc_MD * rescale_M[:, None])
        start += KEYS
    async_copy.wait_group(0)

    acc_MD *= v_scale
    row_M = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    head_M = kv_head * GROUP + row_M
    if length >= num_keys:
        out_MD = normalised(acc_MD, max_M, sum_M, sinks_ptr, head_M, row_M < GROUP, 1.0)
        out_ptrs_MD = out_ptr + request * out_stride + head_M[:, None] * OUT_HEAD_STRIDE + column_D[None, :]
        gl.store(out_ptrs_MD, out_MD.to(dtype), mask=(row_M < GROUP)[:, None])
    else:
        partial_M = (request * (NUM_KV_HEADS * GROUP) + head_M) * num_splits + split
        gl.store(partial_ptr + partial_M[:, None] * HEAD_DIM + column_D[None, :], acc_MD, mask=(row_M < GROUP)[:, None])
        gl.store(partial_max_ptr + partial_M, max_M / scale_log2, mask=row_M < GROUP)
        gl.store(partial_sum_ptr + partial_M, sum_M, mask=row_M < GROUP)


# Programs that share a multiprocessor, limited by their registers.
PROGRAMS = 4
# Keys of a tile where all tiles of a short context are read at once.
SHORT_KEYS = 128


@dataclass(frozen=True)
class CodedPlan:
    """The splits of a request's keys, the keys of a tile, and the compile options of coded_decode_kernel."""

    splits: Splits
    keys: int = 64  # per tile
    warps: int = 4  # per program
    stages: int = 2  # of the ring buffer of tiles
    raw_keys: bool = True  # subtract the bias of int8 keys from scores instead of keys, which is faster for many tiles
    registers: int = 128  # most per thread, so that more programs share a multiprocessor; 0: no limit


def coded_plan(num_requests: int, num_kv_heads: int, max_seq_len: int, num_sms: int, scaled: bool) -> CodedPlan:
    """Return splits and tiles for coded_decode_kernel. They depend only on a CUDA graph's key and on the device.

    max_seq_len: the host's upper bound of the keys that a request reads. num_sms: multiprocessors of the GPU. scaled:
    the cache holds scales (int8).

    With at most one program per multiprocessor, short contexts are split as in short_splits, and the ring buffer of an
    unsplit context has room for all its keys. Otherwise keys are split until each multiprocessor has about PROGRAMS
    programs, and further if a split would exceed LONG_SPLIT keys.
    """
    num_programs = num_requests * num_kv_heads
    if num_programs <= num_sms and (splits := short_splits(num_requests, max_seq_len, SHORT_CONTEXTS)):
        if splits.count > 1:
            return CodedPlan(splits, stages=3, raw_keys=False, registers=0)
        stages = 1 + next(context for context in SHORT_CONTEXTS if max_seq_len <= context) // SHORT_KEYS
        return CodedPlan(splits, SHORT_KEYS, 8 if scaled else 4, stages, raw_keys=False, registers=0)
    most = min(max(-(-max_seq_len // GRAIN), 1), MAX_SPLITS)
    count = min(max(PROGRAMS * num_sms // num_programs, 1), most)
    to_shorten = min(-(-max_seq_len // LONG_SPLIT), MAX_SPLITS)
    return CodedPlan(Splits(count, GRAIN) if count >= to_shorten else Splits(to_shorten, LONG_SPLIT // 16))


def coded_decode(
    q_THd: torch.Tensor,
    new: NewKeys | None,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    num_decodes: int,
    plan: CodedPlan,
    scoring: Scoring,
) -> None:
    """Write the attention of the first num_decodes tokens, the queries of the first requests, from q_THd to out_THd.

    q_THd, out_THd: [T, H, d], 16 bits, d contiguous. kv_cache_N2PKd: 8 bits, contiguous.
    new: this step's keys and values. The kernel rotates queries and keys, and writes keys and values to the cache.
        None: queries are rotated already, and the cache has the keys and values.

    If there are several splits, a second kernel combines them. See exists_on_hopper for the supported sizes.
    """
    splits = plan.splits
    rotating = RotatingArguments.of_rotated(q_THd) if new is None else RotatingArguments.of(q_THd, *new)
    partials = Partials.of(out_THd, num_decodes, splits.count)
    coded_decode_kernel[(kv_cache_N2PKd.shape[3], num_decodes, splits.count)](
        *rotating.tensors,
        kv_cache_N2PKd,
        scales_of(kv_cache_N2PKd, scoring.kv_scales_2K),
        out_THd,
        *partials,
        inputs.slot_mapping_T,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scoring.sinks_H,
        0.0 if new is None else new.rotation.eps,
        scales(scoring)[0],
        inputs.block_table_RB.stride(0),
        *rotating.token_strides,
        out_THd.stride(0),
        splits.min_keys,
        **rotating.constants,
        **paged_constants(q_THd, kv_cache_N2PKd, out_THd, scoring),
        WIDTH=kv_cache_N2PKd.shape[4],
        KEYS=plan.keys,
        WARPS=plan.warps,
        STAGES=plan.stages,
        RAW_KEYS=plan.raw_keys,
        GRAIN=GRAIN,
        maxnreg=plan.registers or None,
        num_warps=plan.warps,
        launch_pdl=True,
    )
    if splits.count > 1:
        combine_splits(partials, out_THd, inputs, splits, scoring)
