"""The groups of warps that compute prefill attention on Hopper, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from compiled_engine.attention.backends.hopper_copy import (
    HALF,
    KEYS,
    ROWS,
    STAGES,
    WIDTH,
    boxes_of,
    key_tiles,
    lengths_of,
    tile_in,
    tile_of,
)
from compiled_engine.attention.backends.triton_tile import LOWEST, seen
from compiled_engine.attention.backends.work_list import item_at


@gluon.jit
def _hide(scores_MN, positions_M, key_tile, HEADS: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """-inf for keys after a query, and for those that its window has left behind."""
    keys_N = key_tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    return gl.where(seen(keys_N, positions_M, HEADS.window), scores_MN, float("-inf"))


@gluon.jit
def _clear_from(stage, end, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Zero the rows of values from `end` on in the box that has this row: nobody has written them, and zero times a NaN
    is no zero."""
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
    """Where an item's rows stand in queries and results, and which there are."""
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
    """One group of warps: the online softmax of its half of each item's rows. Queries are read while the last product
    of the item before runs; they stand in shared memory, where results pass through as well."""
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
