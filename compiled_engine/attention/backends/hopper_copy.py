"""The items of prefill attention on Hopper, and the warp that copies their keys and values to shared memory, in Gluon.

Copies go by TMA into stages, a box for each block and each 64 columns, all of a tile completing on its stage's barrier.
"""

# ruff: noqa: RUF005 - Triton unpacks no tuples
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from compiled_engine.attention.backends.triton_tile import blocks_of
from compiled_engine.attention.backends.work_list import item_at

# Rows of a tile (queries times the heads that share a K/V head), half of them for each group of warps; its keys.
ROWS = gl.constexpr(128)
HALF = gl.constexpr(64)
KEYS = gl.constexpr(128)
STAGES = gl.constexpr(2)
# What 128 bytes hold, by which shared memory is swizzled. A tile stands there by columns of this width.
WIDTH = gl.constexpr(64)
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Triton 3.9 has other names for both.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
# A row that no cache has: a box there is filled with zeros.
OUTSIDE = gl.constexpr(1 << 30)


class Batch(NamedTuple):
    """Where a kernel finds its items and their lengths."""

    num_items: Any
    tiles_ptr: Any
    query_start_loc_ptr: Any
    seq_lens_ptr: Any


class Rings(NamedTuple):
    """Stages of keys and of values, [STAGES, columns of WIDTH times KEYS, WIDTH], and for each stage the barriers that
    say that it is full and that both groups have done with it. `cleared`: the first group has cleared the values after
    an item's last. A group is at most STAGES tiles ahead of the other, hence of this too as many."""

    key_stages: Any
    value_stages: Any
    keys_full: Any
    keys_empty: Any
    values_full: Any
    values_empty: Any
    cleared: Any


class Heads(NamedTuple):
    """Numbers that a kernel is compiled for."""

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
    """An item's K/V head, its request and first query; request 0 past the last item."""
    tile_ptr = batch.tiles_ptr + 2 * (item // HEADS.num_kv_heads)
    there = item < batch.num_items
    return item % HEADS.num_kv_heads, gl.load(tile_ptr, mask=there, other=0), gl.load(tile_ptr + 1, mask=there, other=0)


@gluon.jit
def lengths_of(batch, request):  # type: ignore[no-untyped-def]
    """Where a request's tokens start, how many there are, and the length of its context."""
    query_start = gl.load(batch.query_start_loc_ptr + request)
    query_len = gl.load(batch.query_start_loc_ptr + request + 1) - query_start
    return query_start, query_len, gl.load(batch.seq_lens_ptr + request)


@gluon.jit
def key_tiles(first_position, seq_len, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The end of an item's keys, and by tiles of keys the first, the first that not every query sees whole, the end.

    Padding (seq_len 0) has one tile, of which it sees nothing.
    """
    end_key = gl.maximum(gl.minimum(first_position + ROWS // HEADS.group, seq_len), 0)
    first_masked = gl.maximum(first_position, 0) // KEYS
    first_tile = first_masked * 0
    if HEADS.window > 0:
        first_tile = gl.maximum(first_position - HEADS.window + 1, 0) // KEYS
        first_masked = first_tile
    return end_key, first_tile, first_masked, gl.maximum(gl.cdiv(end_key, KEYS), 1)


@gluon.jit
def boxes_of(stage, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """A stage as its boxes, [columns of WIDTH times boxes of KEYS, box, WIDTH]."""
    height: gl.constexpr = HEADS.box
    number: gl.constexpr = HEADS.dim // WIDTH * (KEYS // height)
    if RENAMED:
        boxes = stage.reinterpret(stage.dtype, [number, height, WIDTH], SHARED)
    else:
        boxes = stage._reinterpret(stage.dtype, [number, height, WIDTH], SHARED)
    return boxes


@gluon.jit
def tile_in(stage, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """A stage as one tile, [KEYS, dim]."""
    if RENAMED:
        tile = stage.reinterpret(stage.dtype, [KEYS, HEADS.dim], SHARED)
    else:
        tile = stage._reinterpret(stage.dtype, [KEYS, HEADS.dim], SHARED)
    return tile


@gluon.jit
def _copy_tile(cache_desc, rows, column, full, stage, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """One box for each row of `rows` and each WIDTH columns; the barrier counts their bytes."""
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
    """The warp that copies: of each item the tiles of keys and values from the last to the first."""
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
