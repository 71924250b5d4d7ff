"""Triton kernel: dequantises the contexts of a step's prompts from an 8-bit cache into a workspace for prefill kernels.

Each key of a prompt is multiplied by many queries, in several programs. Dequantising it once is cheaper, and allows
kernels that copy keys directly to where they are multiplied. The workspace holds the contexts block by block, without
gaps. It has room for MOST_CONTEXT_PER_TOKEN tokens of context per token that the step computes. Only the device knows
whether the contexts fit; if they do not, prefill kernels read the codes (the quantised values) instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from compiled_engine.attention.backends.decode_splits import BatchFacts
from compiled_engine.attention.backends.triton_tile import TILES_OF_KEYS, first_read
from compiled_engine.attention.backends.work_list import SEARCH_WIDTH
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.attention.triton_codes import (
    bfloat16_values,
    key_offset,
    numbers,
    scale_offset,
    scales_of,
)
from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.kv_format import head_dim_of

# Contexts are not dequantised in steps with fewer tokens, or if they have more tokens per token of the step.
FEWEST_TOKENS = 512
MOST_CONTEXT_PER_TOKEN = 4
# Elements of a tile.
TILE = 8192


@quick_launches
@triton.jit(
    do_not_specialize=["num_requests", "capacity", "table_stride", "new_table_stride"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "block_table_ptr",
        "new_table_ptr",
        "work_ptr",
        "num_tiles_ptr",
    ],
)
def decode_contexts_kernel(
    cache_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    new_cache_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    new_table_ptr: tl.tensor,
    work_ptr: tl.tensor,
    num_tiles_ptr: tl.tensor,
    num_requests: tl.tensor,
    capacity: tl.tensor,
    table_stride: tl.tensor,
    new_table_stride: tl.tensor,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_D: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Dequantise contexts. Program (block, half) writes a workspace block's keys (half 0) or values (half 1).

    Nothing is dequantised if the contexts need more than `capacity` blocks. With a window, blocks whose keys no query
    sees are skipped.

    cache_ptr: codes [N, 2, P, K, WIDTH]; scales_ptr: see triton_codes; new_cache_ptr: the workspace, [capacity, 2, P,
        K, d].
    query_start_loc_ptr, seq_lens_ptr, block_table_ptr: see AttentionInputs; work_ptr: see work_list.
    new_table_ptr: int32 [R, B], to which the workspace's blocks of each prompt are written.
    num_tiles_ptr: int32 [2], to which program (0, 0) writes how many tiles of the work list read the workspace, and how
        many read codes. One number is that of all tiles, the other 0.
    """
    block = tl.program_id(0)
    half = tl.program_id(1)
    # Blocks of all prompts, blocks of the requests before this block's, and the number of those requests.
    total, before, request = 0, 0, 0
    for start in range(0, num_requests, SEARCH_WIDTH):
        rows_S = start + tl.arange(0, SEARCH_WIDTH)
        there_S = rows_S < num_requests
        query_len_S = tl.load(query_start_loc_ptr + rows_S + 1, mask=there_S, other=0)
        query_len_S -= tl.load(query_start_loc_ptr + rows_S, mask=there_S, other=0)
        blocks_S = tl.cdiv(tl.load(seq_lens_ptr + rows_S, mask=there_S, other=0), BLOCK_SIZE)
        blocks_S = tl.where(query_len_S > 1, blocks_S, 0)
        passed_S = there_S & (total + tl.cumsum(blocks_S, 0) <= block)
        before += tl.sum(tl.where(passed_S, blocks_S, 0), 0)
        request += tl.sum(passed_S.to(tl.int32), 0)
        total += tl.sum(blocks_S, 0)
    if DEPENDENT_LAUNCH:
        gdc_wait()
    if (block == 0) & (half == 0):
        num_tiles = tl.load(work_ptr + 1)
        tl.store(num_tiles_ptr, tl.where(total <= capacity, num_tiles, 0))
        tl.store(num_tiles_ptr + 1, tl.where(total <= capacity, 0, num_tiles))
    if (total <= capacity) & (block < total):
        number = block - before
        tl.store(new_table_ptr + request * new_table_stride + number, block)
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
        first_position = tl.load(seq_lens_ptr + request) - query_len
        if (number + 1) * BLOCK_SIZE > first_read(first_position, WINDOW, TILES_OF_KEYS):
            old_block = tl.load(block_table_ptr + tl.cast(request, tl.int64) * table_stride + number)
            HALF: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
            heads_H = tl.arange(0, TILE_H)
            d_D = tl.arange(0, TILE_D)
            for start in range(0, HALF, TILE_H):
                head_H = start + heads_H
                mask_HD = (head_H < HALF)[:, None] & (d_D[None, :] < HEAD_DIM)
                old_ptr = cache_ptr + key_offset(old_block, 0, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH)
                old_ptr += half * (HALF * WIDTH)
                codes_HD = tl.load(old_ptr + head_H[:, None] * HEAD_DIM + d_D[None, :], mask=mask_HD, other=0.0)
                if WIDTH != HEAD_DIM:
                    scale_ptr = scales_ptr + scale_offset(old_block, 0, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH)
                    scale_H = tl.load(scale_ptr + half * (HALF * WIDTH // 2) + head_H, mask=head_H < HALF, other=0)
                    scale_H = bfloat16_values(scale_H)
                else:
                    scale_H = tl.load(scales_ptr + half * NUM_KV_HEADS + head_H % NUM_KV_HEADS)
                values_HD = numbers(codes_HD, tl.float32) * scale_H[:, None]
                new_ptr = new_cache_ptr + (block.to(tl.int64) * 2 + half) * (HALF * HEAD_DIM)
                new_ptrs_HD = new_ptr + head_H[:, None] * HEAD_DIM + d_D[None, :]
                tl.store(new_ptrs_HD, values_HD.to(new_cache_ptr.dtype.element_ty), mask=mask_HD)


class PrefillSource(NamedTuple):
    """A cache that a prefill kernel reads, with its block table, its scales and the number of tiles that read it."""

    kv_cache_N2PKd: torch.Tensor
    inputs: AttentionInputs
    scoring: Scoring
    num_tiles: torch.Tensor | None  # see work_list.num_tiles_of


class DecodedContexts(NamedTuple):
    """The dequantised contexts of a step's prompts, and how many tiles of the work list read them."""

    source: PrefillSource  # the workspace, [N, 2, P, K, d] in the dtype of queries
    num_tiles_2: torch.Tensor  # how many tiles of the work list read the workspace, and how many read codes
    certain: bool  # all contexts fit, whatever their lengths


def prefill_sources(
    contexts: DecodedContexts | None, kv_cache_N2PKd: torch.Tensor, inputs: AttentionInputs, scoring: Scoring
) -> list[PrefillSource]:
    """Return the caches that prefill kernels read, one after another: the workspace, then the codes.

    The codes are left out if all contexts are certain to fit into the workspace. contexts None: only kv_cache_N2PKd.
    """
    if contexts is None:
        return [PrefillSource(kv_cache_N2PKd, inputs, scoring, None)]
    if contexts.certain:
        return [contexts.source]
    return [contexts.source, PrefillSource(kv_cache_N2PKd, inputs, scoring, contexts.num_tiles_2[1:])]


def workspace_blocks(facts: BatchFacts, block_size: int) -> tuple[int, int]:
    """Return (number of blocks of the workspace, largest number of blocks that the prompts' contexts may need).

    The workspace has at least one block. So a program runs even without prompts, and writes the numbers of tiles that
    prefill kernels read.
    """
    num_prompts = facts.num_requests - facts.num_decodes
    bound = cdiv(MOST_CONTEXT_PER_TOKEN * facts.num_tokens, block_size) + num_prompts
    most = num_prompts * cdiv(facts.max_seq_len, block_size)
    return max(1, min(bound, most)), most


def decode_contexts(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    inputs: AttentionInputs,
    work_W: torch.Tensor,
    facts: BatchFacts,
    scoring: Scoring,
) -> DecodedContexts:
    """Dequantise the contexts of all requests with several queries into a new workspace, if they fit.

    Returns the workspace, and how many tiles of the work list read it: none if the contexts do not fit.
    The workspace has the dtype and device of q_THd. Must be launched before `listed_decode`.
    """
    block_size, num_kv_heads, width = kv_cache_N2PKd.shape[2:]
    head_dim = head_dim_of(kv_cache_N2PKd)
    capacity, most = workspace_blocks(facts, block_size)
    decoded = q_THd.new_empty((capacity, 2, block_size, num_kv_heads, head_dim))
    table_RB = torch.empty_like(inputs.block_table_RB, memory_format=torch.contiguous_format)
    num_tiles_2 = work_W.new_empty(2)
    decode_contexts_kernel[(capacity, 2)](
        kv_cache_N2PKd,
        scales_of(kv_cache_N2PKd, scoring.kv_scales_2K),
        decoded,
        inputs.query_start_loc_R1,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        table_RB,
        work_W,
        num_tiles_2,
        facts.num_requests,
        capacity,
        inputs.block_table_RB.stride(0),
        table_RB.stride(0),
        WINDOW=scoring.sliding_window,
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        TILE_H=TILE // next_power_of_2(head_dim),
        TILE_D=next_power_of_2(head_dim),
        num_warps=4,
        **dependent_launch(q_THd.device),
    )
    values = scoring._replace(kv_scales_2K=None)
    source = PrefillSource(decoded, replace(inputs, block_table_RB=table_RB), values, num_tiles_2[:1])
    return DecodedContexts(source, num_tiles_2, most <= capacity)
