"""Gluon kernel for Hopper: prefill attention in which one warp copies keys and values, and two groups of warps compute.

The design follows FlashAttention-3 (Shah et al. 2024): TMA copies into two stages; asynchronous products, where the
scores of a tile are computed in parallel with the product of the previous tile's values; probabilities in registers.

A tile is copied in boxes, one for each block and each 64 columns. The barrier of the tile's stage counts all copies.
"""

# ruff: noqa: RUF005 - Triton unpacks no tuples
from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from compiled_engine.attention.backends.decode_splits import MAX_LISTED_SPLITS
from compiled_engine.attention.backends.kernel_arguments import STEP_NUMBERS, STEP_TENSORS
from compiled_engine.attention.backends.triton_tile import LOWEST, blocks_of, first_read, seen
from compiled_engine.attention.backends.work_list import HEADER, WorkLayout, item_at, num_tiles_of, tile_length
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.kernels.boxes import Box
from compiled_engine.kernels.launch_arguments import is_hopper
from compiled_engine.kernels.launcher import quick_launches

# Rows of a tile (queries times the heads that share a K/V head), half of them for each group of warps; its keys.
ROWS = gl.constexpr(128)
HALF = gl.constexpr(64)
KEYS = gl.constexpr(128)
STAGES = gl.constexpr(2)
# Elements in 128 bytes, the width of shared memory's swizzle. Tiles are stored in columns of this width.
WIDTH = gl.constexpr(64)
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Triton 3.9 has other names for both.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
# A row that no cache has: a box there is filled with zeros.
OUTSIDE = gl.constexpr(1 << 30)


class Batch(NamedTuple):
    """The number of items (see hopper_prefill_kernel), and pointers to the work list's tiles and requests' lengths."""

    num_items: Any
    tiles_ptr: Any
    query_start_loc_ptr: Any
    seq_lens_ptr: Any


class Rings(NamedTuple):
    """Ring buffers of tiles of keys and of values in shared memory, with STAGES stages and barriers each.

    key_stages, value_stages: [STAGES, dim / WIDTH * KEYS, WIDTH]. A `full` barrier completes when the stage is copied,
    an `empty` one when both groups of warps have finished with the stage. `cleared` completes when the first group has
    cleared the values after an item's last key. A group is at most STAGES tiles ahead of the other, so STAGES `cleared`
    barriers suffice.
    """

    key_stages: Any
    value_stages: Any
    keys_full: Any
    keys_empty: Any
    values_full: Any
    values_empty: Any
    cleared: Any


class Heads(NamedTuple):
    """The sizes for which a kernel is compiled: of heads (dim), blocks, the window, and boxes (rows of a copy)."""

    dim: Any
    group: Any
    num_kv_heads: Any
    block_size: Any
    box: Any
    window: Any


@gluon.constexpr_function
def heads_of(*numbers: Any) -> Heads:
    return Heads(*numbers)


@gluon.jit
def tile_of(batch, item, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (K/V head, request, first query) of an item of work; request 0 and query 0 past the last item.

    item: the item's number. An item is a tile of the work list for one K/V head.
    """
    tile_ptr = batch.tiles_ptr + tile_length(HEADS.num_kv_heads) * (item // HEADS.num_kv_heads)
    there = item < batch.num_items
    return item % HEADS.num_kv_heads, gl.load(tile_ptr, mask=there, other=0), gl.load(tile_ptr + 1, mask=there, other=0)


@gluon.jit
def lengths_of(batch, request):  # type: ignore[no-untyped-def]
    """Return (first token, number of tokens, seq_len) of a request."""
    query_start = gl.load(batch.query_start_loc_ptr + request)
    query_len = gl.load(batch.query_start_loc_ptr + request + 1) - query_start
    return query_start, query_len, gl.load(batch.seq_lens_ptr + request)


@gluon.jit
def key_tiles(first_position, seq_len, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (end_key, first_tile, first_masked, end_tile): the end of an item's keys, then indices of tiles of keys.

    first_position: position of the item's first query. first_masked: the first tile in which some query does not see
    all keys. Padding (seq_len 0) has one tile, in which its queries see no key.
    """
    end_key = gl.maximum(gl.minimum(first_position + ROWS // HEADS.group, seq_len), 0)
    first_tile = first_read(first_position, HEADS.window, KEYS) // KEYS
    first_masked = first_tile
    if HEADS.window == 0:
        first_masked = gl.maximum(first_position, 0) // KEYS
    return end_key, first_tile, first_masked, gl.maximum(gl.cdiv(end_key, KEYS), 1)


@gluon.jit
def boxes_of(stage, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return a view of a stage (a tile's place in a ring buffer) as boxes, which are copied one by one.

    The view is [dim / WIDTH * KEYS / box, box, WIDTH], with dim and box of HEADS.
    """
    height: gl.constexpr = HEADS.box
    number: gl.constexpr = HEADS.dim // WIDTH * (KEYS // height)
    if RENAMED:
        boxes = stage.reinterpret(stage.dtype, [number, height, WIDTH], SHARED)
    else:
        boxes = stage._reinterpret(stage.dtype, [number, height, WIDTH], SHARED)
    return boxes


@gluon.jit
def tile_in(stage, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return a view of a stage (a tile's place in a ring buffer) as one tile, [KEYS, HEADS.dim]."""
    if RENAMED:
        tile = stage.reinterpret(stage.dtype, [KEYS, HEADS.dim], SHARED)
    else:
        tile = stage._reinterpret(stage.dtype, [KEYS, HEADS.dim], SHARED)
    return tile


@gluon.jit
def _copy_tile(cache_desc, rows, column, full, stage, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start to copy a tile of keys or values from the cache into a stage of a ring buffer.

    The tile is copied in boxes of HEADS.box rows and WIDTH columns. cache_desc: see hopper_prefill_kernel. rows: in the
    cache, the first row of each box. column: the first column of the K/V head. full: the stage's barrier.
    """
    boxes: gl.constexpr = KEYS // HEADS.box
    widths: gl.constexpr = HEADS.dim // WIDTH
    mbarrier.expect(full, KEYS * HEADS.dim * 2)
    places = boxes_of(stage, HEADS)
    for box in gl.static_range(boxes):
        for width in gl.static_range(widths):
            place = places.index(width * boxes + box)
            load_box(cache_desc, [rows[box], column + width * WIDTH], full, place)


@gluon.jit
def copy_tiles(cache_desc, block_table_ptr, table_stride, batch, rings, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Run the copying warp: for each item, copy its tiles of keys and values, from the last to the first."""
    boxes: gl.constexpr = KEYS // HEADS.box
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    count = 0
    for first_item in range(0, batch.num_items, num_programs):
        item = item_at(first_item, num_programs, program)
        if item < batch.num_items:
            kv_head, request, first_query = tile_of(batch, item, HEADS)
            _, query_len, seq_len = lengths_of(batch, request)
            end_key, first_tile, _, end_tile = key_tiles(seq_len - query_len + first_query, seq_len, HEADS)
            table_ptr = block_table_ptr + request.to(gl.int64) * table_stride
            column = kv_head * HEADS.dim
            for i in range(end_tile - first_tile):
                key_rows = ()
                value_rows = ()
                for box in gl.static_range(boxes):
                    key = (end_tile - 1 - i) * KEYS + box * HEADS.box
                    block = blocks_of(table_ptr, key, end_key, HEADS.block_size)
                    row = block * (2 * HEADS.block_size) + key % HEADS.block_size
                    key_rows = key_rows + (gl.where(key < end_key, row, OUTSIDE),)  # type: ignore[assignment]
                    row = gl.where(key < end_key, row + HEADS.block_size, OUTSIDE)
                    value_rows = value_rows + (row,)  # type: ignore[assignment]
                stage = count % STAGES
                was = (count // STAGES) & 1 ^ 1
                mbarrier.wait(rings.keys_empty.index(stage), was)
                _copy_tile(
                    cache_desc, key_rows, column, rings.keys_full.index(stage), rings.key_stages.index(stage), HEADS
                )
                mbarrier.wait(rings.values_empty.index(stage), was)
                _copy_tile(
                    cache_desc,
                    value_rows,
                    column,
                    rings.values_full.index(stage),
                    rings.value_stages.index(stage),
                    HEADS,
                )
                count += 1


@gluon.jit
def _hide(scores_MN, positions_M, key_tile, HEADS: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile's scores, with -inf for keys that a query does not see. key_tile: the tile's index."""
    keys_N = key_tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    return gl.where(seen(keys_N, positions_M, HEADS.window), scores_MN, float("-inf"))


@gluon.jit
def _clear_from(stage, end, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Zero the values of a stage from row `end` on, in the box that contains this row.

    These values may be uninitialised, and NaN times a weight of zero is NaN. Later boxes are zeros already, since
    they were copied from the row OUTSIDE, which the cache does not have.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    height: gl.constexpr = HEADS.box
    boxes: gl.constexpr = KEYS // height
    widths: gl.constexpr = HEADS.dim // WIDTH
    places = boxes_of(stage, HEADS)
    box = end // height
    rows_M = box * height + gl.arange(0, height, layout=gl.SliceLayout(1, layout))
    for width in gl.static_range(widths):
        place = places.index(width * boxes + box)
        values = place.load(layout)
        place.store(gl.where((rows_M < end)[:, None], values, 0.0).to(values.dtype))
    fence_async_shared()


@gluon.jit
def _rows_of(  # type: ignore[no-untyped-def]
    kv_head, first_query, query_start, query_len, rows_M, token_stride, head_stride, HEADS: gl.constexpr
):
    """Return (offsets [M] of an item's rows in queries or results, mask [M] of rows that exist)."""
    queries_M = first_query + rows_M // HEADS.group
    there_M = (rows_M < ROWS // HEADS.group * HEADS.group) & (queries_M < query_len)
    heads_M = kv_head * HEADS.group + rows_M % HEADS.group
    starts_M = gl.multiple_of((query_start + queries_M).to(gl.int64) * token_stride, 8)
    return starts_M + heads_M * head_stride, there_M


@gluon.jit
def compute_items(  # type: ignore[no-untyped-def]
    q_ptr,
    out_ptr,
    strides,
    scale_log2,
    q_smem,
    batch,
    rings,
    HEADS: gl.constexpr,
    GROUP_OF_WARPS: gl.constexpr,
):
    """Run one of two groups of warps: compute half of each item's rows with an online softmax, and write them to out.

    An item's queries are loaded during the last matrix product of the previous item. q_smem: [HALF, dim], for queries,
    then for results. strides: (q's tokens, out's tokens, q's heads, out's heads).
    """
    dim: gl.constexpr = HEADS.dim
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_smem.dtype
    q_token_stride, out_token_stride, q_head_stride, out_head_stride = strides
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    rows_M = GROUP_OF_WARPS * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, s_layout))
    io_rows_M = GROUP_OF_WARPS * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, io_layout))
    io_d_D = gl.arange(0, dim, layout=gl.SliceLayout(0, io_layout))
    none_MN = gl.zeros([HALF, KEYS], gl.float32, s_layout)

    item = program
    kv_head, request, first_query = tile_of(batch, item, HEADS)
    query_start, query_len, seq_len = lengths_of(batch, request)
    at_M, there_M = _rows_of(
        kv_head, first_query, query_start, query_len, io_rows_M, q_token_stride, q_head_stride, HEADS
    )
    there_M = there_M & (item < batch.num_items)
    q_MD = gl.load(q_ptr + at_M[:, None] + io_d_D[None, :], mask=there_M[:, None], other=0.0)
    count = 0
    cleared = 0
    for first_item in range(0, batch.num_items, num_programs):
        if item < batch.num_items:
            q_smem.store(q_MD)
            fence_async_shared()
            next_item = item_at(first_item + num_programs, num_programs, program)
            next_kv_head, next_request, next_first_query = tile_of(batch, next_item, HEADS)
            first_position = seq_len - query_len + first_query
            positions_M = first_position + rows_M // HEADS.group
            end_key, first_tile, first_masked, end_tile = key_tiles(first_position, seq_len, HEADS)

            stage = count % STAGES
            mbarrier.wait(rings.keys_full.index(stage), (count // STAGES) & 1)
            keys_DN = tile_in(rings.key_stages.index(stage), HEADS).permute((1, 0))
            s_MN = warpgroup_mma(q_smem, keys_DN, none_MN, use_acc=False, is_async=True)
            s_MN = warpgroup_mma_wait(0, deps=(s_MN,))
            mbarrier.arrive(rings.keys_empty.index(stage), count=1)
            s_MN = _hide(s_MN, positions_M, end_tile - 1, HEADS, s_layout)
            max_M = gl.maximum(gl.max(s_MN, axis=1) * scale_log2, LOWEST)
            p_MN = gl.exp2(s_MN * scale_log2 - max_M[:, None])
            sum_M = gl.sum(p_MN, axis=1)
            weights_MN = gl.convert_layout(p_MN.to(dtype), p_layout)
            acc_MD = gl.zeros([HALF, dim], gl.float32, o_layout)
            if end_key % HEADS.box != 0:
                if GROUP_OF_WARPS == 0:
                    mbarrier.wait(rings.values_full.index(stage), (count // STAGES) & 1)
                    _clear_from(rings.value_stages.index(stage), end_key - (end_tile - 1) * KEYS, HEADS)
                    mbarrier.arrive(rings.cleared.index(cleared % STAGES), count=1)
                else:
                    mbarrier.wait(rings.cleared.index(cleared % STAGES), (cleared // STAGES) & 1)
                cleared += 1
            # First the tiles that some queries do not see whole, then the others.
            for masked in gl.static_range(1, -1, -1):
                if masked == 1:
                    first, end = 1, end_tile - first_masked
                else:
                    first, end = end_tile - first_masked, end_tile - first_tile
                for i in range(first, end):
                    stage, next_stage = count % STAGES, (count + 1) % STAGES
                    mbarrier.wait(rings.keys_full.index(next_stage), ((count + 1) // STAGES) & 1)
                    keys_DN = tile_in(rings.key_stages.index(next_stage), HEADS).permute((1, 0))
                    s_MN = warpgroup_mma(q_smem, keys_DN, none_MN, use_acc=False, is_async=True)
                    mbarrier.wait(rings.values_full.index(stage), (count // STAGES) & 1)
                    values_ND = tile_in(rings.value_stages.index(stage), HEADS)
                    acc_MD = warpgroup_mma(weights_MN, values_ND, acc_MD, is_async=True)
                    s_MN = warpgroup_mma_wait(1, deps=(s_MN,))
                    mbarrier.arrive(rings.keys_empty.index(next_stage), count=1)
                    if masked == 1:
                        s_MN = _hide(s_MN, positions_M, end_tile - 1 - i, HEADS, s_layout)
                    new_max_M = gl.maximum(max_M, gl.max(s_MN, axis=1) * scale_log2)
                    p_MN = gl.exp2(s_MN * scale_log2 - new_max_M[:, None])
                    alpha_M = gl.exp2(max_M - new_max_M)
                    max_M = new_max_M
                    sum_M = sum_M * alpha_M + gl.sum(p_MN, axis=1)
                    acc_MD = warpgroup_mma_wait(0, deps=(acc_MD,))
                    mbarrier.arrive(rings.values_empty.index(stage), count=1)
                    acc_MD = acc_MD * gl.convert_layout(alpha_M, gl.SliceLayout(1, o_layout))[:, None]
                    weights_MN = gl.convert_layout(p_MN.to(dtype), p_layout)
                    count += 1
            stage = count % STAGES
            mbarrier.wait(rings.values_full.index(stage), (count // STAGES) & 1)
            acc_MD = warpgroup_mma(weights_MN, tile_in(rings.value_stages.index(stage), HEADS), acc_MD, is_async=True)
            next_query_start, next_query_len, seq_len = lengths_of(batch, next_request)
            at_M, there_M = _rows_of(
                next_kv_head,
                next_first_query,
                next_query_start,
                next_query_len,
                io_rows_M,
                q_token_stride,
                q_head_stride,
                HEADS,
            )
            there_M = there_M & (next_item < batch.num_items)
            q_MD = gl.load(q_ptr + at_M[:, None] + io_d_D[None, :], mask=there_M[:, None], other=0.0)
            acc_MD = warpgroup_mma_wait(0, deps=(acc_MD,))
            mbarrier.arrive(rings.values_empty.index(stage), count=1)
            count += 1
            # Padding saw no key: zeros.
            sum_M = gl.convert_layout(gl.where(sum_M > 0, sum_M, 1.0), gl.SliceLayout(1, o_layout))
            q_smem.store((acc_MD / sum_M[:, None]).to(dtype))
            at_M, there_M = _rows_of(
                kv_head, first_query, query_start, query_len, io_rows_M, out_token_stride, out_head_stride, HEADS
            )
            gl.store(out_ptr + at_M[:, None] + io_d_D[None, :], q_smem.load(io_layout), mask=there_M[:, None])
            item, kv_head, first_query = next_item, next_kv_head, next_first_query
            query_start, query_len = next_query_start, next_query_len


HEAD_DIMS = (64, 128)
# With fewer tokens in a step, the kernel takes longer to start than it saves.
FEWEST_TOKENS = 2048
# Registers of a computing and of a copying thread.
COMPUTING_REGISTERS, COPYING_REGISTERS = gl.constexpr(240), gl.constexpr(24)


@quick_launches
@gluon.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_TENSORS)
def hopper_prefill_kernel(  # type: ignore[no-untyped-def]
    cache_desc,
    q_ptr,
    out_ptr,
    work_ptr,
    num_tiles_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    scale_log2,
    num_requests,
    table_stride,
    q_token_stride,
    out_token_stride,
    Q_HEAD_STRIDE: gl.constexpr,
    OUT_HEAD_STRIDE: gl.constexpr,
    WINDOW: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    MAX_SPLITS: gl.constexpr,
    HEADER: gl.constexpr,
):
    """Compute prefill attention. Persistent programs take items of the work list and write their queries' results.

    An item is ROWS // GROUP queries of one request, for the GROUP query heads of one K/V head.

    cache_desc: the cache as [N * 2 * P, K * d], in boxes of [BOX, WIDTH]. q_ptr, out_ptr: [T, H, d], 16 bits like the
        cache.
    work_ptr, MAX_SPLITS, HEADER: see work_list. num_tiles_ptr: see work_list.num_tiles_of.
    query_start_loc_ptr, seq_lens_ptr, block_table_ptr: see AttentionInputs.
    scale_log2: see triton_tile.scales. WINDOW: keys that a query sees, 0: all.

    gdc_wait comes last: see prefill_kernel.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    rows: gl.constexpr = HEAD_DIM // WIDTH * KEYS
    q_smem = gl.allocate_shared_memory(dtype, [2, HALF, HEAD_DIM], SHARED)
    rings = Rings(
        gl.allocate_shared_memory(dtype, [STAGES, rows, WIDTH], SHARED),
        gl.allocate_shared_memory(dtype, [STAGES, rows, WIDTH], SHARED),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(rings.keys_full.index(stage), count=1)
        mbarrier.init(rings.values_full.index(stage), count=1)
        mbarrier.init(rings.keys_empty.index(stage), count=2)
        mbarrier.init(rings.values_empty.index(stage), count=2)
        mbarrier.init(rings.cleared.index(stage), count=1)
    fence_async_shared()
    batch = Batch(
        num_tiles_of(work_ptr, num_tiles_ptr) * NUM_KV_HEADS,
        work_ptr + HEADER + num_requests * (NUM_KV_HEADS + MAX_SPLITS),
        query_start_loc_ptr,
        seq_lens_ptr,
    )
    HEADS: gl.constexpr = heads_of(HEAD_DIM, GROUP, NUM_KV_HEADS, BLOCK_SIZE, BOX, WINDOW)
    strides = (q_token_stride, out_token_stride, Q_HEAD_STRIDE, OUT_HEAD_STRIDE)
    gl.warp_specialize(
        [
            (compute_items, (q_ptr, out_ptr, strides, scale_log2, q_smem.index(0), batch, rings, HEADS, 0)),
            (compute_items, (q_ptr, out_ptr, strides, scale_log2, q_smem.index(1), batch, rings, HEADS, 1)),
            (copy_tiles, (cache_desc, block_table_ptr, table_stride, batch, rings, HEADS)),
        ],
        [4, 1],
        [COMPUTING_REGISTERS, COPYING_REGISTERS],
    )
    gdc_wait()


def on_hopper(q_THd: torch.Tensor, kv_cache_N2PKd: torch.Tensor, tile_rows: int, scoring: Scoring) -> bool:
    """Return whether hopper_prefill serves a batch with tiles of tile_rows rows.

    The kernel does not read an 8-bit cache, because TMA copies keys and values to shared memory without conversion.
    """
    return (
        tile_rows == ROWS.value
        and kv_cache_N2PKd.dtype == q_THd.dtype
        and q_THd.shape[0] >= FEWEST_TOKENS
        and not scoring.soft_cap
        and scoring.sinks_H is None
        and kv_cache_N2PKd.shape[-1] in HEAD_DIMS
        and q_THd.element_size() == 2
        and is_hopper(q_THd.device)
    )


def box_rows(block_size: int) -> int:
    """Return the number of keys in a box: the largest power of two that divides blocks and tiles."""
    return min(block_size & -block_size, KEYS.value)


@cache
def _box_of(rows: int) -> Box:
    return Box((rows, WIDTH.value), SHARED.value)


def hopper_prefill(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    work_W: torch.Tensor,
    layout: WorkLayout,
    num_sms: int,
    scoring: Scoring,
    num_tiles: torch.Tensor | None = None,
) -> None:
    """Write to out_THd the attention of all requests with several queries.

    Must be launched after `listed_decode`, with only prefill kernels in between, for a batch that on_hopper accepts.
    q_THd, out_THd: [T, H, d], d contiguous. work_W: the work list, with tiles of ROWS rows; layout: the list's layout.
    num_sms: multiprocessors of the GPU. num_tiles: int32 [1], the number of tiles to compute; None: all.
    """
    num_tokens, num_heads, _ = q_THd.shape
    num_blocks, _, block_size, num_kv_heads, head_dim = kv_cache_N2PKd.shape
    box = box_rows(block_size)
    cache = _box_of(box).of(
        kv_cache_N2PKd,
        [num_blocks * 2 * block_size, num_kv_heads * head_dim],
        [num_kv_heads * head_dim, 1],
    )
    hopper_prefill_kernel[(min(num_sms, layout.most_tiles(num_tokens) * num_kv_heads),)](
        cache,
        q_THd,
        out_THd,
        work_W,
        num_tiles,
        inputs.query_start_loc_R1,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scoring.scale * math.log2(math.e),
        layout.num_requests,
        inputs.block_table_RB.stride(0),
        q_THd.stride(0),
        out_THd.stride(0),
        Q_HEAD_STRIDE=q_THd.stride(1),
        OUT_HEAD_STRIDE=out_THd.stride(1),
        WINDOW=scoring.sliding_window,
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        BOX=box,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        MAX_SPLITS=MAX_LISTED_SPLITS,
        HEADER=HEADER,
        num_warps=4,
        launch_pdl=True,
    )
