"""Gluon kernel for Hopper: attention of each request's newest token and its drafts, without splits.

It also norms and rotates q and k, and writes k and v. One program handles all keys of a request and K/V head, as in
short_decode.py. The cached keys are a single tile, which is loaded before the program waits for the previous kernels.
The tile of queries has a row for each token and each query head that shares the K/V head. This step's keys and values
are a separate tile, which is not read from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.backends.kernel_arguments import (
    STEP_NUMBERS,
    STEP_TENSORS,
    RotatingArguments,
    paged_constants,
)
from compiled_engine.attention.backends.short_decode import (
    ROWS,
    WIDTH,
    ShortTiles,
    attend_held,
    copy_values,
    load_keys,
)
from compiled_engine.attention.backends.triton_tile import LOWEST, capped, first_seen, normalised, scales, seen
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring
from compiled_engine.attention.triton_codes import row_of
from compiled_engine.attention.triton_rotation import turned
from compiled_engine.kernels.launcher import quick_launches


@gluon.jit
def _heads(  # type: ignore[no-untyped-def]
    ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    start_M,
    cos_start_M,
    sin_start_M,
    mask_M,
    eps,
    layout: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    OFFSET: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Return heads [M, HEAD_DIM], loaded from ptr, normed if there are weights, and rotated.

    start_M: offset of each head from ptr; cos_start_M, sin_start_M: offsets of its token's cos and sin. All loads are
    issued before the first is waited for.
    """
    d_1D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))[None, :]
    other_1D = (d_1D + HEAD_DIM // 2) % HEAD_DIM
    mask_M1 = mask_M[:, None]
    x_MD = gl.load(ptr + start_M[:, None] + d_1D, mask=mask_M1, other=0.0)
    y_MD = gl.load(ptr + start_M[:, None] + other_1D, mask=mask_M1, other=0.0)
    cos_MD = gl.load(cos_ptr + cos_start_M[:, None] + d_1D, mask=mask_M1, other=0.0)
    sin_MD = gl.load(sin_ptr + sin_start_M[:, None] + d_1D, mask=mask_M1, other=0.0)
    x_weight_1D = None
    y_weight_1D = None
    if weight_ptr is not None:
        x_weight_1D = gl.load(weight_ptr + d_1D)
        y_weight_1D = gl.load(weight_ptr + other_1D)
    return turned(
        x_MD.to(gl.float32),
        y_MD.to(gl.float32),
        x_weight_1D,
        y_weight_1D,
        cos_MD.to(gl.float32),
        sin_MD.to(gl.float32),
        d_1D,
        eps,
        HEAD_DIM,
        OFFSET,
        WIDE,
        ptr.dtype.element_ty,
    )


@quick_launches
@gluon.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_TENSORS)
def short_drafts_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    out_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    block_table_ptr,
    sinks_ptr,
    eps,
    scale_log2,
    table_stride,
    q_stride,
    k_stride,
    v_stride,
    cos_stride,
    sin_stride,
    out_stride,
    STRIDE_MULTIPLE: gl.constexpr,
    Q_HEAD_STRIDE: gl.constexpr,
    K_HEAD_STRIDE: gl.constexpr,
    V_HEAD_STRIDE: gl.constexpr,
    OUT_HEAD_STRIDE: gl.constexpr,
    OFFSET: gl.constexpr,
    WIDE: gl.constexpr,
    WINDOW: gl.constexpr,
    CAP_SCALE: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    QUERY_LEN: gl.constexpr,
    KEYS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Compute attention of QUERY_LEN tokens per request. Program (K/V head, request) computes their GROUP heads.

    A program norms and rotates q and the new keys, and writes new keys and values to the cache if they have slots. The
    rows (tokens) of a request are consecutive, padding last, as in decode_kernel.

    q_ptr, out_ptr: [R, H, d]; k_ptr, v_ptr: [R, K, d]; strides without HEAD in their names are those of rows.
    q_weight_ptr, k_weight_ptr: [d], or None without norms; cos_ptr, sin_ptr: [R, d]. OFFSET, WIDE: see Rotation.
    cache_ptr: [N, 2, P, K, d], 16 bits like q. sinks_ptr: [H] or None.
    slot_mapping_ptr, seq_lens_ptr, block_table_ptr: see AttentionInputs.
    scale_log2, CAP_SCALE: see triton_tile.scales. WINDOW: keys that a query sees, 0: all.
    KEYS: keys of the tile, which must hold the longest context.
    STRIDE_MULTIPLE: a divisor of all row strides but out's.
    """
    kv_head = gl.program_id(0)
    first_row = gl.program_id(1).to(gl.int64) * QUERY_LEN
    # Lengths, block table and slots were written before the kernels that this one may overlap with.
    first_key = first_seen(gl.load(seq_lens_ptr + first_row), WINDOW)
    end_key = 0
    last_row = first_row
    num_new = 0
    for i in gl.static_range(QUERY_LEN):
        seq_len = gl.load(seq_lens_ptr + first_row + i)
        # Without a slot, the cache already holds the row's key.
        num_new += ((seq_len > 0) & (gl.load(slot_mapping_ptr + first_row + i) >= 0)).to(gl.int32)
        end_key = gl.maximum(end_key, seq_len)
        last_row = gl.where(seq_len > 0, first_row + i, last_row)
    end_key -= num_new

    dtype: gl.constexpr = cache_ptr.dtype.element_ty
    ROW: gl.constexpr = NUM_KV_HEADS * HEAD_DIM
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    # Each warp has all new keys, so that their scores stay in it.
    new_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    row_layout: gl.constexpr = gl.BlockedLayout([1, WIDTH], [256 // HEAD_DIM, HEAD_DIM // WIDTH], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(WIDTH, 1, 8, [1, 0])
    k_layout: gl.constexpr = gl.DotOperandLayout(1, layout, WIDTH)
    # A row's table has no blocks beyond the row's own context, so the last row's is read.
    table_ptr = block_table_ptr + last_row * table_stride
    head_cache_ptr = cache_ptr + kv_head * HEAD_DIM
    v_smem = gl.allocate_shared_memory(dtype, [KEYS, HEAD_DIM], shared)
    k_DN = load_keys(table_ptr, head_cache_ptr, first_key, end_key, k_layout, KEYS, BLOCK_SIZE, ROW, HEAD_DIM)
    copy_values(v_smem, table_ptr, head_cache_ptr, first_key, end_key, row_layout, KEYS, BLOCK_SIZE, ROW, HEAD_DIM)
    # Rows of the tile of queries, and rows of the tile of new keys.
    m_M = gl.arange(0, ROWS, layout=gl.SliceLayout(1, row_layout))
    mask_M = m_M < QUERY_LEN * GROUP
    token_M = first_row + gl.where(mask_M, m_M // GROUP, 0)
    own_M = first_row + gl.where(m_M < QUERY_LEN, m_M, 0)
    slot_M = gl.load(slot_mapping_ptr + own_M)
    new_M = (m_M < QUERY_LEN) & (gl.load(seq_lens_ptr + own_M) > 0) & (slot_M >= 0)
    out_m_M = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    out_mask_M = out_m_M < QUERY_LEN * GROUP
    out_token_M = first_row + gl.where(out_mask_M, out_m_M // GROUP, 0)
    position_M = gl.where(out_mask_M, gl.load(seq_lens_ptr + out_token_M), 0) - 1
    new_n_N = gl.arange(0, ROWS, layout=gl.SliceLayout(0, new_layout))
    own_N = first_row + gl.where(new_n_N < QUERY_LEN, new_n_N, 0)
    new_seq_len_N = gl.load(seq_lens_ptr + own_N)
    new_N = (new_n_N < QUERY_LEN) & (new_seq_len_N > 0) & (gl.load(slot_mapping_ptr + own_N) >= 0)
    new_position_M = gl.convert_layout(position_M, gl.SliceLayout(1, new_layout))
    new_seen_MN = new_N[None, :] & seen(new_seq_len_N - 1, new_position_M, WINDOW)
    key_N = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
    gdc_wait()
    # Not earlier: the next kernels' weights would be loaded before this kernel's keys.
    gdc_launch_dependents()

    d_1D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, row_layout))[None, :]
    v_start_M = gl.multiple_of(own_M * v_stride, STRIDE_MULTIPLE) + kv_head * V_HEAD_STRIDE
    v_MD = gl.load(v_ptr + v_start_M[:, None] + d_1D, mask=new_M[:, None], other=0.0)
    q_MD = _heads(
        q_ptr,
        q_weight_ptr,
        cos_ptr,
        sin_ptr,
        gl.multiple_of(token_M * q_stride, STRIDE_MULTIPLE) + (kv_head * GROUP + m_M % GROUP) * Q_HEAD_STRIDE,
        gl.multiple_of(token_M * cos_stride, STRIDE_MULTIPLE),
        gl.multiple_of(token_M * sin_stride, STRIDE_MULTIPLE),
        mask_M,
        eps,
        row_layout,
        HEAD_DIM,
        OFFSET,
        WIDE,
    )
    k_MD = _heads(
        k_ptr,
        k_weight_ptr,
        cos_ptr,
        sin_ptr,
        gl.multiple_of(own_M * k_stride, STRIDE_MULTIPLE) + kv_head * K_HEAD_STRIDE,
        gl.multiple_of(own_M * cos_stride, STRIDE_MULTIPLE),
        gl.multiple_of(own_M * sin_stride, STRIDE_MULTIPLE),
        new_M,
        eps,
        row_layout,
        HEAD_DIM,
        OFFSET,
        WIDE,
    )
    q_smem = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], shared, q_MD)
    new_k_smem = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], shared, k_MD)
    new_v_smem = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], shared, v_MD)
    new_row_M = row_of(slot_M // BLOCK_SIZE, slot_M, BLOCK_SIZE) * ROW
    gl.store(head_cache_ptr + new_row_M[:, None] + d_1D, k_MD, mask=new_M[:, None])
    gl.store(head_cache_ptr + (new_row_M + BLOCK_SIZE * ROW)[:, None] + d_1D, v_MD, mask=new_M[:, None])

    new_k_DN = new_k_smem.permute((1, 0)).load(gl.DotOperandLayout(1, new_layout, WIDTH))
    new_q_MD = q_smem.load(gl.DotOperandLayout(0, new_layout, WIDTH))
    new_scores_MN = mma_v2(new_q_MD, new_k_DN, gl.zeros([ROWS, ROWS], gl.float32, new_layout))
    new_scores_MN = gl.where(new_seen_MN, capped(new_scores_MN, CAP_SCALE), float("-inf"))
    max_M = gl.convert_layout(gl.maximum(gl.max(new_scores_MN, 1), LOWEST), gl.SliceLayout(1, layout))
    # The weights of cached and of new keys share a maximum, so that the sums of neither are scaled again.
    acc_MD, max_M, sum_M = attend_held(
        q_smem.load(gl.DotOperandLayout(0, layout, WIDTH)),
        k_DN,
        v_smem,
        gl.zeros([ROWS, HEAD_DIM], gl.float32, layout),
        max_M,
        gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout)),
        (key_N < end_key)[None, :] & seen(key_N, position_M, WINDOW),
        scale_log2,
        layout,
        KEYS,
        CAP_SCALE,
    )
    new_max_M = gl.convert_layout(max_M * scale_log2, gl.SliceLayout(1, new_layout))
    new_weights_MN = gl.exp2(new_scores_MN * scale_log2 - new_max_M[:, None])
    sum_M += gl.convert_layout(gl.sum(new_weights_MN, 1), gl.SliceLayout(1, layout))
    new_weights_MN = gl.convert_layout(new_weights_MN.to(dtype), gl.DotOperandLayout(0, layout, 2))
    acc_MD = mma_v2(new_weights_MN, new_v_smem.load(gl.DotOperandLayout(1, layout, 2)), acc_MD)
    head_M = kv_head * GROUP + out_m_M % GROUP
    out_MD = normalised(acc_MD, max_M, sum_M, sinks_ptr, head_M, out_mask_M, scale_log2)
    acc_d_D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    out_start_M = out_token_M * out_stride + head_M * OUT_HEAD_STRIDE
    gl.store(out_ptr + out_start_M[:, None] + acc_d_D[None, :], out_MD.to(dtype), mask=out_mask_M[:, None])


def tiles_of_drafts(max_seq_len: int, short_contexts: Sequence[int]) -> ShortTiles | None:
    """Return the smallest tile that holds max_seq_len tokens, or None. short_contexts: the tiles' sizes, ascending."""
    return next((ShortTiles(context) for context in short_contexts if max_seq_len <= context), None)


def fits_one_tile(query_len: int, group: int) -> bool:
    """Return whether the kernel serves query_len tokens per request with `group` query heads per K/V head."""
    return query_len * group <= ROWS.value


def short_drafts(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    rotation: Rotation,
    kv_cache_N2PKd: torch.Tensor,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    query_len: int,
    scoring: Scoring,
    tiles: ShortTiles,
) -> None:
    """Norm and rotate q and k, store k and v, and write the attention of all rows to out_THd.

    Each row is one token; `query_len` consecutive rows share a request. fits_one_tile says which numbers are possible.
    q_THd, out_THd: [R, H, d]; k_TKd, v_TKd: [R, K, d]; d contiguous; the cache has the dtype of q. tiles: without a
    ring buffer; a tile must hold the longest context.
    """
    rotating = RotatingArguments.of(q_THd, k_TKd, v_TKd, rotation)
    short_drafts_kernel[(kv_cache_N2PKd.shape[3], q_THd.shape[0] // query_len)](
        *rotating.tensors,
        kv_cache_N2PKd,
        out_THd,
        inputs.slot_mapping_T,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        scoring.sinks_H,
        rotation.eps,
        scales(scoring)[0],
        inputs.block_table_RB.stride(0),
        *rotating.token_strides,
        out_THd.stride(0),
        **rotating.constants,
        **paged_constants(q_THd, kv_cache_N2PKd, out_THd, scoring),
        QUERY_LEN=query_len,
        KEYS=tiles.keys,
        WARPS=tiles.warps,
        maxnreg=tiles.registers or None,
        num_warps=tiles.warps,
        launch_pdl=True,
    )
