"""A step's inputs, gathered on the device from the request states: reference in numpy, and way to the kernel."""

from __future__ import annotations

import numpy as np

from compiled_engine.runner.input_buffers import InputBuffers
from compiled_engine.runner.request_states import RequestStates


def prepare_inputs(
    states: RequestStates, buffers: InputBuffers, num_rows: int, num_tokens: int, decodes_only: bool
) -> None:
    """Fill the buffers for the batch whose rows were staged.

    num_rows: rows in it, padding included; row -1 reads nothing and gives an empty context. decodes_only: each row has
    one token, and query_start_loc is not read. num_tokens: to fill; tokens that no row has get token 0 and slot -1.
    """
    if buffers.rows_R.device.type == "cpu":
        prepare_reference(states, buffers, num_rows, num_tokens, decodes_only)
        return
    from compiled_engine.runner.prepare_inputs_kernel import launch  # Triton is not installed everywhere

    launch(states, buffers, num_rows, num_tokens, decodes_only)


def prepare_reference(
    states: RequestStates, buffers: InputBuffers, num_rows: int, num_tokens: int, decodes_only: bool
) -> None:
    """What the kernel does, for tensors on the CPU."""
    rows_R = buffers.rows_R.numpy()[:num_rows]
    starts_R1 = np.arange(num_rows + 1) if decodes_only else buffers.query_start_loc_R1.numpy()[: num_rows + 1]
    lens_R = np.diff(starts_R1)
    real_R = rows_R >= 0
    computed_R = np.where(real_R, states.num_computed_S.numpy()[rows_R], 0)
    known_R = states.num_known_S.numpy()[rows_R]

    request_T = np.repeat(np.arange(num_rows), lens_R)
    covered = min(len(request_T), num_tokens)
    request_T = request_T[:covered]
    positions_T = np.arange(covered) - starts_R1[request_T] + computed_R[request_T]
    row_T = rows_R[request_T]
    known_ids_KL = states.known_ids_KL.numpy()
    known_ids_T = known_ids_KL[states.known_row_S.numpy()[row_T], np.minimum(positions_T, known_ids_KL.shape[1] - 1)]
    ids_T = np.where(positions_T < known_R[request_T], known_ids_T, states.last_token_S.numpy()[row_T])
    table_SB = states.block_table_SB.numpy()
    block_T, offset_T = np.divmod(positions_T, states.block_size)
    blocks_T = table_SB[row_T, np.minimum(block_T, table_SB.shape[1] - 1)].astype(np.int64)
    real_T = real_R[request_T]
    for tensor, values, padding in (
        (buffers.input_ids_T, ids_T, 0),
        (buffers.positions_T, positions_T, 0),
        (buffers.slot_mapping_T, blocks_T * states.block_size + offset_T, -1),
    ):
        array = tensor.numpy()
        array[:covered] = np.where(real_T, values, padding)
        array[covered:num_tokens] = padding

    seq_lens_R = np.where(real_R, computed_R + lens_R, 0)
    buffers.seq_lens_R.numpy()[:num_rows] = seq_lens_R
    buffers.logits_index_R.numpy()[:num_rows] = np.maximum(starts_R1[1:] - 1, 0)
    buffers.block_table_RB.numpy()[:num_rows] = np.where(real_R[:, None], table_SB[rows_R], 0)
    buffers.sample_positions_R.numpy()[:num_rows] = seq_lens_R
