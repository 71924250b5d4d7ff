"""Triton kernel for the scan of Mamba 2, see state_space.py.

It processes a request's tokens in chunks, or one by one in a step of only decodes: then one launch computes step sizes
and results, and updates the states in place. In an engine with drafts, a step with prompts has two launches, as for
delta rules (delta_rule_triton.py). Grids depend only on the number of requests, and the kernel reads the index of each
request's state on the device, so CUDA graphs can capture it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launch_arguments import cdiv, next_power_of_2, register_limit, with_dense_items
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.recurrence.matrix_states import Drafted
from compiled_engine.recurrence.matrix_states_triton import apply_drafts, end_request, store_update, tokens_of_state
from compiled_engine.recurrence.rows_triton import request_of_row
from compiled_engine.recurrence.sequences import Sequences

# Tokens per chunk, elements of a head per program, and warps, so that registers suffice on a Hopper.
CHUNK, CHUNK_TILE_V, CHUNK_WARPS = 32, 64, 8
# From this size of a key on, a chunk is half as long.
LARGE_K = 256
# Elements of a head per program, and warps, of programs that process one token after another.
TILE_V, WARPS = 32, 4
# The most registers of a thread of these programs in an engine with drafts, see delta_rule_triton.
REGISTERS = 128


@triton.jit
def _step_sizes(dt: tl.tensor, LEAST: tl.constexpr, MOST: tl.constexpr) -> tl.tensor:
    """Return softplus(dt), clamped to LEAST and MOST, in fp32. MOST None: no upper limit.

    The logarithm is computed so that results for small exp(dt) keep their precision.
    """
    grown = tl.exp(tl.minimum(dt, 20.0))
    rounded = 1.0 + grown
    exact = tl.where(rounded == 1.0, grown, tl.log(rounded) * (grown / tl.where(rounded == 1.0, 1.0, rounded - 1.0)))
    dt = tl.maximum(tl.where(dt > 20.0, dt, exact), LEAST)
    if MOST is not None:
        dt = tl.minimum(dt, MOST)
    return dt


@quick_launches
@triton.jit(do_not_specialize=["num_rows", "rows_of_each", "x_stride", "dt_stride", "B_stride", "C_stride"])
def state_space_kernel(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    A_ptr: tl.tensor,
    B_ptr: tl.tensor,
    C_ptr: tl.tensor,
    D_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_rows: tl.tensor,
    rows_of_each: tl.tensor,
    x_stride: tl.tensor,
    dt_stride: tl.tensor,
    B_stride: tl.tensor,
    C_stride: tl.tensor,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    SLOTS: tl.constexpr,
    IN_TWO: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Scan a request's tokens: write the results, and update its state in place.

    Program: (tile of TILE_V elements of the head, head, request); it processes all tokens of the request.

    x_ptr, out_ptr: [T, H, V]; dt_ptr: [T, H]; B_ptr, C_ptr: [T, H / GROUP, K]; A_ptr, D_ptr, dt_bias_ptr: [H].
        x_stride, ..., C_stride: elements from one token to the next.
    state_ptr: fp32 [S, H, K, V]. rows_ptr: int32 [R], the index of each request's state, -1 for a padding request,
        whose results are zeros.
    drafts_ptr: fp32 [S, H, SLOTS, K + V + 1]; lengths_ptr: int32 [S, H, V]; see matrix_states.Drafted. Both are None if
        there are no drafts; SLOTS is then 0.
    num_rows: R. rows_of_each, IN_TWO: see delta_rule_kernel. LEAST, MOST: see _step_sizes.
    query_start_loc_ptr, seq_lens_ptr: see AttentionInputs. A request without earlier tokens starts with a zero state.
    CHUNK: tokens processed at once, a power of two from 16 on, or 1. TILE_K: K rounded up to a power of two, at least
        16. PRECISION: input_precision of products with a factor in fp32.
    """
    head, place = tl.program_id(1), tl.program_id(2) * rows_of_each
    k_k = tl.arange(0, TILE_K)
    v_v = tl.program_id(0) * TILE_V + tl.arange(0, TILE_V)
    in_k, in_v = k_k < K, v_v < V
    row = tl.load(rows_ptr + place).to(tl.int64)
    start = tl.load(query_start_loc_ptr + place)
    length = tl.load(query_start_loc_ptr + place + 1) - start
    seq_len = tl.load(seq_lens_ptr + place)
    num_before, num_certain = seq_len - length, length
    num_missing = 0  # tokens of drafts that do not exist
    if IN_TWO:
        is_of_other = (length > 1) != (CHUNK > 1)
        if is_of_other:
            return
    if SLOTS > 0 and CHUNK == 1:
        row, length, follows_D = request_of_row(
            *(row, length, seq_len, rows_ptr, seq_lens_ptr, place, num_rows, SLOTS // 2)
        )
        first_v = tl.program_id(0) * TILE_V
        num_applied = tokens_of_state(lengths_ptr, row * H + head, first_v, num_before, V)
    # Vectors, since the interpreter cannot combine a block and a scalar to a mask.
    zero_v = tl.zeros([TILE_V], tl.int64)
    continues_v = in_v & (zero_v + row >= 0) & (zero_v + num_before > 0)
    state_ptrs_kv = state_ptr + ((row * H + head) * K + k_k[:, None]) * V + v_v[None, :]
    in_kv = in_k[:, None] & in_v[None, :]
    state_kv = tl.load(state_ptrs_kv, mask=in_k[:, None] & continues_v[None, :], other=0.0)
    if SLOTS > 0 and CHUNK == 1:
        num_drafts = tl.sum(follows_D, 0)
        length += num_drafts
        num_missing = rows_of_each - 1 - num_drafts
    decay = tl.load(A_ptr + head).to(tl.float32)
    skip = tl.load(D_ptr + head).to(tl.float32)
    bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    place_C = tl.arange(0, CHUNK)
    of_group = (head // GROUP) * K
    for first in range(0, length, CHUNK):
        inside_C = first + place_C < length
        real_C = inside_C & (row + tl.zeros([CHUNK], tl.int64) >= 0)
        token_C = start.to(tl.int64) + first + place_C
        in_Ck, in_Cv = real_C[:, None] & in_k[None, :], real_C[:, None] & in_v[None, :]
        B_ptrs_Ck = B_ptr + token_C[:, None] * B_stride + of_group + k_k[None, :]
        C_ptrs_Ck = C_ptr + token_C[:, None] * C_stride + of_group + k_k[None, :]
        B_Ck, C_Ck = tl.load(B_ptrs_Ck, mask=in_Ck, other=0.0), tl.load(C_ptrs_Ck, mask=in_Ck, other=0.0)
        x_ptrs_Cv = x_ptr + token_C[:, None] * x_stride + head * V + v_v[None, :]
        x_Cv = tl.load(x_ptrs_Cv, mask=in_Cv, other=0.0).to(tl.float32)
        dt_C = tl.load(dt_ptr + token_C * dt_stride + head, mask=real_C, other=0.0).to(tl.float32)
        if SLOTS > 0 and CHUNK == 1:
            # Only before the first token, see delta_rule_triton.
            state_kv = apply_drafts(
                *(state_kv, drafts_ptr, row * H + head, num_applied, num_before),
                *(k_k, v_v, in_k, in_v, K, V, SLOTS),
            )
            num_applied = num_before
        dt_C = tl.where(real_C, _step_sizes(dt_C + bias, LEAST, MOST), 0.0)
        g_C, v_Cv = dt_C * decay, dt_C[:, None] * x_Cv
        if CHUNK == 1:
            B_k1, C_k1 = tl.sum(B_Ck.to(tl.float32), 0)[:, None], tl.sum(C_Ck.to(tl.float32), 0)[:, None]
            state_kv = state_kv * tl.exp(tl.sum(g_C, 0)) + B_k1 * v_Cv
            if SLOTS > 0:
                if first >= num_certain:
                    position = num_before + first
                    changed = B_Ck.to(tl.float32), v_Cv, g_C
                    store_update(drafts_ptr, row * H + head, position, *changed, k_k, v_v, in_k, in_v, K, V, SLOTS)
                elif (row >= 0) & (first == num_certain - 1):
                    tl.store(state_ptrs_kv, state_kv, mask=in_kv)
            out_Cv = tl.sum(state_kv * C_k1, 0)[None, :]
        else:
            total_C, total = tl.cumsum(g_C, 0), tl.sum(g_C, 0)
            earlier_CC = place_C[:, None] >= place_C[None, :]
            decay_CC = tl.exp(tl.where(earlier_CC, total_C[:, None] - total_C[None, :], 0.0))
            scores_CC = tl.dot(C_Ck, tl.trans(B_Ck), input_precision=PRECISION)
            scores_CC = tl.where(earlier_CC, scores_CC * decay_CC, 0.0)
            out_Cv = tl.dot(C_Ck.to(tl.float32), state_kv, input_precision=PRECISION) * tl.exp(total_C)[:, None]
            out_Cv += tl.dot(scores_CC, v_Cv, input_precision=PRECISION)
            left_Cv = v_Cv * tl.exp(total - total_C)[:, None]
            added_kv = tl.dot(tl.trans(B_Ck.to(tl.float32)), left_Cv, input_precision=PRECISION)
            state_kv = state_kv * tl.exp(total) + added_kv
        out_Cv += skip * x_Cv
        out_ptrs_Cv = out_ptr + (token_C[:, None] * H + head) * V + v_v[None, :]
        tl.store(out_ptrs_Cv, out_Cv.to(out_ptr.dtype.element_ty), mask=inside_C[:, None] & in_v[None, :])
    end_request(
        *(state_kv, state_ptrs_kv, in_kv, lengths_ptr, out_ptr, row, head, seq_len, start, length, num_missing),
        *(v_v, in_v, H, V, SLOTS, CHUNK),
    )


def scan_triton(
    x_THv: torch.Tensor,
    dt_TH: torch.Tensor,
    A_H: torch.Tensor,
    B_TGk: torch.Tensor,
    C_TGk: torch.Tensor,
    D_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    least_dt: float,
    most_dt: float | None,
    state_SHkv: torch.Tensor,
    drafted: Drafted | None,
    out_THv: torch.Tensor,
    sequences: Sequences,
    invariant: bool = False,
) -> None:
    """Compute `recurrence.op.scan` with the kernel.

    invariant: one compiled kernel processes all tokens one by one.
    Writes out_THv, and updates state_SHkv and `drafted`. All of these are contiguous, and so are A, D and dt_bias.
    """
    x_THv, dt_TH, B_TGk, C_TGk = map(with_dense_items, (x_THv, dt_TH, B_TGk, C_TGk))
    num_tokens, num_heads, head_dim = x_THv.shape
    num_rows, (num_groups, state_size) = len(sequences.rows_R), B_TGk.shape[1:]
    each_alone = num_tokens == num_rows  # decodes have one token per row
    tile_k = max(16, next_power_of_2(state_size))
    long = CHUNK if tile_k < LARGE_K else CHUNK // 2
    chunks = (1,) if each_alone or invariant else (long,) if drafted is None else (long, 1)
    rows_of_each = 1 if drafted is None else sequences.rows_of_each(num_tokens)
    for chunk in chunks:
        tile_v, num_warps = (TILE_V, WARPS) if chunk == 1 else (CHUNK_TILE_V, CHUNK_WARPS)
        state_space_kernel[(cdiv(head_dim, tile_v), num_heads, num_rows // rows_of_each)](
            x_THv,
            dt_TH,
            A_H,
            B_TGk,
            C_TGk,
            D_H,
            dt_bias_H,
            state_SHkv,
            *((None, None) if drafted is None else drafted),
            out_THv,
            *sequences.on_device,
            num_rows,
            rows_of_each,
            x_THv.stride(0),
            dt_TH.stride(0),
            B_TGk.stride(0),
            C_TGk.stride(0),
            H=num_heads,
            GROUP=num_heads // num_groups,
            K=state_size,
            V=head_dim,
            LEAST=least_dt,
            MOST=most_dt,
            SLOTS=0 if drafted is None else drafted.drafts_SHNw.shape[2],
            IN_TWO=len(chunks) > 1,
            CHUNK=chunk,
            TILE_K=tile_k,
            TILE_V=tile_v,
            PRECISION="ieee" if x_THv.dtype == torch.float32 else "tf32",
            num_warps=num_warps,
            **(register_limit(REGISTERS) if drafted is not None and chunk == 1 else {}),
            enable_fp_fusion=not invariant,  # see delta_rule_triton
        )
