"""The work list of a batch's attention: splits of decodes and tiles of prompts.

A kernel writes the list once per step (in each layer if layers have different heads), when the lengths are on the
device; in each layer, persistent programs take items until none is left. So one captured graph serves any mixture of
decodes and prompts. FlashInfer (Ye et al. 2025) and FlashAttention-3's scheduler metadata work like this.

The list consists of these parts, int32, in order:

[HEADER]: the number of splits, the number of tiles, and two unused elements.
arrived [R, K]: how many splits of a request's K/V head have stored partial results in this layer.
splits [R * MAX_LISTED_SPLITS]: request * MAX_LISTED_SPLITS + number of the split. A request has as many splits as any
    layer may need.
tiles [., 2 + K]: the request, its first query in the tile, and for each K/V head how many splits of the tile's keys
    have stored partial results in this layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from compiled_engine.attention.backends.decode_splits import MAX_LISTED_SPLITS
from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.kernels.launch_arguments import dependent_launch
from compiled_engine.kernels.launcher import quick_launches

HEADER = 4
# Requests that a program reads together.
SEARCH_WIDTH = tl.constexpr(256)


@triton.constexpr_function
def tile_length(num_kv_heads: int) -> int:
    """Return the number of int32 elements that a tile takes in the list."""
    return 2 + num_kv_heads


@dataclass(frozen=True)
class WorkLayout:
    """The sizes and offsets of the parts of a batch's work list, in int32 elements."""

    num_requests: int
    num_kv_heads: int
    queries: int  # per tile

    @property
    def arrived(self) -> int:
        return HEADER

    @property
    def splits(self) -> int:
        return HEADER + self.num_requests * self.num_kv_heads

    @property
    def tiles(self) -> int:
        return self.splits + self.num_requests * MAX_LISTED_SPLITS

    @property
    def tile_length(self) -> int:
        return tile_length(self.num_kv_heads)

    def most_tiles(self, num_tokens: int) -> int:
        """Return the largest number of tiles of num_tokens tokens; each request's last tile may be partly filled."""
        return num_tokens // self.queries + self.num_requests

    def length(self, num_tokens: int) -> int:
        """Return the length of the work list, in int32 elements, for any batch of up to num_tokens tokens."""
        return self.tiles + self.tile_length * self.most_tiles(num_tokens)


@triton.jit
def split_length(num_keys: tl.tensor, num_splits: tl.tensor, min_keys: tl.tensor, GRAIN: tl.constexpr) -> tl.tensor:
    """Return the number of keys per split: a multiple of GRAIN, or min_keys if that is more.

    The last splits of a request may have no keys.
    """
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), GRAIN) * GRAIN, min_keys)


@triton.jit
def num_tiles_of(work_ptr: tl.tensor, num_tiles_ptr: tl.tensor | None) -> tl.tensor:
    """Return the number of tiles that a prefill kernel computes: all of the list, or the int32 at num_tiles_ptr."""
    if num_tiles_ptr is None:
        return tl.load(work_ptr + 1)
    else:
        return tl.load(num_tiles_ptr)


@triton.jit
def item_at(first_item: tl.tensor, num_programs: tl.tensor, program: tl.tensor) -> tl.tensor:
    """Return a program's item among first_item .. first_item + num_programs - 1. It may be past the last item.

    The order alternates, since the longest items come first: after a longer item a program takes a shorter one.
    """
    backwards = (first_item // num_programs) % 2
    return first_item + tl.where(backwards == 1, num_programs - 1 - program, program)


@triton.jit
def _num_items(
    query_len: tl.tensor,
    num_keys: tl.tensor,
    min_keys: tl.tensor,
    QUERIES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (number of splits, number of tiles) of each request: splits if it has a single query, otherwise tiles.

    All layers share the list, but a layer with a window splits only the keys in its window, which may make more splits
    than all keys make: 2,048 keys may make 16 splits, and 2,049 keys 13. So the list has the largest number of splits
    that any layer may need.
    """
    splits = tl.minimum(tl.maximum(tl.cdiv(num_keys, min_keys), 1), MAX_SPLITS)
    return tl.where(query_len == 1, splits, 0), tl.where(query_len > 1, tl.cdiv(query_len, QUERIES), 0)


@quick_launches
@triton.jit(
    do_not_specialize=["num_requests", "min_keys"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "work_ptr"],
)
def list_kernel(
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    work_ptr: tl.tensor,
    num_requests: tl.tensor,
    min_keys: tl.tensor,
    HEADER: tl.constexpr,
    QUERIES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    TILE_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write the work list. Program `request` writes the splits, tiles and zeroed `arrived` counters of its request.

    A program counts the items of all earlier requests to find where its own items begin; the last program also writes
    the totals.

    query_start_loc_ptr: int32 [R + 1]; seq_lens_ptr: int32 [R]; work_ptr: the list, see the module.
    min_keys: the fewest keys of a split.
    QUERIES: queries per tile. TILE_K: NUM_KV_HEADS rounded up to a power of two.
    """
    # No later kernel may start before the end of this one: attention reads the list before its own wait.
    if DEPENDENT_LAUNCH:
        gdc_wait()
    request = tl.program_id(0)
    first_split = 0
    first_tile = 0
    for start in range(0, request, SEARCH_WIDTH):
        requests_S = start + tl.arange(0, SEARCH_WIDTH)
        before_S = requests_S < request
        query_len_S = tl.load(query_start_loc_ptr + requests_S + 1, mask=before_S, other=0)
        query_len_S -= tl.load(query_start_loc_ptr + requests_S, mask=before_S, other=0)
        num_keys_S = tl.load(seq_lens_ptr + requests_S, mask=before_S, other=0)
        splits_S, tiles_S = _num_items(query_len_S, num_keys_S, min_keys, QUERIES, MAX_SPLITS)
        first_split += tl.sum(splits_S, 0)
        first_tile += tl.sum(tiles_S, 0)
    query_len = tl.load(query_start_loc_ptr + request + 1) - tl.load(query_start_loc_ptr + request)
    num_keys = tl.load(seq_lens_ptr + request)
    num_splits, num_tiles = _num_items(query_len, num_keys, min_keys, QUERIES, MAX_SPLITS)

    heads_K = tl.arange(0, TILE_K)
    arrived_ptr = work_ptr + HEADER
    tl.store(arrived_ptr + request * NUM_KV_HEADS + heads_K, tl.zeros([TILE_K], tl.int32), mask=heads_K < NUM_KV_HEADS)
    splits_ptr = arrived_ptr + num_requests * NUM_KV_HEADS
    splits_S = tl.arange(0, MAX_SPLITS)
    tl.store(splits_ptr + first_split + splits_S, request * MAX_SPLITS + splits_S, mask=splits_S < num_splits)
    tiles_ptr = splits_ptr + num_requests * MAX_SPLITS
    TILE_LENGTH: tl.constexpr = tile_length(NUM_KV_HEADS)
    # Later tiles see more keys: they come first, so that short ones fill up the end.
    for start in range(0, num_tiles, SEARCH_WIDTH):
        tiles_S = start + tl.arange(0, SEARCH_WIDTH)
        there_S = tiles_S < num_tiles
        item_ptrs_S = tiles_ptr + TILE_LENGTH * (first_tile + num_tiles - 1 - tiles_S)
        tl.store(item_ptrs_S, tl.zeros([SEARCH_WIDTH], tl.int32) + request, mask=there_S)
        tl.store(item_ptrs_S + 1, tiles_S * QUERIES, mask=there_S)
        arrived_ptrs_SK = item_ptrs_S[:, None] + 2 + heads_K[None, :]
        mask_SK = there_S[:, None] & (heads_K < NUM_KV_HEADS)[None, :]
        tl.store(arrived_ptrs_SK, tl.zeros([SEARCH_WIDTH, TILE_K], tl.int32), mask=mask_SK)
    if request == num_requests - 1:
        tl.store(work_ptr, first_split + num_splits)
        tl.store(work_ptr + 1, first_tile + num_tiles)


def write_lists(inputs: AttentionInputs, work_W: torch.Tensor, layout: WorkLayout, min_keys: int) -> None:
    """Write the work list of a batch to work_W, int32 with at least layout.length(number of tokens) elements.

    min_keys: the fewest keys of a split.
    """
    list_kernel[(layout.num_requests,)](
        inputs.query_start_loc_R1,
        inputs.seq_lens_R,
        work_W,
        layout.num_requests,
        min_keys,
        HEADER=HEADER,
        QUERIES=layout.queries,
        MAX_SPLITS=MAX_LISTED_SPLITS,
        NUM_KV_HEADS=layout.num_kv_heads,
        TILE_K=triton.next_power_of_2(layout.num_kv_heads),
        num_warps=1,
        **dependent_launch(work_W.device),
    )
