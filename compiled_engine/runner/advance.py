"""After a step the states advance, and its tokens go to where the host reads them: reference, and way to the kernel."""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.runner.input_buffers import LAST_NUMBER, RING, InputBuffers
from compiled_engine.runner.request_states import RequestStates


def advance(
    states: RequestStates,
    buffers: InputBuffers,
    token_ids_R: torch.Tensor,
    num_rows: int,
    *,
    decodes_only: bool,
    again: bool = False,
) -> None:
    """Take a step's tokens into the states, and write them to the ring that the host reads.

    token_ids_R: int64, for all rows but those of padding; what is no token (sampling/no_token.py) is for the host.
    A row gets its token only if the step reached the last known token. again: the states have advanced, with other
    tokens.
    """
    if buffers.rows_R.device.type == "cpu":
        advance_reference(states, buffers, token_ids_R, num_rows, decodes_only=decodes_only, again=again)
        return
    from compiled_engine.runner.advance_kernel import launch  # Triton is not installed everywhere

    launch(states, buffers, token_ids_R, num_rows, decodes_only, again)


def advance_reference(
    states: RequestStates,
    buffers: InputBuffers,
    token_ids_R: torch.Tensor,
    num_rows: int,
    *,
    decodes_only: bool,
    again: bool,
) -> None:
    """What the kernel does, for tensors on the CPU."""
    rows_R = buffers.rows_R.numpy()[:num_rows]
    real_R = rows_R >= 0
    rows = rows_R[real_R]
    starts_R1 = np.arange(num_rows + 1) if decodes_only else buffers.query_start_loc_R1.numpy()[: num_rows + 1]
    lens_R = np.diff(starts_R1)
    computed_S = states.num_computed_S.numpy()
    if not again:
        computed_S[rows] += lens_R[real_R]
    samples_R = np.zeros(num_rows, bool)
    samples_R[real_R] = computed_S[rows] >= states.num_known_S.numpy()[rows]
    tokens_R = np.full(num_rows, -1, np.int32)
    tokens_R[samples_R] = token_ids_R.numpy()[np.flatnonzero(samples_R)]
    # What is no token ends its request, but a step with it may be under way.
    states.last_token_S.numpy()[rows_R[samples_R]] = np.maximum(tokens_R[samples_R], 0)
    number = (int(buffers.num_steps_1[0]) + 1) & LAST_NUMBER
    buffers.num_steps_1[0] = number
    ring_row = buffers.tokens_KR1.numpy()[number % RING]
    ring_row[0] = number
    ring_row[1 : num_rows + 1] = tokens_R
