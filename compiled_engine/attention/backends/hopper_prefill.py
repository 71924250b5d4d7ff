"""Prefill attention for Hopper, in Gluon: one warp copies keys and values, two groups of four warps compute.

After FlashAttention-3 (Shah et al. 2024): copies by TMA into two stages; products are asynchronous, a tile's scores
being computed beside the product of the values before them; probabilities stay in registers.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from compiled_engine.attention.backends.decode_splits import MAX_LISTED_SPLITS
from compiled_engine.attention.backends.hopper_compute import compute_items
from compiled_engine.attention.backends.hopper_copy import (
    HALF,
    KEYS,
    ROWS,
    SHARED,
    STAGES,
    WIDTH,
    Batch,
    Rings,
    copy_tiles,
    heads_of,
)
from compiled_engine.attention.backends.work_list import HEADER, WorkLayout
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.kernels.launcher import quick_launches

HEAD_DIMS = (64, 128)
# With fewer in a step its start takes longer than it saves.
FEWEST_TOKENS = 2048
# Of a thread that computes, and of one that copies.
COMPUTING_REGISTERS, COPYING_REGISTERS = gl.constexpr(240), gl.constexpr(24)


@quick_launches
@gluon.jit(
    do_not_specialize=["num_requests", "table_stride", "q_token_stride", "out_token_stride"],
    do_not_specialize_on_alignment=["work_ptr", "query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def hopper_prefill_kernel(  # type: ignore[no-untyped-def]
    cache_desc,
    q_ptr,
    out_ptr,
    work_ptr,
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
    """An item: ROWS // GROUP queries of one request, times the GROUP heads of one K/V head.

    What is waited for, at the end, is the kernel before: see prefill_kernel.
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
        gl.load(work_ptr + 1) * NUM_KV_HEADS,
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
    """Whether the kernel serves a batch whose list has tiles of so many rows."""
    return (
        tile_rows == ROWS.value
        and q_THd.shape[0] >= FEWEST_TOKENS
        and not scoring.soft_cap
        and scoring.sinks_H is None
        and kv_cache_N2PKd.shape[-1] in HEAD_DIMS
        and q_THd.element_size() == 2
        and q_THd.device.type == "cuda"
        and torch.cuda.get_device_capability(q_THd.device)[0] == 9
    )


def box_rows(block_size: int) -> int:
    """Rows of a box: the largest power of two that blocks and tiles consist of."""
    return min(block_size & -block_size, KEYS.value)


def hopper_prefill(
    q_THd: torch.Tensor,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    work_W: torch.Tensor,
    layout: WorkLayout,
    num_sms: int,
    scoring: Scoring,
) -> None:
    """Launch the kernel for all requests with several queries, right after `listed_decode`; the list has tiles of ROWS
    rows."""
    num_tokens, num_heads, _ = q_THd.shape
    num_blocks, _, block_size, num_kv_heads, head_dim = kv_cache_N2PKd.shape
    box = box_rows(block_size)
    cache = TensorDescriptor(
        kv_cache_N2PKd,
        [num_blocks * 2 * block_size, num_kv_heads * head_dim],
        [num_kv_heads * head_dim, 1],
        [box, WIDTH.value],
        SHARED.value,
    )
    hopper_prefill_kernel[(min(num_sms, layout.most_tiles(num_tokens) * num_kv_heads),)](
        cache,
        q_THd,
        out_THd,
        work_W,
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
