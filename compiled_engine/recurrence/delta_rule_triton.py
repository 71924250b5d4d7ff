"""Triton kernel for the gated delta rule, see delta_rule.py.

It processes a request's tokens in chunks, or one by one in a step of only decodes. In an engine with drafts, a step
with prompts has two launches: one for prompts, in chunks, and one for decodes and their drafts, one by one. Grids
depend only on the number of requests, and the kernel reads the index of each request's state on the device, so CUDA
graphs can capture it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launch_arguments import cdiv, next_power_of_2, register_limit, with_dense_items
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.recurrence.decays_by_element_triton import element_products
from compiled_engine.recurrence.delta_rule import EPS
from compiled_engine.recurrence.matrix_states import Drafted
from compiled_engine.recurrence.matrix_states_triton import apply_drafts, end_request, store_update, tokens_of_state
from compiled_engine.recurrence.rows_triton import request_of_row
from compiled_engine.recurrence.sequences import Sequences

# Tokens per chunk, whose triangular system is solved by products of matrices of this size.
CHUNK = 16
# (elements of the value of a program, warps) for chunks and for single tokens. Tokens one by one wait for each other's
# loads, so more and smaller programs are faster, above all with drafts.
TILES_OF_CHUNKS, TILES_OF_TOKENS = (32, 4), (16, 1)
# The most registers of a thread for single tokens in an engine with drafts, where a token decays a state by one number,
# and by one for each element of a key. A compiler would use more, and a multiprocessor run fewer programs at a time.
REGISTERS_OF_TOKENS, REGISTERS_OF_TOKENS_BY_ELEMENT = 168, 200
LARGEST_LIMITED = 128  # elements of a key; the states of larger ones take most of the registers


@triton.jit
def _scaled(x_Ck: tl.tensor, scale: tl.constexpr, EPS: tl.constexpr, NORMALISES: tl.constexpr) -> tl.tensor:
    """Return the queries or keys of a chunk, fp32 [chunk, k], multiplied by `scale`.

    NORMALISES: first divide each query or key by its L2 norm. EPS is added to the squared norm.
    """
    if NORMALISES:
        x_Ck *= tl.rsqrt(tl.sum(x_Ck * x_Ck, 1) + EPS)[:, None]
    return x_Ck * scale


@quick_launches
@triton.jit(
    do_not_specialize=["num_rows", "rows_of_each", "q_stride", "k_stride", "v_stride", "g_stride", "beta_stride"]
)
def delta_rule_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    state_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_rows: tl.tensor,
    rows_of_each: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    g_stride: tl.tensor,
    beta_stride: tl.tensor,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    NORMALISES: tl.constexpr,
    SLOTS: tl.constexpr,
    DECAYS: tl.constexpr,
    IN_TWO: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Apply the gated delta rule: write the results of a request's tokens, and update its state in place.

    Program: (tile of TILE_V elements of the value, head, request); it processes all tokens of the request.

    q_ptr, k_ptr: [T, H / GROUP, K]; v_ptr, out_ptr: [T, H, V]; g_ptr: [T, H, DECAYS]; beta_ptr: [T, H]. q_stride, ...,
        beta_stride: elements from one token to the next. DECAYS: numbers by which a token decays a state, 1 or K.
    keys_ptr, scores_ptr: results of element_products_kernel. None if DECAYS or CHUNK is 1.
    state_ptr: fp32 [S, H, K, V]. rows_ptr: int32 [R], the index of each request's state, -1 for a padding request,
        whose results are zeros.
    drafts_ptr: fp32 [S, H, SLOTS, K + V + DECAYS]; lengths_ptr: int32 [S, H, V]; see matrix_states.Drafted. Both are
        None if there are no drafts; SLOTS is then 0.
    num_rows: R. rows_of_each: how many rows of the step each request has, one for its newest token and one for each
        draft (see Sequences), or 1 if requests have different numbers. With 1 there is a program for each row, and the
        program of a request's first row handles its drafts too.
    IN_TWO: this is one of two launches. The launch with CHUNK 1 processes only rows of one token. The other processes
        only rows of several tokens, whose states never have drafts to apply.
    query_start_loc_ptr, seq_lens_ptr: see AttentionInputs. A request without earlier tokens starts with a zero state.
    SCALE: factor of the queries. EPS, NORMALISES: see _scaled. CHUNK: tokens processed at once, 16 or 1.
    TILE_K: K rounded up to a power of two, at least 16. PRECISION: input_precision of tl.dot.
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
    place_C = tl.arange(0, CHUNK)
    lower_CC, diagonal_CC = place_C[:, None] > place_C[None, :], place_C[:, None] == place_C[None, :]
    origin = 0
    if DECAYS > 1 and CHUNK > 1:
        origin = -(start % CHUNK)  # chunks are those of element_products_kernel
    for first in range(origin, length, CHUNK):
        inside_C = first + place_C < length
        if DECAYS > 1 and CHUNK > 1:
            inside_C &= first + place_C >= 0
        real_C = inside_C & (row + tl.zeros([CHUNK], tl.int64) >= 0)
        token_C = start.to(tl.int64) + first + place_C
        qk_head = (head // GROUP) * K
        in_Ck, in_Cv = real_C[:, None] & in_k[None, :], real_C[:, None] & in_v[None, :]
        q_ptrs_Ck = q_ptr + token_C[:, None] * q_stride + qk_head + k_k[None, :]
        k_ptrs_Ck = k_ptr + token_C[:, None] * k_stride + qk_head + k_k[None, :]
        # Queries and keys of a chunk are scaled at once, which needs fewer registers. Those of a single token are
        # scaled after all its loads, which then do not wait for each other.
        q_Ck = tl.load(q_ptrs_Ck, mask=in_Ck, other=0.0).to(tl.float32)
        if CHUNK > 1:
            q_Ck = _scaled(q_Ck, SCALE, EPS, NORMALISES)
        k_Ck = tl.load(k_ptrs_Ck, mask=in_Ck, other=0.0).to(tl.float32)
        if CHUNK > 1:
            k_Ck = _scaled(k_Ck, 1.0, EPS, NORMALISES)
        v_ptrs_Cv = v_ptr + token_C[:, None] * v_stride + head * V + v_v[None, :]
        v_Cv = tl.load(v_ptrs_Cv, mask=in_Cv, other=0.0).to(tl.float32)
        if DECAYS == 1:
            g_Ce = tl.load(g_ptr + token_C * g_stride + head, mask=real_C, other=0.0).to(tl.float32)
        else:
            g_ptrs_Ck = g_ptr + token_C[:, None] * g_stride + head * K + k_k[None, :]
            g_Ce = tl.load(g_ptrs_Ck, mask=in_Ck, other=0.0).to(tl.float32)
        beta_C = tl.load(beta_ptr + token_C * beta_stride + head, mask=real_C, other=0.0).to(tl.float32)
        if SLOTS > 0 and CHUNK == 1:
            # Only before the first token. It is here so that the token's loads do not wait for num_applied.
            state_kv = apply_drafts(
                *(state_kv, drafts_ptr, row * H + head, num_applied, num_before),
                *(k_k, v_v, in_k, in_v, K, V, SLOTS, DECAYS),
            )
            num_applied = num_before
        if CHUNK == 1:
            q_Ck, k_Ck = _scaled(q_Ck, SCALE, EPS, NORMALISES), _scaled(k_Ck, 1.0, EPS, NORMALISES)
            q_k, k_k1, v_1v = tl.sum(q_Ck, 0), tl.sum(k_Ck, 0)[:, None], v_Cv
            if DECAYS == 1:
                state_kv *= tl.exp(tl.sum(g_Ce, 0))
            else:
                state_kv *= tl.exp(tl.sum(g_Ce, 0))[:, None]
            known_v = tl.sum(state_kv * k_k1, 0)
            written_1v = (v_1v - known_v[None, :]) * beta_C[:, None]
            state_kv += k_k1 * written_1v
            if SLOTS > 0:
                if first >= num_certain:
                    position = num_before + first
                    store_update(
                        *(drafts_ptr, row * H + head, position, k_Ck, written_1v, g_Ce),
                        *(k_k, v_v, in_k, in_v, K, V, SLOTS, DECAYS),
                    )
                elif (row >= 0) & (first == num_certain - 1):
                    tl.store(state_ptrs_kv, state_kv, mask=in_kv)
            out_Cv = tl.sum(state_kv * q_k[:, None], 0)[None, :]
        else:
            total_Ce = tl.cumsum(g_Ce, 0)
            total_e = tl.sum(g_Ce, 0)
            if DECAYS == 1:
                grown_C1 = tl.exp(total_Ce)[:, None]
                decay_CC = tl.exp(tl.where(lower_CC | diagonal_CC, total_Ce[:, None] - total_Ce[None, :], 0.0))
                keys_kC = tl.trans(k_Ck)
                products_CC = tl.dot(k_Ck * beta_C[:, None], keys_kC, input_precision=PRECISION) * decay_CC
            else:
                grown_Ck = tl.exp(total_Ce)
                known_Cv = tl.dot(k_Ck * grown_Ck, state_kv, input_precision=PRECISION)
                out_Cv = tl.dot(q_Ck * grown_Ck, state_kv, input_precision=PRECISION)
                chunk_head = ((start + first) // CHUNK).to(tl.int64) * H + head
                place_CC = (chunk_head * CHUNK + place_C[:, None]) * CHUNK + place_C[None, :]
                of_request_CC = real_C[:, None] & real_C[None, :]
                products_CC = beta_C[:, None] * tl.load(keys_ptr + place_CC, mask=of_request_CC, other=0.0)
                scores_CC = tl.load(scores_ptr + place_CC, mask=of_request_CC, other=0.0)
            # (1 + n)^-1 = (1 - n) (1 + n^2) (1 + n^4) (1 + n^8) for a strictly lower triangle n of 16 rows.
            n_CC = tl.where(lower_CC, products_CC, 0.0)
            one_CC = diagonal_CC.to(tl.float32)
            inverse_CC = one_CC - n_CC
            for _ in tl.static_range(3):
                n_CC = tl.dot(n_CC, n_CC, input_precision="ieee")
                inverse_CC = tl.dot(inverse_CC, one_CC + n_CC, input_precision="ieee")
            if DECAYS == 1:
                known_Cv = grown_C1 * tl.dot(k_Ck, state_kv, input_precision=PRECISION)
            written_Cv = tl.dot(inverse_CC, beta_C[:, None] * (v_Cv - known_Cv), input_precision=PRECISION)
            if DECAYS == 1:
                scores_CC = tl.where(
                    lower_CC | diagonal_CC, tl.dot(q_Ck, keys_kC, input_precision=PRECISION) * decay_CC, 0.0
                )
                out_Cv = tl.dot(q_Ck * grown_C1, state_kv, input_precision=PRECISION)
            out_Cv += tl.dot(scores_CC, written_Cv, input_precision=PRECISION)
            if DECAYS == 1:
                left_kC = tl.exp(total_e - total_Ce)[None, :]
                state_kv *= tl.exp(total_e)
                left_kC = keys_kC * left_kC
            else:
                # Sums of later g are exact, where total_e - total_Ce is not.
                is_followed_C = real_C & (first + place_C + 1 < length) & (place_C < CHUNK - 1)
                later_Ck = tl.load(g_ptrs_Ck + g_stride, mask=is_followed_C[:, None] & in_k[None, :], other=0.0)
                left_kC = tl.trans(k_Ck * tl.exp(tl.cumsum(later_Ck.to(tl.float32), 0, reverse=True)))
                state_kv *= tl.exp(total_e)[:, None]
            state_kv += tl.dot(left_kC, written_Cv, input_precision=PRECISION)
        out_ptrs_Cv = out_ptr + (token_C[:, None] * H + head) * V + v_v[None, :]
        tl.store(out_ptrs_Cv, out_Cv.to(out_ptr.dtype.element_ty), mask=inside_C[:, None] & in_v[None, :])
    end_request(
        *(state_kv, state_ptrs_kv, in_kv, lengths_ptr, out_ptr, row, head, seq_len, start, length, num_missing),
        *(v_v, in_v, H, V, SLOTS, CHUNK),
    )


def apply_rule_triton(
    q_TGk: torch.Tensor,
    k_TGk: torch.Tensor,
    v_THv: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    normalises: bool,
    state_SHkv: torch.Tensor,
    drafted: Drafted | None,
    out_THv: torch.Tensor,
    sequences: Sequences,
    invariant: bool = False,
) -> None:
    """Compute `recurrence.op.apply_rule` with the kernel.

    invariant: one compiled kernel processes all tokens one by one.
    Writes out_THv, and updates state_SHkv and `drafted`. All of these are contiguous.
    """
    q_TGk, k_TGk, v_THv, g_TH, beta_TH = map(with_dense_items, (q_TGk, k_TGk, v_THv, g_TH, beta_TH))
    num_tokens, num_heads, value_dim = v_THv.shape
    num_rows, key_dim = len(sequences.rows_R), q_TGk.shape[2]
    each_alone = num_tokens == num_rows  # decodes have one token per row
    chunks = (1,) if each_alone or invariant else (CHUNK,) if drafted is None else (CHUNK, 1)
    rows_of_each = 1 if drafted is None else sequences.rows_of_each(num_tokens)
    by_element = g_TH.dim() == 3
    registers = REGISTERS_OF_TOKENS_BY_ELEMENT if by_element else REGISTERS_OF_TOKENS
    products: tuple[torch.Tensor | None, ...] = (None, None)
    if by_element and CHUNK in chunks:
        products = element_products(q_TGk, k_TGk, g_TH, normalises, EPS)
    for chunk in chunks:
        tile_v, num_warps = TILES_OF_TOKENS if chunk == 1 else TILES_OF_CHUNKS
        delta_rule_kernel[(cdiv(value_dim, tile_v), num_heads, num_rows // rows_of_each)](
            q_TGk,
            k_TGk,
            v_THv,
            g_TH,
            beta_TH,
            *(products if chunk > 1 else (None, None)),
            state_SHkv,
            *((None, None) if drafted is None else drafted),
            out_THv,
            *sequences.on_device,
            num_rows,
            rows_of_each,
            q_TGk.stride(0),
            k_TGk.stride(0),
            v_THv.stride(0),
            g_TH.stride(0),
            beta_TH.stride(0),
            H=num_heads,
            GROUP=num_heads // q_TGk.shape[1],
            K=key_dim,
            V=value_dim,
            SCALE=key_dim**-0.5,
            EPS=EPS,
            NORMALISES=normalises,
            SLOTS=0 if drafted is None else drafted.drafts_SHNw.shape[2],
            DECAYS=key_dim if by_element else 1,
            IN_TWO=len(chunks) > 1,
            CHUNK=chunk,
            TILE_K=max(16, next_power_of_2(key_dim)),
            TILE_V=tile_v,
            PRECISION="ieee" if q_TGk.dtype == torch.float32 else "tf32",
            num_warps=num_warps,
            **(register_limit(registers) if drafted is not None and chunk == 1 and key_dim <= LARGEST_LIMITED else {}),
            enable_fp_fusion=not invariant,  # which product of a sum is fused may differ between the updates of drafts
        )
