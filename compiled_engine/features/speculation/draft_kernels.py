"""Triton kernels for drafts: verify drafts, find n-gram drafts, and store the drafts of a draft model or head.

Dimensions: R rows of the batch, S rows of the request states, L tokens of a request at most. See draft_rows.py for rows
with offsets.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.sampling.gumbel_triton import splitmix64

SEARCHED = 4096
# Rows per program of keep_drafts_kernel.
KEPT = 32


@quick_launches
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["token_ids_ptr"])
def verify_kernel(
    rows_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    num_computed_ptr: tl.tensor,
    prefill_len_ptr: tl.tensor,
    last_token_ptr: tl.tensor,
    history_ptr: tl.tensor,
    num_steps_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    num_rows: tl.tensor,
    history_stride: tl.tensor,
    ring_stride: tl.tensor,
    NUM_DRAFTS: tl.constexpr,
    RING: tl.constexpr,
    LAST_NUMBER: tl.constexpr,
    NO_ROW: tl.constexpr,
    NO_TOKEN: tl.constexpr,
    TILE_R: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Store each request's accepted drafts and the sampled token after them, see verification.DraftAdvance.

    A single program handles all R rows of the batch, since they share the step's number.

    rows_ptr: int32 [R], the state row of each row's request, -1 for padding. offsets_ptr: int32 [R], the index of a row
        among its request's rows: 0 for the newest token, 1 for the first draft.
    ends_ptr: int64 [R], positions of the sampled tokens, 0 for padding and for drafts that do not exist; token_ids_ptr:
        int64 [R], the sampled tokens.
    drafts_ptr: int32 [S, NUM_DRAFTS], -1 for none. seeds_ptr: int64 [S], read only with thresholds_ptr.
    thresholds_ptr: None if a draft is accepted where it equals the sampled token. Otherwise int64 [NUM_DRAFTS]: drafts
        are accepted at random. A random number of 63 bits is drawn for each request, and as many of its drafts are
        accepted as there are thresholds above that number.
    num_computed_ptr, last_token_ptr: int32 [S]; history_ptr: int32 [S, L]; all updated. prefill_len_ptr: int32 [S].
    num_steps_ptr: int32 [1], the step's number, which is increased. taken_ptr: int32 [R], receives each row's token, 0
        for none.
    ring_ptr: int32 [RING, 1 + R], a ring buffer. The step's entry receives the step's number, and for each row a token,
        an error code, NOT_TAKEN (-1) after a wrong draft, or NO_ROW if the row's draft does not exist.
    LAST_NUMBER: step numbers wrap around after it. NO_TOKEN: see accepted_at_random.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    place_R = tl.arange(0, TILE_R)
    inside_R = place_R < num_rows
    row_R = tl.load(rows_ptr + place_R, mask=inside_R, other=-1)
    end_R = tl.load(ends_ptr + place_R, mask=inside_R, other=0).to(tl.int32)
    real_R = (row_R >= 0) & (end_R > 0)
    state_R = tl.where(real_R, row_R, 0).to(tl.int64)
    offset_R = tl.load(offsets_ptr + place_R, mask=real_R, other=0)
    sampled_R = tl.load(token_ids_ptr + place_R, mask=real_R, other=-1).to(tl.int32)
    taken_R = real_R & (end_R >= tl.load(prefill_len_ptr + state_R, mask=real_R, other=0))
    # The next row has the draft that this row's token must equal.
    next_inside_R = place_R + 1 < num_rows
    next_row_R = tl.load(rows_ptr + place_R + 1, mask=next_inside_R, other=-1)
    next_end_R = tl.load(ends_ptr + place_R + 1, mask=next_inside_R, other=0)
    next_offset_R = tl.load(offsets_ptr + place_R + 1, mask=next_inside_R, other=0)
    followed_R = real_R & (next_row_R == row_R) & (next_end_R > 0) & (next_offset_R == offset_R + 1)
    draft_R = tl.load(drafts_ptr + state_R * NUM_DRAFTS + offset_R, mask=followed_R, other=-1)
    if thresholds_ptr is not None:
        seed_R = tl.load(seeds_ptr + state_R, mask=real_R, other=0).to(tl.uint64)
        key_R = splitmix64(seed_R, (end_R - offset_R).to(tl.uint64))
        draw_R = (splitmix64(key_R, tl.zeros_like(key_R) + NO_TOKEN) >> 1).to(tl.int64)
        num_accepted_R = tl.zeros_like(offset_R)
        for draft in tl.static_range(NUM_DRAFTS):
            num_accepted_R += (draw_R < tl.load(thresholds_ptr + draft)).to(tl.int32)
        # A request without tokens has no drafts yet.
        taken_R &= offset_R <= num_accepted_R
        followed_R &= offset_R < num_accepted_R
        token_R = tl.where(followed_R, draft_R, sampled_R)
    else:
        for back in range(1, NUM_DRAFTS + 1):
            checked_R = real_R & (back <= offset_R)
            before_R = tl.load(token_ids_ptr + place_R - back, mask=checked_R, other=0).to(tl.int32)
            guess_R = tl.load(drafts_ptr + state_R * NUM_DRAFTS + offset_R - back, mask=checked_R, other=0)
            taken_R &= (before_R == guess_R) | (back > offset_R)
        followed_R &= draft_R == sampled_R
        token_R = sampled_R
    # An error code ends its request, but another of its steps may be in flight.
    new_R = tl.maximum(token_R, 0)
    tl.store(history_ptr + state_R * history_stride + end_R, new_R, mask=taken_R)
    last_R = taken_R & (followed_R == 0)
    tl.store(last_token_ptr + state_R, new_R, mask=last_R)
    computed_R = last_R | (real_R & (offset_R == 0) & (taken_R == 0))
    tl.store(num_computed_ptr + state_R, end_R, mask=computed_R)
    number = (tl.load(num_steps_ptr) + 1) & LAST_NUMBER
    ring_row_ptr = ring_ptr + (number % RING) * ring_stride
    token_R = tl.where(taken_R, token_R, tl.where(real_R, -1, NO_ROW))
    tl.store(taken_ptr + place_R, tl.where(taken_R, new_R, 0), mask=inside_R)
    tl.store(ring_row_ptr + 1 + place_R, token_R, mask=inside_R)
    tl.store(ring_row_ptr, number)
    tl.debug_barrier()  # all threads must have read the number
    tl.store(num_steps_ptr, number)


@quick_launches
@triton.jit(do_not_specialize=["longest", "shortest", "history_stride"])
def ngram_kernel(
    rows_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    num_computed_ptr: tl.tensor,
    prefill_len_ptr: tl.tensor,
    history_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    longest: tl.tensor,
    shortest: tl.tensor,
    history_stride: tl.tensor,
    NUM_DRAFTS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Find n-gram drafts, see ngram.ngram_drafts; one program per row of the batch.

    Only the row with a request's newest token gets drafts, and only if that token was sampled. The best match has the
    most equal tokens and, among several, the largest end position.

    rows_ptr, offsets_ptr: int32 [R], see verify_kernel; num_computed_ptr, prefill_len_ptr: int32 [S].
    history_ptr: int32 [S, L], the requests' tokens. drafts_ptr: int32 [S, NUM_DRAFTS], receives the drafts, or -1.
    longest, shortest: most and fewest tokens of a match. TILE: end positions compared at a time; TILE_K: NUM_DRAFTS
        rounded up to a power of two.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place).to(tl.int64)
    if row < 0:
        return
    if tl.load(offsets_ptr + place) != 0:
        return
    last = tl.load(num_computed_ptr + row)
    if last < tl.load(prefill_len_ptr + row):
        return
    tokens_ptr = history_ptr + row * history_stride
    best_N = tl.zeros([TILE], tl.int64) - 1
    for begin in range(0, last, TILE):
        end_N = begin + tl.arange(0, TILE)
        matched_N = tl.zeros([TILE], tl.int32)
        alive_N = end_N < last
        matched = 0
        any_alive = 1
        while (matched < longest) & (any_alive > 0):
            token = tl.load(tokens_ptr + tl.maximum(last - matched, 0))
            alive_N = alive_N & (end_N >= matched)
            alive_N = alive_N & (tl.load(tokens_ptr + end_N - matched, mask=alive_N, other=-1) == token)
            matched_N += alive_N.to(tl.int32)
            any_alive = tl.max(alive_N.to(tl.int32), 0)
            matched += 1
        found_N = (matched_N.to(tl.int64) << 32) | end_N.to(tl.int64)
        best_N = tl.maximum(best_N, tl.where(matched_N >= shortest, found_N, -1))
    best = tl.max(best_N, 0)
    k_K = tl.arange(0, TILE_K)
    start = (best & 0x7FFFFFFF).to(tl.int32) + 1
    period = tl.maximum(last + 1 - start, 1)
    found_K = k_K < tl.where(best >= 0, NUM_DRAFTS, 0)
    draft_K = tl.load(tokens_ptr + start + k_K % period, mask=found_K, other=-1)
    tl.store(drafts_ptr + row * NUM_DRAFTS + k_K, draft_K, mask=k_K < NUM_DRAFTS)


@quick_launches
@triton.jit(do_not_specialize=["num_rows", "draft"], do_not_specialize_on_alignment=["token_ids_ptr"])
def keep_drafts_kernel(
    rows_ptr: tl.tensor,
    room_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    head_ids_ptr: tl.tensor,
    head_positions_ptr: tl.tensor,
    num_rows: tl.tensor,
    draft: tl.tensor,
    NUM_DRAFTS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Store one draft of each row, see draft_rows.keep_drafts; one program per TILE rows.

    rows_ptr: int32 [R], see verify_kernel; room_ptr: int32 [R], most drafts of each row; token_ids_ptr: int64 [R], the
        drafts.
    drafts_ptr: int32 [S, NUM_DRAFTS], whose column `draft` is written, with -1 for rows without room.
    offsets_ptr: int32 [R], receives the offsets of the next pass.
    head_ids_ptr, head_positions_ptr: int64 [R], see HeadInputs, or None: the drafts are not a head's.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    place_R = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside_R = place_R < num_rows
    row_R = tl.load(rows_ptr + place_R, mask=inside_R, other=-1)
    room_R = tl.load(room_ptr + place_R, mask=inside_R, other=0)
    token_R = tl.load(token_ids_ptr + place_R, mask=inside_R, other=0).to(tl.int32)
    kept_R = tl.where(draft < room_R, tl.maximum(token_R, 0), -1)
    tl.store(drafts_ptr + row_R.to(tl.int64) * NUM_DRAFTS + draft, kept_R, mask=row_R >= 0)
    if head_ids_ptr is None:
        tl.store(offsets_ptr + place_R, tl.zeros([TILE], tl.int32) + (draft + 1), mask=inside_R)
    else:
        tl.store(offsets_ptr + place_R, tl.zeros([TILE], tl.int32) + draft, mask=inside_R)
        tl.store(head_ids_ptr + place_R, tl.maximum(token_R, 0).to(tl.int64), mask=inside_R)
        position_R = tl.load(head_positions_ptr + place_R, mask=inside_R, other=0)
        tl.store(head_positions_ptr + place_R, position_R + 1, mask=inside_R)
