"""Gluon kernel for Hopper: decode attention without splits, which also norms and rotates q and k, and writes k and v.

One program handles all keys of a request and K/V head, so there are no splits to combine. Keys of earlier steps do not
depend on the kernels just before this one, so with programmatic dependent launch the first of them are loaded before
the wait for these kernels.

Short contexts are read at once: keys into the registers from which the tensor cores take them, values into shared
memory. Otherwise tiles of both pass through a ring buffer in shared memory, which leaves registers for more programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.backends.decode_splits import SHORT_CONTEXTS
from compiled_engine.attention.backends.kernel_arguments import (
    STEP_NUMBERS,
    STEP_TENSORS,
    RotatingArguments,
    paged_constants,
)
from compiled_engine.attention.backends.triton_tile import (
    LOWEST,
    blocks_of,
    capped,
    first_seen,
    normalised,
    scales,
    weigh,
)
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring
from compiled_engine.attention.triton_codes import row_of
from compiled_engine.attention.triton_rotation import turned
from compiled_engine.kernels.launcher import quick_launches

# Neighbouring elements that a thread loads at once: 16 bytes.
WIDTH = gl.constexpr(8)
# Triton 3.9 has other names for both.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy_ahead = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def weighed(  # type: ignore[no-untyped-def]
    q_MD, k_DN, max_M, sum_M, seen_MN, scale_log2, layout: gl.constexpr, KEYS: gl.constexpr, CAP_SCALE: gl.constexpr
):
    """Return (weights of a tile's keys, factor for the values summed so far, new largest score, new sum of weights).

    See triton_tile.weigh. Keys that a query does not see have weight 0.

    q_MD, k_DN: operands of the tensor cores. seen_MN: mask of keys that queries see. The weights are an operand of the
    product with values.
    """
    scores_MN = mma_v2(q_MD, k_DN, gl.zeros([q_MD.shape[0], KEYS], gl.float32, layout))
    scores_MN = gl.where(seen_MN, capped(scores_MN, CAP_SCALE), float("-inf"))
    weights_MN, rescale_M, max_M = weigh(scores_MN, max_M, scale_log2)
    sum_M = sum_M * rescale_M + gl.sum(weights_MN, 1)
    weights_MN = gl.convert_layout(weights_MN.to(q_MD.dtype), gl.DotOperandLayout(0, layout, 2))
    return weights_MN, rescale_M, max_M, sum_M


@gluon.jit
def first_keys(num_keys, layout: gl.constexpr, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return a mask [1, KEYS] of the first num_keys keys of a tile."""
    return (gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout)) < num_keys)[None, :]


@gluon.jit
def load_keys(  # type: ignore[no-untyped-def]
    table_ptr,
    head_cache_ptr,
    first_key,
    end_key,
    layout: gl.constexpr,
    KEYS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Return a tile of keys, [HEAD_DIM, KEYS], loaded from first_key on; zeros from end_key on.

    table_ptr: the request's row of the block table. head_cache_ptr: the cache from the K/V head on. ROW: K * d.
    """
    key_N = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
    d_D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, layout))
    row_N = row_of(blocks_of(table_ptr, key_N, end_key, BLOCK_SIZE), key_N, BLOCK_SIZE) * ROW
    return gl.load(head_cache_ptr + row_N[None, :] + d_D[:, None], mask=(key_N < end_key)[None, :], other=0.0)


@gluon.jit
def copy_values(  # type: ignore[no-untyped-def]
    smem,
    table_ptr,
    head_cache_ptr,
    first_key,
    end_key,
    layout: gl.constexpr,
    KEYS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Start to copy a tile of values, [KEYS, HEAD_DIM], to shared memory; zeros from end_key on. See load_keys."""
    key_N = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    d_D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    row_N = row_of(blocks_of(table_ptr, key_N, end_key, BLOCK_SIZE), key_N, BLOCK_SIZE) * ROW + BLOCK_SIZE * ROW
    copy_ahead(smem, head_cache_ptr + row_N[:, None] + d_D[None, :], mask=(key_N < end_key)[:, None])
    async_copy.commit_group()


@gluon.jit
def attend_held(  # type: ignore[no-untyped-def]
    q_MD,
    k_DN,
    v_smem,
    acc_MD,
    max_M,
    sum_M,
    seen_MN,
    scale_log2,
    layout: gl.constexpr,
    KEYS: gl.constexpr,
    CAP_SCALE: gl.constexpr,
):
    """Return the online softmax's (acc, max, sum) of the queries, updated with a tile of keys.

    k_DN: keys, in registers; v_smem: values, still being copied; seen_MN: mask of the keys that each query sees.
    """
    weights_MN, rescale_M, max_M, sum_M = weighed(
        q_MD, k_DN, max_M, sum_M, seen_MN, scale_log2, layout, KEYS, CAP_SCALE
    )
    async_copy.wait_group(0)
    barrier()
    v_ND = v_smem.load(gl.DotOperandLayout(1, layout, 2))
    return mma_v2(weights_MN, v_ND, acc_MD * rescale_M[:, None]), max_M, sum_M


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
    ROW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Start to copy a tile's keys and values, [KEYS, HEAD_DIM] each, to shared memory; zeros from end_key on."""
    key_N = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    stored_N1 = (key_N < end_key)[:, None]
    d_D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    pointers_ND = head_cache_ptr + (row_of(block_N, key_N, BLOCK_SIZE) * ROW)[:, None] + d_D[None, :]
    copy_ahead(k_smem, pointers_ND, mask=stored_N1)
    copy_ahead(v_smem, pointers_ND + BLOCK_SIZE * ROW, mask=stored_N1)
    async_copy.commit_group()


@gluon.jit
def fill_ring(  # type: ignore[no-untyped-def]
    k_smem,
    v_smem,
    table_ptr,
    head_cache_ptr,
    first_key,
    end_key,
    layout: gl.constexpr,
    STAGES: gl.constexpr,
    KEYS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Start to copy as many tiles as the ring buffer holds, less one. Returns the block ids [KEYS] of the next tile."""
    key_N = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    block_N = blocks_of(table_ptr, key_N, end_key, BLOCK_SIZE)
    for stage in gl.static_range(STAGES - 1):
        next_block_N = blocks_of(table_ptr, key_N + (stage + 1) * KEYS, end_key, BLOCK_SIZE)
        first = first_key + stage * KEYS
        k_stage, v_stage = k_smem.index(stage), v_smem.index(stage)
        _copy_tile(k_stage, v_stage, block_N, head_cache_ptr, first, end_key, layout, KEYS, BLOCK_SIZE, ROW, HEAD_DIM)
        block_N = next_block_N
    return block_N


@gluon.jit
def attend_ring(  # type: ignore[no-untyped-def]
    q_MD,
    k_smem,
    v_smem,
    block_N,
    acc_MD,
    max_M,
    sum_M,
    table_ptr,
    head_cache_ptr,
    first_key,
    end_key,
    scale_log2,
    layout: gl.constexpr,
    row_layout: gl.constexpr,
    STAGES: gl.constexpr,
    KEYS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CAP_SCALE: gl.constexpr,
):
    """Return the online softmax's (acc, max, sum) of the queries, updated with all tiles of keys.

    Meanwhile copies the tiles that follow those of fill_ring. block_N: the block ids that fill_ring returned.
    """
    for tile in range((end_key - first_key + KEYS - 1) // KEYS):
        start = first_key + tile * KEYS
        async_copy.wait_group(STAGES - 2)
        barrier()
        ahead = start + (STAGES - 1) * KEYS
        free = (tile + STAGES - 1) % STAGES
        k_free, v_free = k_smem.index(free), v_smem.index(free)
        _copy_tile(k_free, v_free, block_N, head_cache_ptr, ahead, end_key, row_layout, KEYS, BLOCK_SIZE, ROW, HEAD_DIM)
        key_N = ahead + KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, row_layout))
        block_N = blocks_of(table_ptr, key_N, end_key, BLOCK_SIZE)
        k_DN = k_smem.index(tile % STAGES).permute((1, 0)).load(gl.DotOperandLayout(1, layout, 2))
        seen_1N = first_keys(end_key - start, layout, KEYS)
        weights_MN, rescale_M, max_M, sum_M = weighed(
            q_MD, k_DN, max_M, sum_M, seen_1N, scale_log2, layout, KEYS, CAP_SCALE
        )
        v_ND = v_smem.index(tile % STAGES).load(gl.DotOperandLayout(1, layout, 2))
        acc_MD = mma_v2(weights_MN, v_ND, acc_MD * rescale_M[:, None])
    async_copy.wait_group(0)
    return acc_MD, max_M, sum_M


# With these sizes a tile fits into registers and shared memory; query heads that share a K/V head are rows of a tile.
HEAD_DIMS = (64, 128)
MAX_GROUP = 16


@cache
def exists_on_hopper(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether Hopper's decode kernels serve these heads on the current GPU.

    The kernels are short_decode, short_drafts and coded_decode. They take 16-bit queries on compute capability 9.
    """
    fits = dtype.itemsize == 2 and head_dim in HEAD_DIMS and num_heads <= MAX_GROUP * num_kv_heads
    return fits and torch.cuda.get_device_capability()[0] == 9


@dataclass(frozen=True)
class ShortTiles:
    """The sizes of a program's tiles, and the options with which a kernel for short contexts is compiled."""

    keys: int  # per tile
    warps: int = 8  # per program
    stages: int = 0  # of the ring buffer of tiles; 0: keys are kept in registers
    registers: int = 0  # most per thread, so that more programs share a multiprocessor; 0: no limit

    @classmethod
    def of(cls, num_programs: int, num_sms: int, max_seq_len: int) -> ShortTiles:
        """Return tiles for num_programs programs (requests times K/V heads) and contexts of up to max_seq_len tokens.

        If each program has a multiprocessor to itself, a tile holds all keys. Otherwise two programs with many warps
        share a multiprocessor, so that the longest context is not slow. If there are so many programs that they balance
        each other, four or five with fewer warps share it.
        """
        if num_programs <= num_sms:
            return cls(next(context for context in SHORT_CONTEXTS if max_seq_len <= context))
        if num_programs <= 2 * num_sms or (num_programs <= 4 * num_sms and max_seq_len > SHORT_CONTEXTS[-1]):
            return SEVERAL
        return MANY if num_programs <= 8 * num_sms else MOST


# Two, four and five programs share a multiprocessor.
SEVERAL = ShortTiles(64, warps=8, stages=2)
MANY = ShortTiles(32, warps=4, stages=3, registers=128)
MOST = ShortTiles(32, warps=4, stages=2, registers=96)


# Rows of a tile of queries.
ROWS = gl.constexpr(16)


@quick_launches
@gluon.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_TENSORS)
def short_decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    out_ptr,
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
    KEYS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute decode attention. Program (K/V head, request) computes one query's GROUP heads over all keys.

    A program norms and rotates q and the new key, writes the new key and value to the cache if they have a slot, and
    writes the results to out.

    q_ptr, out_ptr: [R, H, d]; k_ptr, v_ptr: [R, K, d]; strides without HEAD in their names are those of tokens.
    q_weight_ptr, k_weight_ptr: [d], or None without norms; cos_ptr, sin_ptr: [R, d]. OFFSET, WIDE: see Rotation.
    cache_ptr: [N, 2, P, K, d], 16 bits like q. sinks_ptr: [H] or None.
    slot_mapping_ptr, seq_lens_ptr, block_table_ptr: see AttentionInputs.
    scale_log2, CAP_SCALE: see triton_tile.scales. WINDOW: keys that a query sees, 0: all.
    KEYS: keys of a tile. STAGES: tiles in the ring buffer; 0: keys are loaded into registers.
    STRIDE_MULTIPLE: a divisor of all token strides but out's.
    """
    kv_head = gl.program_id(0)
    request = gl.program_id(1).to(gl.int64)
    # Lengths, block table and slots were written before the kernels that this one may overlap with.
    seq_len = gl.load(seq_lens_ptr + request)
    slot = gl.load(slot_mapping_ptr + request)
    first_key = first_seen(seq_len, WINDOW)
    # Without a slot, the cache already holds this step's key.
    writes = (slot >= 0) & (seq_len > 0)
    end_key = seq_len - writes.to(gl.int32)

    dtype: gl.constexpr = cache_ptr.dtype.element_ty
    ROW: gl.constexpr = NUM_KV_HEADS * HEAD_DIM
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    row_layout: gl.constexpr = gl.BlockedLayout([1, WIDTH], [256 // HEAD_DIM, HEAD_DIM // WIDTH], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(WIDTH, 1, 8, [1, 0])
    k_layout: gl.constexpr = gl.DotOperandLayout(1, layout, WIDTH)
    # A thread keeps neighbouring elements of keys in registers, and loads them at once; queries have the same order.
    q_width: gl.constexpr = 2 if STAGES > 0 else WIDTH
    table_ptr = block_table_ptr + request * table_stride
    head_cache_ptr = cache_ptr + kv_head * HEAD_DIM
    q_smem = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], shared)
    if STAGES > 0:
        k_ring = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], shared)
        v_ring = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], shared)
        block_N = fill_ring(
            k_ring,
            v_ring,
            table_ptr,
            head_cache_ptr,
            first_key,
            end_key,
            row_layout,
            STAGES,
            KEYS,
            BLOCK_SIZE,
            ROW,
            HEAD_DIM,
        )
    else:
        v_smem = gl.allocate_shared_memory(dtype, [KEYS, HEAD_DIM], shared)
        k_DN = load_keys(table_ptr, head_cache_ptr, first_key, end_key, k_layout, KEYS, BLOCK_SIZE, ROW, HEAD_DIM)
        copy_values(v_smem, table_ptr, head_cache_ptr, first_key, end_key, row_layout, KEYS, BLOCK_SIZE, ROW, HEAD_DIM)
    d_1D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, row_layout))[None, :]
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
    row_M = gl.arange(0, ROWS, layout=gl.SliceLayout(1, row_layout))
    q_ptr += gl.multiple_of(request * q_stride, STRIDE_MULTIPLE)
    k_ptr += gl.multiple_of(request * k_stride, STRIDE_MULTIPLE) + kv_head * K_HEAD_STRIDE
    v_ptr += gl.multiple_of(request * v_stride, STRIDE_MULTIPLE) + kv_head * V_HEAD_STRIDE
    acc_d_D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    q_ptrs_M1 = q_ptr + (kv_head * GROUP + row_M)[:, None] * Q_HEAD_STRIDE
    mask_M1 = (row_M < GROUP)[:, None]
    q_MD = gl.load(q_ptrs_M1 + d_1D, mask=mask_M1, other=0.0).to(gl.float32)
    other_q_MD = gl.load(q_ptrs_M1 + other_1D, mask=mask_M1, other=0.0).to(gl.float32)
    k_1D = gl.load(k_ptr + d_1D).to(gl.float32)
    other_k_1D = gl.load(k_ptr + other_1D).to(gl.float32)
    cos_1D = gl.load(cos_ptr + gl.multiple_of(request * cos_stride, STRIDE_MULTIPLE) + d_1D).to(gl.float32)
    sin_1D = gl.load(sin_ptr + gl.multiple_of(request * sin_stride, STRIDE_MULTIPLE) + d_1D).to(gl.float32)
    v_1D = gl.load(v_ptr + d_1D)
    acc_v_D = gl.load(v_ptr + acc_d_D).to(gl.float32)
    q_MD = turned(
        q_MD, other_q_MD, q_weight_1D, other_q_weight_1D, cos_1D, sin_1D, d_1D, eps, HEAD_DIM, OFFSET, WIDE, dtype
    )
    k_1D = turned(
        k_1D, other_k_1D, k_weight_1D, other_k_weight_1D, cos_1D, sin_1D, d_1D, eps, HEAD_DIM, OFFSET, WIDE, dtype
    )
    q_smem.store(q_MD)
    score_M = capped(gl.sum(q_MD.to(gl.float32) * k_1D.to(gl.float32), 1), CAP_SCALE)
    max_M = gl.where(writes, gl.convert_layout(score_M, gl.SliceLayout(1, layout)), LOWEST)
    sum_M = gl.where(writes, gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, layout)), 0.0)
    acc_MD = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout) + gl.where(writes, acc_v_D, 0.0)[None, :]
    new_ptr = head_cache_ptr + row_of(slot // BLOCK_SIZE, slot, BLOCK_SIZE) * ROW
    written_1D = (d_1D < HEAD_DIM) & writes
    gl.store(new_ptr + d_1D, k_1D, mask=written_1D)
    gl.store(new_ptr + BLOCK_SIZE * ROW + d_1D, v_1D, mask=written_1D)
    q_MD = q_smem.load(gl.DotOperandLayout(0, layout, q_width))
    if STAGES > 0:
        acc_MD, max_M, sum_M = attend_ring(
            q_MD,
            k_ring,
            v_ring,
            block_N,
            acc_MD,
            max_M,
            sum_M,
            table_ptr,
            head_cache_ptr,
            first_key,
            end_key,
            scale_log2,
            layout,
            row_layout,
            STAGES,
            KEYS,
            BLOCK_SIZE,
            ROW,
            HEAD_DIM,
            CAP_SCALE,
        )
    else:
        seen_1N = first_keys(end_key - first_key, layout, KEYS)
        acc_MD, max_M, sum_M = attend_held(
            q_MD, k_DN, v_smem, acc_MD, max_M, sum_M, seen_1N, scale_log2, layout, KEYS, CAP_SCALE
        )
        for start in range(first_key + KEYS, end_key, KEYS):
            k_DN = load_keys(table_ptr, head_cache_ptr, start, end_key, k_layout, KEYS, BLOCK_SIZE, ROW, HEAD_DIM)
            barrier()
            copy_values(v_smem, table_ptr, head_cache_ptr, start, end_key, row_layout, KEYS, BLOCK_SIZE, ROW, HEAD_DIM)
            seen_1N = first_keys(end_key - start, layout, KEYS)
            acc_MD, max_M, sum_M = attend_held(
                q_MD, k_DN, v_smem, acc_MD, max_M, sum_M, seen_1N, scale_log2, layout, KEYS, CAP_SCALE
            )
    out_row_M = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    head_M = kv_head * GROUP + out_row_M
    out_MD = normalised(acc_MD, max_M, sum_M, sinks_ptr, head_M, out_row_M < GROUP, scale_log2)
    out_ptrs_MD = out_ptr + request * out_stride + head_M[:, None] * OUT_HEAD_STRIDE + acc_d_D[None, :]
    gl.store(out_ptrs_MD, out_MD.to(dtype), mask=(out_row_M < GROUP)[:, None])


def short_decode(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    rotation: Rotation,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    num_decodes: int,
    scoring: Scoring,
    tiles: ShortTiles,
) -> None:
    """Norm and rotate q and k, store k and v, and write the attention of the first num_decodes tokens to out_THd.

    These tokens are the queries of the first requests. q_THd, out_THd: [T, H, d]; k_TKd, v_TKd: [T, K, d]; d
    contiguous; the cache has the dtype of q. See exists_on_hopper for the sizes that the kernel supports.
    """
    rotating = RotatingArguments.of(q_THd, k_TKd, v_TKd, rotation)
    short_decode_kernel[(kv_cache_N2PKd.shape[3], num_decodes)](
        *rotating.tensors,
        kv_cache_N2PKd,
        out_THd,
        inputs.slot_mapping_T,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scoring.sinks_H,
        rotation.eps,
        scales(scoring)[0],
        inputs.block_table_RB.stride(0),
        *rotating.token_strides,
        out_THd.stride(0),
        **rotating.constants,
        **paged_constants(q_THd, kv_cache_N2PKd, out_THd, scoring),
        KEYS=tiles.keys,
        WARPS=tiles.warps,
        STAGES=tiles.stages,
        maxnreg=tiles.registers or None,
        num_warps=tiles.warps,
        launch_pdl=True,
    )
