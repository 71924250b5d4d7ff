"""Parts of the Triton kernels for recurrences whose state is a matrix: the updates of drafts, and the end of a request.

matrix_states.py does the same with PyTorch's ops, and explains the tensors. A program handles the TILE_V columns v_v of
the state of one head; in_v says which of these columns exist, and in_k which rows k_k exist. head_row: the state's
index among the states of all rows and heads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tokens_of_state(
    lengths_ptr: tl.tensor, head_row: tl.tensor, first_v: tl.tensor, num_before: tl.tensor, V: tl.constexpr
) -> tl.tensor:
    """Return how many of a request's tokens the state includes; accepted drafts of the previous step are not included.

    lengths_ptr: the numbers, one for each column of the state, so that each program writes its own. They are equal, and
    first_v is a column of this program. num_before: the number of the request's tokens before this step. Without
    earlier tokens, or if head_row is negative (padding), nothing is loaded, and the result is num_before.
    """
    continues = (head_row >= 0) & (num_before > 0)
    return tl.load(lengths_ptr + head_row * V + first_v, mask=continues, other=num_before)


@triton.jit
def apply_drafts(
    state_kv: tl.tensor,
    drafts_ptr: tl.tensor,
    head_row: tl.tensor,
    num_applied: tl.tensor,
    num_before: tl.tensor,
    k_k: tl.tensor,
    v_v: tl.tensor,
    in_k: tl.tensor,
    in_v: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    SLOTS: tl.constexpr,
    DECAYS: tl.constexpr = 1,
) -> tl.tensor:
    """Apply the updates of the previous step's accepted drafts to a state, and return the new state.

    num_before: the number of the request's tokens before this step. num_applied: how many of them the state includes;
    the others are accepted drafts. drafts_ptr: see matrix_states.Drafted. DECAYS: numbers in g, 1 or K.
    """
    update_ptr = drafts_ptr + head_row * SLOTS * (K + V + DECAYS)
    for position in range(num_applied, num_before):
        slot_ptr = update_ptr + (position % SLOTS) * (K + V + DECAYS)
        if DECAYS == 1:
            state_kv *= tl.exp(tl.load(slot_ptr + K + V))
        else:
            state_kv *= tl.exp(tl.load(slot_ptr + K + V + k_k, mask=in_k, other=0.0))[:, None]
        k_k1 = tl.load(slot_ptr + k_k, mask=in_k, other=0.0)[:, None]
        state_kv += k_k1 * tl.load(slot_ptr + K + v_v, mask=in_v, other=0.0)[None, :]
    return state_kv


@triton.jit
def store_update(
    drafts_ptr: tl.tensor,
    head_row: tl.tensor,
    position: tl.tensor,
    key_1k: tl.tensor,
    written_1v: tl.tensor,
    g_1e: tl.tensor,
    k_k: tl.tensor,
    v_v: tl.tensor,
    in_k: tl.tensor,
    in_v: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    SLOTS: tl.constexpr,
    DECAYS: tl.constexpr = 1,
) -> None:
    """Store the update of the draft at `position`: its key, the value written under the key, and g.

    g_1e: [1], or [1, k] if DECAYS is K.
    """
    slot_ptr = drafts_ptr + head_row * SLOTS * (K + V + DECAYS) + (position % SLOTS) * (K + V + DECAYS)
    tl.store(slot_ptr + K + v_v, tl.sum(written_1v, 0), mask=in_v)
    if tl.program_id(0) == 0:
        tl.store(slot_ptr + k_k, tl.sum(key_1k, 0), mask=in_k)
        if DECAYS == 1:
            tl.store(slot_ptr + K + V, tl.sum(g_1e, 0))
        else:
            tl.store(slot_ptr + K + V + k_k, tl.sum(g_1e, 0), mask=in_k)


@triton.jit
def end_request(
    state_kv: tl.tensor,
    state_ptrs_kv: tl.tensor,
    in_kv: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    seq_len: tl.tensor,
    first_token: tl.tensor,
    length: tl.tensor,
    num_missing: tl.tensor,
    v_v: tl.tensor,
    in_v: tl.tensor,
    H: tl.constexpr,
    V: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Store a request's state, how many tokens it includes, and zeros as results of drafts that do not exist.

    seq_len: the number of tokens that the state includes, stored at lengths_ptr. num_missing: the number of drafts that
    do not exist. length: the number of the request's tokens in the step, its existing drafts included. If SLOTS > 0 and
    CHUNK is 1, there may be drafts, so the caller has already stored the state after the last token that is not a
    draft. Then the state is not stored here.
    """
    zero_v = tl.zeros(v_v.shape, tl.int32)
    if (row >= 0) & (length > 0):
        if SLOTS == 0 or CHUNK > 1:
            tl.store(state_ptrs_kv, state_kv, mask=in_kv)
        if SLOTS > 0:
            tl.store(lengths_ptr + (row * H + head) * V + v_v, seq_len + zero_v, mask=in_v)
    if SLOTS > 0 and CHUNK == 1:
        for token in range(length, length + num_missing):
            out_ptrs_v = out_ptr + ((first_token + token).to(tl.int64) * H + head) * V + v_v
            tl.store(out_ptrs_v, tl.zeros(v_v.shape, out_ptr.dtype.element_ty), mask=in_v)
