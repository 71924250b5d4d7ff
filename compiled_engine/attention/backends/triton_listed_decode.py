"""Triton kernel: decode attention over the paged cache, by persistent programs that take splits from the work list.

The last program to finish a split of a request combines the partial results, in the order of the keys. A result
therefore depends only on the request and the launch parameters, not on other requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.backends.decode_splits import GRAIN, MAX_LISTED_SPLITS
from compiled_engine.attention.backends.kernel_arguments import STEP_NUMBERS, STEP_TENSORS, paged_constants, rows_of
from compiled_engine.attention.backends.triton_combine import Partials, combined, store_partials
from compiled_engine.attention.backends.triton_tile import (
    HeadCache,
    attend_keys,
    first_seen,
    head_elements,
    head_masks,
    normalised_parts,
    scales,
    store_parts,
)
from compiled_engine.attention.backends.wide_tiles import is_wide, wide_tiles
from compiled_engine.attention.backends.work_list import HEADER, WorkLayout, split_length
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.attention.triton_codes import scales_of
from compiled_engine.kernels.launch_arguments import dependent_launch
from compiled_engine.kernels.launcher import quick_launches


@dataclass(frozen=True)
class ListedDecodeTiles:
    """The number of keys of a tile, and the options with which listed_decode_kernel is compiled and launched."""

    keys: int
    num_warps: int
    num_stages: int
    programs: int  # per multiprocessor


@cache
def listed_decode_tiles(head_dim: int, element_size: int, rows: int) -> ListedDecodeTiles:
    """Return tiles for a head size (elements) and element size (bytes). They are small, since contexts may be short.

    rows: number of rows of a tile of queries.
    """
    if is_wide(head_dim):
        wide = wide_tiles(element_size, rows)
        return ListedDecodeTiles(wide.keys, wide.num_warps, wide.num_stages, wide.programs)
    if element_size == 4:
        return ListedDecodeTiles(keys=32 if head_dim <= 128 else 16, num_warps=4, num_stages=2, programs=2)
    if head_dim > 128:
        return ListedDecodeTiles(keys=16, num_warps=4, num_stages=3, programs=3)
    return ListedDecodeTiles(keys=64, num_warps=2, num_stages=3, programs=6 if head_dim <= 64 else 4)


@quick_launches
@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_TENSORS)
def listed_decode_kernel(
    q_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
    work_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
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
    GRAIN: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute decode attention. Program p computes items p, p + programs, ... of the work list.

    An item is one split of a request's keys for one K/V head. A request's only split writes the result to out.
    Otherwise each split stores partial results and adds 1 to a counter in the work list (its part `arrived`). The split
    that finishes last combines the partial results.

    q_ptr, out_ptr: [T, H, d]. cache_ptr: [N, 2, P, K, WIDTH]. scales_ptr: see triton_codes. sinks_ptr: [H] or None.
    partial_ptr: float32 [R, H, MAX_SPLITS, d]; partial_max_ptr, partial_sum_ptr: float32 [R, H, MAX_SPLITS]; see
        triton_combine.Partials.
    work_ptr, MAX_SPLITS, HEADER: see work_list. min_keys, GRAIN: see work_list.split_length.
    query_start_loc_ptr, seq_lens_ptr, block_table_ptr: see AttentionInputs.
    scale_log2, CAP_SCALE: see triton_tile.scales. WINDOW: keys that a query sees, 0: all.
    """
    # Wait before anything is read: if a step has no plan, the kernel just before this one writes the list.
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    num_items = tl.load(work_ptr) * NUM_KV_HEADS
    arrived_ptr = work_ptr + HEADER
    splits_ptr = arrived_ptr + num_requests * NUM_KV_HEADS
    rows_M = tl.arange(0, TILE_M)
    elements = head_elements(HEAD_DIM, TILE_D)
    mask_M = rows_M < GROUP
    masks = head_masks(mask_M, elements, HEAD_DIM)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        entry = tl.load(splits_ptr + item // NUM_KV_HEADS)
        kv_head = item % NUM_KV_HEADS
        request = (entry // MAX_SPLITS).to(tl.int64)
        split = entry % MAX_SPLITS
        token = tl.load(query_start_loc_ptr + request).to(tl.int64)
        seq_len = tl.load(seq_lens_ptr + request)
        first_key = first_seen(seq_len, WINDOW)
        num_keys = seq_len - first_key
        length = split_length(num_keys, MAX_SPLITS, min_keys, GRAIN)
        num_splits = tl.maximum(tl.cdiv(num_keys, length), 1)
        first_key += split * length
        # The list has splits for any layer; those beyond this layer's own have nothing to do.
        if split < num_splits:
            head_scales_ptr = None
            if scales_ptr is not None:
                head_scales_ptr = scales_ptr + kv_head
            acc_parts, max_M, sum_M = attend_keys(
                # The hint lets 16 bytes be read at once: head sizes are multiples of 8.
                q_ptr + tl.multiple_of(token * q_token_stride, 8) + (kv_head * GROUP + rows_M) * Q_HEAD_STRIDE,
                mask_M,
                None,
                block_table_ptr + request * table_stride,
                HeadCache(cache_ptr + kv_head * HEAD_DIM, head_scales_ptr, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH),
                first_key,
                tl.minimum(first_key + length, seq_len),
                scale_log2,
                0,
                CAP_SCALE,
                TILE_M,
                TILE_N,
                TILE_D,
                False,
            )
            out_token_ptr = out_ptr + tl.multiple_of(token * out_token_stride, 8) + kv_head * GROUP * OUT_HEAD_STRIDE
            if num_splits == 1:
                heads_M = kv_head * GROUP + rows_M
                out_parts = normalised_parts(acc_parts, max_M, sum_M, sinks_ptr, heads_M, mask_M, scale_log2)
                store_parts(out_token_ptr, rows_M[:, None] * OUT_HEAD_STRIDE, out_parts, elements, masks)
            else:
                head = request * NUM_KV_HEADS + kv_head
                partials_M = (head * GROUP + rows_M) * MAX_SPLITS + split
                partials = partial_ptr, partial_max_ptr, partial_sum_ptr
                store_partials(*partials, partials_M, mask_M, acc_parts, max_M, sum_M, HEAD_DIM, TILE_D)
                tl.debug_barrier()  # every thread has written
                if tl.atomic_add(arrived_ptr + head, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                    tl.store(arrived_ptr + head, 0)  # for the next layer
                    tl.debug_barrier()
                    splits_S = tl.arange(0, MAX_SPLITS)
                    written_S = splits_S < num_splits
                    for row in range(0, GROUP):
                        partials_S = (head * GROUP + row) * MAX_SPLITS + splits_S
                        for part in tl.static_range(len(elements)):
                            out_D = combined(
                                *partials,
                                partials_S,
                                written_S,
                                sinks_ptr,
                                kv_head * GROUP + row,
                                elements[part],
                                scale_log2,
                                HEAD_DIM,
                                ".cg",
                            )
                            out_ptrs_D = out_token_ptr + row * OUT_HEAD_STRIDE + elements[part]
                            mask_D = elements[part] < HEAD_DIM
                            tl.store(out_ptrs_D, out_D.to(out_ptr.dtype.element_ty), mask=mask_D)


def listed_decode(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    work_W: torch.Tensor,
    layout: WorkLayout,
    min_keys: int,
    num_sms: int,
    scoring: Scoring,
) -> None:
    """Write to out_THd the attention of all requests with one query, by the splits of the work list.

    q_THd, out_THd: [T, H, d], d contiguous. work_W: the list; its `arrived` part is zero before and after the launch.
    layout: the list's layout. min_keys: as for write_lists. num_sms: multiprocessors of the GPU.
    """
    num_kv_heads = kv_cache_N2PKd.shape[3]
    constants = paged_constants(q_THd, kv_cache_N2PKd, out_THd, scoring, tiled=True)
    rows = rows_of(constants["GROUP"])
    tiles = listed_decode_tiles(q_THd.shape[2], q_THd.element_size(), rows)
    partials = Partials.of(out_THd, layout.num_requests, MAX_LISTED_SPLITS)
    listed_decode_kernel[(min(num_sms * tiles.programs, layout.num_requests * num_kv_heads * MAX_LISTED_SPLITS),)](
        q_THd,
        kv_cache_N2PKd,
        scales_of(kv_cache_N2PKd, scoring.kv_scales_2K),
        out_THd,
        *partials,
        work_W,
        inputs.query_start_loc_R1,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scoring.sinks_H,
        scales(scoring)[0],
        layout.num_requests,
        inputs.block_table_RB.stride(0),
        q_THd.stride(0),
        out_THd.stride(0),
        min_keys,
        **constants,
        TILE_M=rows,
        TILE_N=tiles.keys,
        MAX_SPLITS=MAX_LISTED_SPLITS,
        HEADER=HEADER,
        GRAIN=GRAIN,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
        **dependent_launch(q_THd.device),
    )
