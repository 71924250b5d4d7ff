"""Triton kernel: prefill attention over the paged cache, by persistent programs that take tiles from the work list.

The rows of a tile are consecutive queries of a request, each for all query heads of one K/V head. If a step has fewer
tiles than programs, as for a short question about a long cached text, several programs share the keys of a tile. The
last of them to finish combines the partial results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from compiled_engine.attention.backends.decode_splits import MAX_LISTED_SPLITS
from compiled_engine.attention.backends.kernel_arguments import STEP_NUMBERS, STEP_TENSORS, paged_constants
from compiled_engine.attention.backends.triton_combine import Partials, store_combined, store_partials
from compiled_engine.attention.backends.triton_tile import (
    LOWEST,
    HeadCache,
    attend_tile,
    blocks_of,
    first_read,
    head_elements,
    head_masks,
    load_queries,
    no_sums,
    normalised_parts,
    scales,
    store_parts,
)
from compiled_engine.attention.backends.wide_tiles import is_wide, most_rows, wide_tiles
from compiled_engine.attention.backends.work_list import (
    HEADER,
    WorkLayout,
    item_at,
    num_tiles_of,
    split_length,
    tile_length,
)
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.attention.triton_codes import product_type, scales_of
from compiled_engine.kernels.launch_arguments import dependent_launch
from compiled_engine.kernels.launcher import quick_launches

# Contexts up to this many tokens are short.
SHORT_CONTEXT = 1024
# Most programs that share the keys of a tile, and the fewest keys of each.
MOST_SHARING, FEWEST_SHARED = tl.constexpr(32), 512
# Elements of a head whose partial results are combined together.
COMBINED = tl.constexpr(64)


@dataclass(frozen=True)
class PrefillTiles:
    """The numbers of rows and keys of a tile, and the options with which prefill_kernel is compiled and launched."""

    rows: int  # queries times the heads that share a K/V head
    keys: int
    num_warps: int
    num_stages: int
    programs: int  # per multiprocessor


class KeySplits(NamedTuple):
    """Buffers for the partial results of programs that share the keys of a tile, and the fewest keys of a program.

    partials: acc [P, rows, d], max and sum [P, rows] of P programs, see triton_combine.Partials.
    """

    partials: Partials
    min_keys: int = FEWEST_SHARED

    @classmethod
    def of(
        cls, out_THd: torch.Tensor, layout: WorkLayout, tiles: PrefillTiles, num_sms: int, max_seq_len: int
    ) -> KeySplits | None:
        """Return buffers for a batch; None if its contexts are short or its tiles occupy over half of all programs."""
        programs = num_sms * tiles.programs
        fewest_items = len(out_THd) // layout.queries * layout.num_kv_heads
        if max_seq_len <= SHORT_CONTEXT or 2 * fewest_items > programs:
            return None
        return cls(Partials.of_rows(out_THd, programs * tiles.rows))


def large_tiles(head_dim: int) -> PrefillTiles:
    """Return Hopper's tiles for heads of more than 128 elements in 16 bits, with up to 216 KiB of shared memory.

    Hopper's matrix instructions are for 64 rows. Each of two groups of warps has the sums of 64 rows, or for wide heads
    half of the sums of the same rows.
    """
    if is_wide(head_dim):
        return PrefillTiles(rows=64, keys=32, num_warps=8, num_stages=2, programs=1)
    return PrefillTiles(rows=128, keys=64, num_warps=8, num_stages=2, programs=1)


def prefill_tiles(head_dim: int, element_size: int, max_seq_len: int, large: bool) -> PrefillTiles:
    """Return tiles for a head size (elements) and element size (bytes) that fit registers and shared memory.

    max_seq_len: the host's upper bound of the contexts; short contexts would leave large tiles half empty. large: see
    kernel_choice.has_large_tiles. `rows` is at least the largest number of query heads per K/V head that the backend
    allows for such heads.
    """
    gains = is_wide(head_dim) or (head_dim > 128 and max_seq_len > SHORT_CONTEXT)
    if large and gains and element_size == 2:
        return large_tiles(head_dim)
    if is_wide(head_dim):
        rows = most_rows(element_size)
        wide = wide_tiles(element_size, rows)
        return PrefillTiles(rows, wide.keys, wide.num_warps, wide.num_stages, wide.programs)
    if element_size == 4:
        return PrefillTiles(rows=32, keys=16, num_warps=8, num_stages=2, programs=2)
    if head_dim > 128:
        return PrefillTiles(rows=64, keys=32, num_warps=4, num_stages=2, programs=2)
    if max_seq_len <= SHORT_CONTEXT:
        return PrefillTiles(rows=64, keys=32, num_warps=4, num_stages=3, programs=4 if head_dim <= 64 else 2)
    return PrefillTiles(rows=128, keys=64, num_warps=4 if head_dim <= 64 else 8, num_stages=3, programs=1)


def fewest_rows(head_dim: int, element_size: int, large: bool) -> int:
    """Return the smallest number of rows that prefill_tiles chooses for these heads, over all context lengths."""
    contexts = SHORT_CONTEXT, SHORT_CONTEXT + 1
    return min(prefill_tiles(head_dim, element_size, context, large).rows for context in contexts)


@quick_launches
@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_TENSORS)
def prefill_kernel(
    q_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    work_ptr: tl.tensor,
    num_tiles_ptr: tl.tensor,
    partial_ptr: tl.tensor | None,
    partial_max_ptr: tl.tensor | None,
    partial_sum_ptr: tl.tensor | None,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    keys_ahead_ptr: tl.tensor,
    scale_log2: tl.tensor,
    num_requests: tl.tensor,
    table_stride: tl.tensor,
    q_token_stride: tl.tensor,
    out_token_stride: tl.tensor,
    min_keys: tl.tensor,
    Q_HEAD_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HEADER: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute prefill attention. Programs take items of the work list and write the results of their queries to out.

    An item is TILE_M // GROUP queries of one request, for the GROUP query heads of one K/V head. With partial_ptr, if
    there are at least twice as many programs as such items, an item has only a part of the keys.

    q_ptr, out_ptr: [T, H, d]. cache_ptr: [N, 2, P, K, WIDTH]. scales_ptr: see triton_codes. sinks_ptr: [H] or None.
    work_ptr, MAX_SPLITS, HEADER: see work_list. num_tiles_ptr: see work_list.num_tiles_of.
    partial_ptr, partial_max_ptr, partial_sum_ptr, min_keys: see KeySplits. Pointers None: no keys are split.
    query_start_loc_ptr, seq_lens_ptr, block_table_ptr, keys_ahead_ptr (or None): see AttentionInputs.
    scale_log2, CAP_SCALE: see triton_tile.scales. WINDOW: keys that a query sees, 0: all.

    The previous kernel, for decodes or other prefills, writes nothing that is read here, and has waited for all kernels
    before it. So gdc_wait comes last: it only keeps the next kernel from starting before the previous one has ended.
    """
    QUERIES: tl.constexpr = TILE_M // GROUP
    SHARED: tl.constexpr = partial_ptr is not None
    TILE_LENGTH: tl.constexpr = tile_length(NUM_KV_HEADS)
    num_whole = num_tiles_of(work_ptr, num_tiles_ptr) * NUM_KV_HEADS
    tiles_ptr = work_ptr + HEADER + num_requests * (NUM_KV_HEADS + MAX_SPLITS)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_items = num_whole
    most_splits = 1
    if SHARED:
        most_splits = tl.minimum(tl.maximum(num_programs // tl.maximum(num_whole, 1), 1), MOST_SHARING)
        num_items *= most_splits
    rows_M = tl.arange(0, TILE_M)
    elements = head_elements(HEAD_DIM, TILE_D)
    n_N = tl.arange(0, TILE_N)
    for first_item in tl.range(0, num_items, num_programs, num_stages=1):
        item = item_at(first_item, num_programs, program)
        if item < num_items:
            whole = item
            if SHARED:
                whole = item % num_whole
            kv_head = whole % NUM_KV_HEADS
            tile_ptr = tiles_ptr + TILE_LENGTH * (whole // NUM_KV_HEADS)
            request = tl.load(tile_ptr)
            first_query = tl.load(tile_ptr + 1)
            query_start = tl.load(query_start_loc_ptr + request)
            query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
            seq_len = tl.load(seq_lens_ptr + request)

            queries_M = first_query + rows_M // GROUP
            heads_M = kv_head * GROUP + rows_M % GROUP
            mask_M = (rows_M < QUERIES * GROUP) & (queries_M < query_len)
            masks = head_masks(mask_M, elements, HEAD_DIM)
            tokens_M = (query_start + queries_M).to(tl.int64)
            # The hint lets 16 bytes be read at once: head sizes are multiples of 8.
            q_rows_M = tl.multiple_of(tokens_M * q_token_stride, 8) + heads_M * Q_HEAD_STRIDE
            q_parts = load_queries(q_ptr + q_rows_M[:, None], elements, masks, ".cg")
            q_parts = [product_type(q_MD, cache_ptr.dtype.element_ty) for q_MD in q_parts]

            positions_M = seq_len - query_len + queries_M
            first_position = seq_len - query_len + first_query
            end_key = tl.minimum(first_position + QUERIES, seq_len)
            ahead_M = None
            if keys_ahead_ptr is not None:
                ahead_M = tl.load(keys_ahead_ptr + tokens_M, mask=queries_M < query_len, other=0)
                end_key = tl.minimum(tl.maximum(tl.max(positions_M + ahead_M, 0) + 1, end_key), seq_len)
            first_key = first_read(first_position, WINDOW, TILE_N)
            end_unmasked = first_key
            if WINDOW == 0:
                end_unmasked = tl.maximum(first_position + 1, 0) // TILE_N * TILE_N
            split = 0
            num_splits = 1
            start_key = first_key
            stop_key = end_key
            if SHARED:
                length = split_length(end_key - first_key, most_splits, min_keys, TILE_N)
                num_splits = tl.maximum(tl.cdiv(end_key - first_key, length), 1)
                split = item // num_whole
                start_key += split * length
                stop_key = tl.minimum(start_key + length, end_key)
            table_ptr = block_table_ptr + request.to(tl.int64) * table_stride
            head_cache_ptr = cache_ptr + kv_head * HEAD_DIM
            head_scales_ptr = None
            if scales_ptr is not None:
                head_scales_ptr = scales_ptr + kv_head
            acc_parts = no_sums(TILE_M, elements)
            max_M = tl.full([TILE_M], LOWEST, tl.float32)
            sum_M = tl.zeros([TILE_M], tl.float32)
            # First the tiles that every query sees whole, then the others.
            for masked in tl.static_range(2):
                start = end_unmasked if masked else start_key
                end = stop_key if masked else end_unmasked
                if SHARED:
                    start = tl.maximum(start, start_key)
                    end = tl.minimum(end, stop_key)
                # Blocks are looked up one tile ahead: only then are the loads of keys and values in flight side by
                # side.
                block_N = blocks_of(table_ptr, start + n_N, end_key, BLOCK_SIZE)
                for key in range(start, end, TILE_N):
                    next_block_N = blocks_of(table_ptr, key + TILE_N + n_N, end_key, BLOCK_SIZE)
                    acc_parts, max_M, sum_M = attend_tile(
                        q_parts,
                        acc_parts,
                        max_M,
                        sum_M,
                        positions_M,
                        key,
                        end_key,
                        block_N,
                        HeadCache(head_cache_ptr, head_scales_ptr, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH),
                        scale_log2,
                        masked == 1,
                        WINDOW,
                        CAP_SCALE,
                        TILE_N,
                        TILE_D,
                        ahead_M,
                    )
                    block_N = next_block_N
            out_rows_M = tl.multiple_of(tokens_M * out_token_stride, 8) + heads_M * OUT_HEAD_STRIDE
            is_whole = True
            if SHARED:
                is_whole = (num_splits == 1) & (split == 0)
                if (num_splits > 1) & (split < num_splits):
                    partials = partial_ptr, partial_max_ptr, partial_sum_ptr
                    first_M = whole * most_splits * TILE_M + rows_M
                    split_M = first_M + split * TILE_M
                    store_partials(*partials, split_M, mask_M, acc_parts, max_M, sum_M, HEAD_DIM, TILE_D)
                    tl.debug_barrier()  # every thread has written
                    arrived_ptr = tile_ptr + 2 + kv_head
                    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                        tl.store(arrived_ptr, 0)  # for the next layer
                        tl.debug_barrier()
                        store_combined(
                            out_ptr + out_rows_M,
                            *partials,
                            first_M,
                            mask_M,
                            num_splits,
                            sinks_ptr,
                            heads_M,
                            scale_log2,
                            HEAD_DIM,
                            TILE_M,
                            COMBINED,
                        )
            if is_whole:
                exists_M = heads_M < NUM_KV_HEADS * GROUP
                out_parts = normalised_parts(acc_parts, max_M, sum_M, sinks_ptr, heads_M, exists_M, scale_log2)
                store_parts(out_ptr, out_rows_M[:, None], out_parts, elements, masks)
    if DEPENDENT_LAUNCH:
        gdc_wait()


def prefill(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    work_W: torch.Tensor,
    layout: WorkLayout,
    tiles: PrefillTiles,
    num_sms: int,
    scoring: Scoring,
    num_tiles: torch.Tensor | None = None,
    splits: KeySplits | None = None,
) -> None:
    """Write to out_THd the attention of all requests with several queries.

    Must be launched after `listed_decode`, with only prefill kernels between. q_THd, out_THd: [T, H, d], d contiguous.
    work_W: the work list, with tiles of tiles.rows rows; layout: the list's layout. num_sms: multiprocessors of the
    GPU. num_tiles: int32 [1], the number of tiles to compute; None: all. splits: buffers of programs that share the
    keys of a tile, not overlapping those of `listed_decode`; None: no keys are shared.
    """
    programs = num_sms * tiles.programs
    if splits is None:
        programs = min(programs, layout.most_tiles(q_THd.shape[0]) * layout.num_kv_heads)
    prefill_kernel[(programs,)](
        q_THd,
        kv_cache_N2PKd,
        scales_of(kv_cache_N2PKd, scoring.kv_scales_2K),
        out_THd,
        work_W,
        num_tiles,
        *(splits.partials if splits is not None else (None, None, None)),
        inputs.query_start_loc_R1,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scoring.sinks_H,
        inputs.keys_ahead_T,
        scales(scoring)[0],
        layout.num_requests,
        inputs.block_table_RB.stride(0),
        q_THd.stride(0),
        out_THd.stride(0),
        splits.min_keys if splits is not None else 0,
        **paged_constants(q_THd, kv_cache_N2PKd, out_THd, scoring, tiled=True),
        TILE_M=tiles.rows,
        TILE_N=tiles.keys,
        MAX_SPLITS=MAX_LISTED_SPLITS,
        HEADER=HEADER,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
        **dependent_launch(q_THd.device),
    )
