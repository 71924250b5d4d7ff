"""Launch of the kernel that norms, rotates, writes and attends for decodes."""

from __future__ import annotations

import math

import torch
import triton

from compiled_engine.attention.backends.decode_splits import GRAIN, Splits
from compiled_engine.attention.backends.triton_decode import combine_splits, decode_tiles
from compiled_engine.attention.backends.triton_rope_decode_kernel import rope_decode_kernel
from compiled_engine.attention.backends.triton_tile import scales
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring
from compiled_engine.kernels.dependent_launch import dependent_launch


def rope_decode(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    rotation: Rotation,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    num_decodes: int,
    splits: Splits,
    scoring: Scoring,
) -> None:
    """Launch the kernels for the first num_decodes requests, whose queries are the first num_decodes tokens."""
    num_heads = q_THd.shape[1]
    block_size, num_kv_heads, head_dim = kv_cache_N2PKd.shape[2:]
    group = num_heads // num_kv_heads
    tiles = decode_tiles(head_dim, kv_cache_N2PKd.element_size(), splits.programs)
    scale_log2, cap_scale = scales(scoring)
    partial_shape = (num_decodes, num_heads, splits.count) if splits.count > 1 else (0,)
    partial = out_THd.new_empty((*partial_shape, head_dim), dtype=torch.float32)
    partial_max, partial_sum = out_THd.new_empty((2, *partial_shape), dtype=torch.float32)
    token_strides = [t.stride(0) for t in (q_THd, k_TKd, v_TKd, rotation.cos_T1d, rotation.sin_T1d)]
    rope_decode_kernel[(num_kv_heads, num_decodes, splits.count)](
        q_THd,
        k_TKd,
        v_TKd,
        rotation.q_norm_weight_d,
        rotation.k_norm_weight_d,
        rotation.cos_T1d,
        rotation.sin_T1d,
        kv_cache_N2PKd,
        out_THd,
        partial,
        partial_max,
        partial_sum,
        inputs.slot_mapping_T,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scoring.sinks_H,
        rotation.eps,
        scale_log2,
        inputs.block_table_RB.stride(0),
        *token_strides,
        out_THd.stride(0),
        splits.min_keys,
        STRIDE_MULTIPLE=math.gcd(8, *token_strides),
        Q_HEAD_STRIDE=q_THd.stride(1),
        K_HEAD_STRIDE=k_TKd.stride(1),
        V_HEAD_STRIDE=v_TKd.stride(1),
        OUT_HEAD_STRIDE=out_THd.stride(1),
        OFFSET=rotation.norm_offset,
        WIDE=rotation.norm_wide,
        WINDOW=scoring.sliding_window,
        CAP_SCALE=cap_scale,
        GROUP=group,
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        TILE_M=max(16, triton.next_power_of_2(group)),
        FIRST_N=tiles.keys,
        TILE_N=tiles.keys,
        TILE_D=triton.next_power_of_2(head_dim),
        GRAIN=GRAIN,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
        **dependent_launch(q_THd.device),
    )
    if splits.count > 1:
        combine_splits(partial, partial_max, partial_sum, out_THd, inputs, splits, scoring)
