"""Triton kernel: advance the states by a step, and hand its tokens to the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.block_sizes import next_power_of_2
from compiled_engine.kernels.dependent_launch import dependent_launch
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.runner.input_buffers import LAST_NUMBER, RING, InputBuffers
from compiled_engine.runner.request_states import RequestStates


@quick_launches
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["token_ids_ptr"])
def advance_kernel(
    rows_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    num_computed_ptr: tl.tensor,
    num_known_ptr: tl.tensor,
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
    """One program for all rows, since they share the step's number."""
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
    samples_R = real_R & (computed_R >= tl.load(num_known_ptr + row_R, mask=real_R, other=0))
    token_R = tl.load(token_ids_ptr + request_R, mask=samples_R, other=-1).to(tl.int32)
    # What is no token ends its request, but a step with it may be under way.
    tl.store(last_token_ptr + row_R, tl.maximum(token_R, 0), mask=samples_R)
    number = (tl.load(num_steps_ptr) + 1) & LAST_NUMBER
    ring_row_ptr = ring_ptr + (number % RING) * ring_stride
    tl.store(ring_row_ptr + 1 + request_R, token_R, mask=inside_R)
    tl.store(ring_row_ptr, number)
    tl.debug_barrier()  # every thread has read the number
    tl.store(num_steps_ptr, number)


def launch(
    states: RequestStates,
    buffers: InputBuffers,
    token_ids_R: torch.Tensor,
    num_rows: int,
    decodes_only: bool,
    again: bool,
) -> None:
    """See advance."""
    advance_kernel[(1,)](
        buffers.rows_R,
        buffers.query_start_loc_R1,
        token_ids_R,
        states.num_computed_S,
        states.num_known_S,
        states.last_token_S,
        buffers.num_steps_1,
        buffers.tokens_KR1,
        num_rows,
        buffers.tokens_KR1.stride(0),
        RING=RING,
        LAST_NUMBER=LAST_NUMBER,
        DECODES_ONLY=decodes_only,
        AGAIN=again,
        TILE_R=next_power_of_2(buffers.rows_R.shape[0]),
        num_warps=4,
        **dependent_launch(buffers.rows_R.device),
    )
