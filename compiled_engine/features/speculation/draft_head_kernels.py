"""Triton kernels for draft heads: find the token after each position of a step, and keep hidden states for drafting."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launcher import quick_launches

TILE = 1024


@quick_launches
@triton.jit(do_not_specialize=["num_rows", "num_tokens", "history_stride"])
def following_kernel(
    rows_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    history_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    history_stride: tl.tensor,
    DECODES_ONLY: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write the token that follows each token of a step, see draft_head.following_tokens.

    There is one program per row of the batch. Unless DECODES_ONLY, another program writes 0 for tokens without a row.

    rows_ptr: int32 [R], the state row of each row, -1 for padding; query_start_loc_ptr: int32 [R + 1], not read with
        DECODES_ONLY.
    positions_ptr: int64 [T]; shift_ptr: int32 [S], a token's position minus its index in the request's tokens, at most
        0; None: the two are equal.
    history_ptr: int32 [S, L], the requests' tokens.
    token_ids_ptr: int64 [T], receives the tokens; 0 for padding.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0)
    lane = tl.arange(0, TILE)
    if DECODES_ONLY:
        start = request
        end = request + 1
        row = tl.load(rows_ptr + request)
    else:
        start = tl.load(query_start_loc_ptr + request)
        end = num_tokens
        row = -1
        if request < num_rows:
            end = tl.load(query_start_loc_ptr + request + 1)
            row = tl.load(rows_ptr + request)
    if row < 0:
        for begin in range(start, end, TILE):
            tl.store(token_ids_ptr + begin + lane, tl.zeros([TILE], tl.int64), mask=begin + lane < end)
        return
    tokens_ptr = history_ptr + row.to(tl.int64) * history_stride + 1
    shift = 0
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + row)
    for begin in range(start, end, TILE):
        token = begin + lane
        mask = token < end
        position = tl.load(positions_ptr + token, mask=mask, other=0)
        tl.store(
            token_ids_ptr + token, tl.load(tokens_ptr + position - shift, mask=mask, other=0).to(tl.int64), mask=mask
        )


@quick_launches
@triton.jit
def keep_hidden_kernel(
    rows_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    num_computed_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Store the hidden state of each request's last verified token, see draft_head.keep_hidden; one program per row.

    rows_ptr: int32 [R], see following_kernel; ends_ptr: int64 [R], positions of the sampled tokens; last_tokens_ptr:
        int64 [R], index of each row's last token in the step.
    num_computed_ptr: int32 [S]; a row has the request's last verified token if its entry of `ends_ptr` is this value.
    hidden_ptr: [T, SIZE]; kept_ptr: [S, SIZE], receives the hidden states.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place).to(tl.int64)
    if row < 0:
        return
    if tl.load(ends_ptr + place) != tl.load(num_computed_ptr + row):
        return
    hidden_ptr += tl.load(last_tokens_ptr + place) * SIZE
    kept_ptr += row * SIZE
    for begin in range(0, SIZE, TILE):
        column = begin + tl.arange(0, TILE)
        inside = column < SIZE
        tl.store(kept_ptr + column, tl.load(hidden_ptr + column, mask=inside), mask=inside)


@quick_launches
@triton.jit
def begin_drafts_kernel(
    rows_ptr: tl.tensor,
    num_computed_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Copy the kept hidden states of rows, and write the positions of their first drafts; one program per row.

    See draft_head.begin_drafts. rows_ptr: int32 [R], see following_kernel; num_computed_ptr: int32 [S]; kept_ptr: [S,
    SIZE]; hidden_ptr: [R, SIZE], zeros for padding; positions_ptr: int64 [R].
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place).to(tl.int64)
    state = tl.maximum(row, 0)
    computed = tl.where(row >= 0, tl.load(num_computed_ptr + state), 0)
    tl.store(positions_ptr + place, computed.to(tl.int64) + 1)
    for begin in range(0, SIZE, TILE):
        column = begin + tl.arange(0, TILE)
        inside = column < SIZE
        hidden = tl.load(kept_ptr + state * SIZE + column, mask=inside)
        tl.store(hidden_ptr + place * SIZE + column, tl.where(row >= 0, hidden, 0.0), mask=inside)
