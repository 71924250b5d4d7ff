"""Triton kernels that compute a step's inputs from the request states, and store the step's tokens in the states."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launcher import quick_launches

TILE = 1024


@quick_launches
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def prepare_kernel(
    rows_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    num_computed_ptr: tl.tensor,
    prefill_len_ptr: tl.tensor,
    last_token_ptr: tl.tensor,
    token_row_ptr: tl.tensor,
    all_token_ids_ptr: tl.tensor,
    state_table_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    logits_index_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sample_positions_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    ahead_ptr: tl.tensor,
    history_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    all_token_ids_stride: tl.tensor,
    history_stride: tl.tensor,
    NUM_AHEAD: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DECODES_ONLY: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Fill the buffers of a batch from the request states, see input_batch.launch_prepare.

    Program (batch row); unless DECODES_ONLY, one more program fills the tokens after the last row. R: rows of the
    batch, S: rows of the states, L: most tokens of a request.

    rows_ptr: int32 [R], the state row of each batch row, -1 for padding; query_start_loc_ptr: int32 [R + 1], not read
        with DECODES_ONLY.
    num_computed_ptr to token_row_ptr: int32 [S]; all_token_ids_ptr: int32 [rows of tokens, L]; state_table_ptr: int32
        [S, MAX_BLOCKS]; see RequestStates.
    input_ids_ptr to sample_positions_ptr: the buffers that are filled, see InputBuffers. table_ptr: int32 [R,
        MAX_BLOCKS].
    offsets_ptr: int32 [R], see input_batch.py; ahead_ptr: int32 [S, NUM_AHEAD]; history_ptr: int32 [S, L]. All three
        are None unless the batch has offsets. A row whose guess does not exist is treated as padding.
    shift_ptr: int32 [S], added to positions; None if no position is shifted.
    num_rows, num_tokens: how many rows and tokens to fill, padding included. TILE: tokens or blocks handled at a time.
    """
    # No later kernel may start before this one has ended: attention reads lengths, blocks and slots before its own
    # wait, and kernels between the two may all let their dependents start before they have waited.
    if DEPENDENT_LAUNCH:
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
    offset = 0
    supposed = 0
    if offsets_ptr is not None:
        if row >= 0:
            offset = tl.load(offsets_ptr + request)
        if offset > 0:
            supposed = tl.load(ahead_ptr + row.to(tl.int64) * NUM_AHEAD + offset - 1)
        if supposed < 0:
            row = -1
    if request < num_rows:
        tl.store(logits_index_ptr + request, tl.maximum(end - 1, 0).to(tl.int64))
    if row < 0:
        if request < num_rows:
            tl.store(seq_lens_ptr + request, 0)
            tl.store(sample_positions_ptr + request, 0)
        for begin in range(start, end, TILE):
            mask = begin + lane < end
            zeros = tl.zeros([TILE], tl.int64)
            tl.store(input_ids_ptr + begin + lane, zeros, mask=mask)
            tl.store(positions_ptr + begin + lane, zeros, mask=mask)
            tl.store(slot_mapping_ptr + begin + lane, zeros - 1, mask=mask)
        return

    state = row.to(tl.int64)
    computed = tl.load(num_computed_ptr + state) + offset
    known = tl.load(prefill_len_ptr + state)
    all_token_ids_ptr += tl.load(token_row_ptr + state).to(tl.int64) * all_token_ids_stride
    last_token = tl.load(last_token_ptr + state)
    if offsets_ptr is not None:
        if offset > 0:
            last_token = supposed
        if offset < 0:
            last_token = tl.load(history_ptr + state * history_stride + computed)
    seq_len = computed + end - start
    state_row_ptr = state_table_ptr + state * MAX_BLOCKS
    for begin in range(start, end, TILE):
        token = begin + lane
        mask = token < end
        position = computed + token - start
        listed = mask & (position < known)
        ids = tl.load(all_token_ids_ptr + position, mask=listed, other=0)
        ids = tl.where(listed, ids, last_token)
        block = tl.load(state_row_ptr + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
        tl.store(input_ids_ptr + token, ids.to(tl.int64), mask=mask)
        shifted = position
        if shift_ptr is not None:
            shifted += tl.load(shift_ptr + state)
        tl.store(positions_ptr + token, shifted.to(tl.int64), mask=mask)
        tl.store(slot_mapping_ptr + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)
    # Blocks past the context are not updated, as nothing reads them.
    num_blocks = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    table_row_ptr = table_ptr + request.to(tl.int64) * MAX_BLOCKS
    for begin in range(0, num_blocks, TILE):
        block = begin + lane
        mask = block < num_blocks
        tl.store(table_row_ptr + block, tl.load(state_row_ptr + block, mask=mask), mask=mask)
    tl.store(seq_lens_ptr + request, seq_len)
    tl.store(sample_positions_ptr + request, seq_len.to(tl.int64))


@quick_launches
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["token_ids_ptr"])
def advance_kernel(
    rows_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    num_computed_ptr: tl.tensor,
    prefill_len_ptr: tl.tensor,
    last_token_ptr: tl.tensor,
    num_steps_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    num_rows: tl.tensor,
    ring_stride: tl.tensor,
    RING: tl.constexpr,
    LAST_NUMBER: tl.constexpr,
    DECODES_ONLY: tl.constexpr,
    AGAIN: tl.constexpr,
    TILE_R: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Store a step's tokens in the request states and in the ring buffer, see step_sampling.advance.

    A single program handles all rows, since they share the step's number. R: rows of the batch, S: rows of the states.

    rows_ptr, query_start_loc_ptr: see prepare_kernel; token_ids_ptr: int64 [R], the sampled tokens or error codes.
    num_computed_ptr, prefill_len_ptr, last_token_ptr: int32 [S], see RequestStates. num_steps_ptr: int32 [1], the
        number of the last step, which is increased.
    ring_ptr: int32 [RING, 1 + R]. The step's entry receives the step's number, and for each row the token, the error
        code, or -1 if the row does not sample. ring_stride: elements from one entry to the next.
    AGAIN: num_computed has advanced already. LAST_NUMBER: step numbers wrap around after it. TILE_R: R rounded up to a
        power of two.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    request_R = tl.arange(0, TILE_R)
    inside_R = request_R < num_rows
    row_R = tl.load(rows_ptr + request_R, mask=inside_R, other=-1)
    real_R = row_R >= 0
    computed_R = tl.load(num_computed_ptr + row_R, mask=real_R, other=0)
    if not AGAIN:
        if DECODES_ONLY:
            computed_R += 1
        else:
            computed_R += tl.load(query_start_loc_ptr + request_R + 1, mask=real_R, other=0)
            computed_R -= tl.load(query_start_loc_ptr + request_R, mask=real_R, other=0)
        tl.store(num_computed_ptr + row_R, computed_R, mask=real_R)
    samples_R = real_R & (computed_R >= tl.load(prefill_len_ptr + row_R, mask=real_R, other=0))
    token_R = tl.load(token_ids_ptr + request_R, mask=samples_R, other=-1).to(tl.int32)
    # An error code ends its request, but another of its steps may be in flight.
    tl.store(last_token_ptr + row_R, tl.maximum(token_R, 0), mask=samples_R)
    number = (tl.load(num_steps_ptr) + 1) & LAST_NUMBER
    ring_row_ptr = ring_ptr + (number % RING) * ring_stride
    tl.store(ring_row_ptr + 1 + request_R, token_R, mask=inside_R)
    tl.store(ring_row_ptr, number)
    tl.debug_barrier()  # all threads must have read the number
    tl.store(num_steps_ptr, number)
