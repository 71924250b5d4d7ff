"""Triton kernels: attention whose result for a token depends on the token's context alone, bit for bit.

The keys of a context are divided into splits of SPLIT keys, counted from its first key, and each split is reduced by
itself, in tiles of a fixed size. The results of the splits are then added in their order. So a token gets the same bits
as a decode, as a draft, or in a chunk of a prompt, whichever tokens share its tile, and whether a program computes all
splits or only some of them. A tile or split that a token does not see leaves the token's sums exactly as they are.

Every batch runs the same compiled kernel, with multiplications and additions not contracted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.backends.kernel_arguments import STEP_NUMBERS, STEP_TENSORS, paged_constants
from compiled_engine.attention.backends.triton_combine import Partials, store_partials
from compiled_engine.attention.backends.triton_tile import (
    LOWEST,
    HeadCache,
    first_read,
    fold_keys,
    head_elements,
    head_masks,
    load_queries,
    no_sums,
    normalised_parts,
    scales,
    store_parts,
)
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.attention.triton_codes import product_type, scales_of
from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch
from compiled_engine.kernels.launcher import quick_launches

# Keys of a split, a multiple of every tile's keys. Another number gives other bits.
SPLIT = 1024
# Buffers that begin behind another one.
PARTIALS = ("partial_max_ptr", "partial_sum_ptr")


@dataclass(frozen=True)
class InvariantTiles:
    """The rows and keys of a tile, and the options with which the kernel is compiled. They depend only on the layer.

    A row is one query head of one query. In 16 bits a tile has 64 rows for a single query too, since Hopper's tensor
    cores multiply fewer rows by another instruction, which may add in another order.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def invariant_tiles(head_dim: int, element_size: int) -> InvariantTiles:
    """Return tiles for a head size (elements, up to 256) and element size (bytes)."""
    if element_size == 4:
        return InvariantTiles(rows=32, keys=16, num_warps=4, num_stages=2)
    # Fewer keys leave room for more programs, which decodes need; prompts lose a tenth.
    return InvariantTiles(rows=64, keys=32, num_warps=4, num_stages=4 if head_dim <= 128 else 2)


@triton.jit
def folded(
    acc_parts: tl.tuple,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    split_acc_parts: tl.tuple,
    split_max_M: tl.tensor,
    split_sum_M: tl.tensor,
    scale_log2: tl.tensor,
) -> tuple[tuple[tl.tensor, ...], tl.tensor, tl.tensor]:
    """Return the online softmax's (acc, max, sum) of the splits so far, combined with those of the next split.

    acc_parts: the weighted sum of values, a tuple of one tile [M, D]. max_M, sum_M: largest score and sum of weights.
    """
    new_max_M = tl.maximum(max_M, split_max_M)
    before_M = tl.exp2((max_M - new_max_M) * scale_log2)
    added_M = tl.exp2((split_max_M - new_max_M) * scale_log2)
    first_MD = acc_parts[0] * before_M[:, None] + split_acc_parts[0] * added_M[:, None]
    return (first_MD,), new_max_M, sum_M * before_M + split_sum_M * added_M


@triton.jit
def tile_of(
    query_start_loc_ptr: tl.tensor, num_requests: tl.tensor, tile: tl.tensor, QUERIES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return (request, first query) of a tile; the query is past the request's last one if the tile has no work.

    The tiles of a request begin at query_start_loc // QUERIES + request, so each request has as many as it needs.
    """
    low = num_requests * 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        is_later = tl.load(query_start_loc_ptr + middle) // QUERIES + middle > tile
        low = tl.where(is_later, low, middle)
        high = tl.where(is_later, middle, high)
    return low, (tile - tl.load(query_start_loc_ptr + low) // QUERIES - low) * QUERIES


@quick_launches
@triton.jit(
    do_not_specialize=[*STEP_NUMBERS, "all_decode", "num_splits"],
    do_not_specialize_on_alignment=[*STEP_TENSORS, *PARTIALS],
)
def invariant_attention_kernel(
    q_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    scale_log2: tl.tensor,
    num_requests: tl.tensor,
    all_decode: tl.tensor,
    num_splits: tl.tensor,
    table_stride: tl.tensor,
    q_token_stride: tl.tensor,
    out_token_stride: tl.tensor,
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
    SPLIT: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute attention. Program (tile, K/V head, part) computes TILE_M // GROUP queries of a request.

    The parts of a tile with a single query take its splits in turn, and store their results in the partial buffers,
    which `fold_splits` adds. If num_splits is 0, or for a tile with several queries, part 0 computes all splits, and
    writes the result to out.

    q_ptr, out_ptr: [T, H, d]. cache_ptr: [N, 2, P, K, WIDTH]. scales_ptr: see triton_codes. sinks_ptr: [H] or None.
    partial_ptr: float32 [R, H, num_splits, d]; partial_max_ptr, partial_sum_ptr: float32 [R, H, num_splits].
    query_start_loc_ptr, seq_lens_ptr, block_table_ptr: see AttentionInputs. all_decode: 1 if each request has one
        query, so that tiles are requests; otherwise 0.
    scale_log2, CAP_SCALE: see triton_tile.scales. WINDOW: keys that a query sees, 0: all.
    """
    QUERIES: tl.constexpr = TILE_M // GROUP
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    request = tl.program_id(0)
    first_query = request * 0
    if all_decode == 0:
        request, first_query = tile_of(query_start_loc_ptr, num_requests, request, QUERIES)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)
    divided = (query_len == 1) & (num_splits > 0)
    if (first_query < query_len) & (divided | (part == 0)):
        rows_M = tl.arange(0, TILE_M)
        elements = head_elements(HEAD_DIM, TILE_D)
        queries_M = first_query + rows_M // GROUP
        heads_M = kv_head * GROUP + rows_M % GROUP
        mask_M = (rows_M < QUERIES * GROUP) & (queries_M < query_len)
        masks = head_masks(mask_M, elements, HEAD_DIM)
        tokens_M = (query_start + queries_M).to(tl.int64)
        # The hint lets 16 bytes be read at once: head sizes are multiples of 8.
        q_rows_M = tl.multiple_of(tokens_M * q_token_stride, 8) + heads_M * Q_HEAD_STRIDE
        q_parts = load_queries(q_ptr + q_rows_M[:, None], elements, masks, "")
        q_parts = [product_type(q_MD, cache_ptr.dtype.element_ty) for q_MD in q_parts]
        positions_M = seq_len - query_len + queries_M
        first_position = seq_len - query_len + first_query
        end_key = tl.minimum(first_position + QUERIES, seq_len)
        first_key = first_read(first_position, WINDOW, TILE_N)
        head_scales_ptr = None
        if scales_ptr is not None:
            head_scales_ptr = scales_ptr + kv_head
        acc_parts = no_sums(TILE_M, elements)
        max_M = tl.full([TILE_M], LOWEST, tl.float32)
        sum_M = tl.zeros([TILE_M], tl.float32)
        stride = tl.where(divided, tl.num_programs(2), 1)
        for split in range(first_key // SPLIT + part, tl.cdiv(end_key, SPLIT), stride):
            split_acc_parts, split_max_M, split_sum_M = fold_keys(
                q_parts,
                no_sums(TILE_M, elements),
                tl.full([TILE_M], LOWEST, tl.float32),
                tl.zeros([TILE_M], tl.float32),
                positions_M,
                block_table_ptr + request.to(tl.int64) * table_stride,
                HeadCache(cache_ptr + kv_head * HEAD_DIM, head_scales_ptr, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH),
                tl.maximum(first_key, split * SPLIT),
                tl.minimum(end_key, split * SPLIT + SPLIT),
                scale_log2,
                WINDOW,
                CAP_SCALE,
                TILE_N,
                TILE_D,
                True,
            )
            if divided:
                partials_M = (request * (NUM_KV_HEADS * GROUP) + heads_M).to(tl.int64) * num_splits + split
                partials = partial_ptr, partial_max_ptr, partial_sum_ptr
                results = split_acc_parts, split_max_M, split_sum_M
                store_partials(*partials, partials_M, mask_M, *results, HEAD_DIM, TILE_D)
            acc_parts, max_M, sum_M = folded(
                acc_parts, max_M, sum_M, split_acc_parts, split_max_M, split_sum_M, scale_log2
            )
        if not divided:
            exists_M = heads_M < NUM_KV_HEADS * GROUP
            out_parts = normalised_parts(acc_parts, max_M, sum_M, sinks_ptr, heads_M, exists_M, scale_log2)
            out_rows_M = tl.multiple_of(tokens_M * out_token_stride, 8) + heads_M * OUT_HEAD_STRIDE
            store_parts(out_ptr, out_rows_M[:, None], out_parts, elements, masks)


@quick_launches
@triton.jit(do_not_specialize=[*STEP_NUMBERS, "num_splits"], do_not_specialize_on_alignment=[*STEP_TENSORS, *PARTIALS])
def fold_splits_kernel(
    partial_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    scale_log2: tl.tensor,
    num_splits: tl.tensor,
    out_token_stride: tl.tensor,
    OUT_HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Add the partial results of a request with one query. Program (request, query head) writes a head to out.

    Arguments are those of invariant_attention_kernel, which stored the partial results.
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(query_start_loc_ptr + request).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    if tl.load(query_start_loc_ptr + request + 1) == token + 1:
        elements = head_elements(HEAD_DIM, TILE_D)
        heads_1 = tl.zeros([1], tl.int32) + head
        mask_1 = heads_1 >= 0
        masks = head_masks(mask_1, elements, HEAD_DIM)
        acc_parts = no_sums(1, elements)
        max_1 = tl.full([1], LOWEST, tl.float32)
        sum_1 = tl.zeros([1], tl.float32)
        first_split = first_read(seq_len - 1, WINDOW, TILE_N) // SPLIT
        for split in range(first_split, tl.cdiv(seq_len, SPLIT)):
            partials_1 = (request * tl.num_programs(1) + heads_1) * num_splits + split
            split_max_1 = tl.load(partial_max_ptr + partials_1)
            split_sum_1 = tl.load(partial_sum_ptr + partials_1)
            split_parts = load_queries(partial_ptr + (partials_1 * HEAD_DIM)[:, None], elements, masks, "")
            acc_parts, max_1, sum_1 = folded(acc_parts, max_1, sum_1, split_parts, split_max_1, split_sum_1, scale_log2)
        out_parts = normalised_parts(acc_parts, max_1, sum_1, sinks_ptr, heads_1, mask_1, scale_log2)
        out_row = tl.multiple_of(token * out_token_stride, 8) + heads_1 * OUT_HEAD_STRIDE
        store_parts(out_ptr, out_row[:, None], out_parts, elements, masks)


def attend_invariant(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    scoring: Scoring,
    num_sms: int,
) -> None:
    """Write causal attention over the cache to out_THd; the bits of a token depend on its context alone.

    q_THd, out_THd: [T, H, d], d contiguous and at most 256, up to 32 query heads per K/V head. num_sms:
    multiprocessors of the GPU; it decides how many programs share a context, which changes no bit.
    """
    assert inputs.keys_ahead_T is None  # models with images are refused
    num_tokens, num_requests, num_decodes, _, max_seq_len = inputs.sizes
    constants = paged_constants(q_THd, kv_cache_N2PKd, out_THd, scoring, tiled=True)
    num_kv_heads, head_dim = constants["NUM_KV_HEADS"], constants["HEAD_DIM"]
    tiles = invariant_tiles(head_dim, q_THd.element_size())
    all_decode = num_decodes == num_requests
    num_splits = cdiv(max(max_seq_len, 1), SPLIT)
    parts = min(num_splits, max(1, 2 * num_sms // (num_requests * num_kv_heads))) if num_decodes else 1
    stored = num_splits if parts > 1 else 0
    partials = Partials.of(out_THd, num_requests, stored)
    num_tiles = num_requests if all_decode else num_tokens // (tiles.rows // constants["GROUP"]) + num_requests
    scale_log2 = scales(scoring)[0]
    options: dict[str, object] = {"SPLIT": SPLIT, "TILE_N": tiles.keys, "enable_fp_fusion": False}
    options |= dependent_launch(q_THd.device)
    invariant_attention_kernel[(num_tiles, num_kv_heads, parts)](
        q_THd,
        kv_cache_N2PKd,
        scales_of(kv_cache_N2PKd, scoring.kv_scales_2K),
        out_THd,
        *partials,
        inputs.query_start_loc_R1,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scoring.sinks_H,
        scale_log2,
        num_requests,
        int(all_decode),
        stored,
        inputs.block_table_RB.stride(0),
        q_THd.stride(0),
        out_THd.stride(0),
        **constants,
        TILE_M=tiles.rows,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **options,
    )
    if stored:
        fold_splits_kernel[(num_requests, q_THd.shape[1])](
            *partials,
            out_THd,
            inputs.query_start_loc_R1,
            inputs.seq_lens_R,
            scoring.sinks_H,
            scale_log2,
            stored,
            out_THd.stride(0),
            OUT_HEAD_STRIDE=constants["OUT_HEAD_STRIDE"],
            WINDOW=constants["WINDOW"],
            HEAD_DIM=head_dim,
            TILE_D=constants["TILE_D"],
            num_warps=1,
            **options,
        )
