"""Gluon: the two ways in which keys and values reach the kernel of short_decode.

Few are read at once: keys into the registers that the tensor cores take them from, values into shared memory. Else
tiles of both pass through a ring of stages in shared memory, which leaves registers for more programs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from compiled_engine.attention.backends.triton_tile import blocks_of, capped, row_of, weigh

# Neighbours that a thread loads at once: 16 bytes.
WIDTH = gl.constexpr(8)
# Triton 3.9 has other names for both.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy_ahead = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _fold(  # type: ignore[no-untyped-def]
    q_MD, k_DN, max_M, sum_M, num_keys, scale_log2, layout: gl.constexpr, KEYS: gl.constexpr, CAP_SCALE: gl.constexpr
):
    """(weights, rescale, max, sum) with a tile, of which num_keys are keys; weights as the tensor cores take them."""
    scores_MN = mma_v2(q_MD, k_DN, gl.zeros([q_MD.shape[0], KEYS], gl.float32, layout))
    scores_MN = capped(scores_MN, CAP_SCALE)
    key_N = gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
    scores_MN = gl.where((key_N < num_keys)[None, :], scores_MN, float("-inf"))
    weights_MN, rescale_M, max_M = weigh(scores_MN, max_M, scale_log2)
    sum_M = sum_M * rescale_M + gl.sum(weights_MN, 1)
    weights_MN = gl.convert_layout(weights_MN.to(q_MD.dtype), gl.DotOperandLayout(0, layout, 2))
    return weights_MN, rescale_M, max_M, sum_M


@gluon.jit
def load_keys(  # type: ignore[no-untyped-def]
    table_ptr,
    head_cache_ptr,
    first_key,
    end_key,
    layout: gl.constexpr,
    KEYS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """[HEAD_DIM, KEYS] from first_key on; zeros from end_key on."""
    key_N = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
    d_D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, layout))
    row_N = row_of(blocks_of(table_ptr, key_N, end_key, BLOCK_SIZE), key_N, BLOCK_SIZE) * ROW
    return gl.load(head_cache_ptr + row_N[None, :] + d_D[:, None], mask=(key_N < end_key)[None, :], other=0.0)


@gluon.jit
def copy_values(  # type: ignore[no-untyped-def]
    smem,
    table_ptr,
    head_cache_ptr,
    first_key,
    end_key,
    layout: gl.constexpr,
    KEYS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Begin to copy the values [KEYS, HEAD_DIM] from first_key on; zeros from end_key on."""
    key_N = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    d_D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    row_N = row_of(blocks_of(table_ptr, key_N, end_key, BLOCK_SIZE), key_N, BLOCK_SIZE) * ROW + BLOCK_SIZE * ROW
    copy_ahead(smem, head_cache_ptr + row_N[:, None] + d_D[None, :], mask=(key_N < end_key)[:, None])
    async_copy.commit_group()


@gluon.jit
def attend_held(  # type: ignore[no-untyped-def]
    q_MD,
    k_DN,
    v_smem,
    acc_MD,
    max_M,
    sum_M,
    num_keys,
    scale_log2,
    layout: gl.constexpr,
    KEYS: gl.constexpr,
    CAP_SCALE: gl.constexpr,
):
    """Fold a tile, of which num_keys are keys, into the (acc, max, sum) of the queries; v_smem is under way."""
    weights_MN, rescale_M, max_M, sum_M = _fold(q_MD, k_DN, max_M, sum_M, num_keys, scale_log2, layout, KEYS, CAP_SCALE)
    async_copy.wait_group(0)
    barrier()
    v_ND = v_smem.load(gl.DotOperandLayout(1, layout, 2))
    return mma_v2(weights_MN, v_ND, acc_MD * rescale_M[:, None]), max_M, sum_M


@gluon.jit
def _copy_tile(  # type: ignore[no-untyped-def]
    k_smem,
    v_smem,
    block_N,
    head_cache_ptr,
    first_key,
    end_key,
    layout: gl.constexpr,
    KEYS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Begin to copy keys and values, [KEYS, HEAD_DIM] each, from first_key on; zeros from end_key on."""
    key_N = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    stored_N1 = (key_N < end_key)[:, None]
    d_D = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    pointers_ND = head_cache_ptr + (row_of(block_N, key_N, BLOCK_SIZE) * ROW)[:, None] + d_D[None, :]
    copy_ahead(k_smem, pointers_ND, mask=stored_N1)
    copy_ahead(v_smem, pointers_ND + BLOCK_SIZE * ROW, mask=stored_N1)
    async_copy.commit_group()


@gluon.jit
def fill_ring(  # type: ignore[no-untyped-def]
    k_smem,
    v_smem,
    table_ptr,
    head_cache_ptr,
    first_key,
    end_key,
    layout: gl.constexpr,
    STAGES: gl.constexpr,
    KEYS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Begin to copy all tiles but one that the ring holds; returns the blocks of the one after them."""
    key_N = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    block_N = blocks_of(table_ptr, key_N, end_key, BLOCK_SIZE)
    for stage in gl.static_range(STAGES - 1):
        next_block_N = blocks_of(table_ptr, key_N + (stage + 1) * KEYS, end_key, BLOCK_SIZE)
        first = first_key + stage * KEYS
        k_stage, v_stage = k_smem.index(stage), v_smem.index(stage)
        _copy_tile(k_stage, v_stage, block_N, head_cache_ptr, first, end_key, layout, KEYS, BLOCK_SIZE, ROW, HEAD_DIM)
        block_N = next_block_N
    return block_N


@gluon.jit
def attend_ring(  # type: ignore[no-untyped-def]
    q_MD,
    k_smem,
    v_smem,
    block_N,
    acc_MD,
    max_M,
    sum_M,
    table_ptr,
    head_cache_ptr,
    first_key,
    end_key,
    scale_log2,
    layout: gl.constexpr,
    row_layout: gl.constexpr,
    STAGES: gl.constexpr,
    KEYS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CAP_SCALE: gl.constexpr,
):
    """Fold all tiles into the (acc, max, sum) of the queries; the first are under way, see fill_ring."""
    for tile in range((end_key - first_key + KEYS - 1) // KEYS):
        start = first_key + tile * KEYS
        async_copy.wait_group(STAGES - 2)
        barrier()
        ahead = start + (STAGES - 1) * KEYS
        free = (tile + STAGES - 1) % STAGES
        k_free, v_free = k_smem.index(free), v_smem.index(free)
        _copy_tile(k_free, v_free, block_N, head_cache_ptr, ahead, end_key, row_layout, KEYS, BLOCK_SIZE, ROW, HEAD_DIM)
        key_N = ahead + KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, row_layout))
        block_N = blocks_of(table_ptr, key_N, end_key, BLOCK_SIZE)
        k_DN = k_smem.index(tile % STAGES).permute((1, 0)).load(gl.DotOperandLayout(1, layout, 2))
        weights_MN, rescale_M, max_M, sum_M = _fold(
            q_MD, k_DN, max_M, sum_M, end_key - start, scale_log2, layout, KEYS, CAP_SCALE
        )
        v_ND = v_smem.index(tile % STAGES).load(gl.DotOperandLayout(1, layout, 2))
        acc_MD = mma_v2(weights_MN, v_ND, acc_MD * rescale_M[:, None])
    async_copy.wait_group(0)
    return acc_MD, max_M, sum_M
