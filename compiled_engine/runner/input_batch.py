"""One step's inputs, gathered from the persistent rows into the fixed buffers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.graphs.graph_key import GraphKey, GraphKind
from compiled_engine.runner.input_buffers import InputBuffers
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.scheduling.step import ScheduledRequest


@dataclass(frozen=True)
class InputBatch:
    """What the model side is handed. Host arrays are per request, in batch order, real requests only.

    `sampling_rows` are the rows (of RequestStates) that get a next token, `sampling_positions` its position;
    `logits_rows` picks their hidden states, None when that is all of them in order.
    """

    request_ids: list[str]
    rows: np.ndarray
    query_starts: np.ndarray
    num_computed: np.ndarray
    sampling_ids: list[str]
    sampling_rows: np.ndarray
    sampling_positions: np.ndarray
    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    attention_inputs: AttentionInputs
    logits_rows_R: torch.Tensor | None
    num_tokens: int
    num_requests: int


def gather_batch(
    scheduled: tuple[ScheduledRequest, ...],
    states: RequestStates,
    buffers: InputBuffers,
    backend: str,
    key: GraphKey | None,
) -> InputBatch:
    """Fill the buffers with the scheduled requests, padded to `key` if it is to be replayed.

    Padding tokens have no slot and belong to requests with an empty context: they write nothing and read nothing.
    Where attention is not captured it gets the requests as they are, with the padding tokens behind theirs.
    """
    buffers.reclaim()
    request_ids = [request.request_id for request in scheduled]
    rows = np.fromiter((states.row(request_id) for request_id in request_ids), np.int64, len(scheduled))
    lens = np.fromiter((request.num_tokens for request in scheduled), np.int64, len(scheduled))
    computed = np.fromiter((request.num_computed_tokens for request in scheduled), np.int64, len(scheduled))
    starts = np.cumsum(lens) - lens
    num_tokens, num_requests = int(lens.sum()), len(scheduled)

    if num_tokens == num_requests:  # decodes only: nothing to repeat
        token_rows, positions = rows, computed
    else:
        token_rows = np.repeat(rows, lens)
        positions = np.arange(num_tokens) + np.repeat(computed - starts, lens)
    buffers.input_ids_T.host[:num_tokens] = states.token_ids[token_rows, positions]
    buffers.positions_T.host[:num_tokens] = positions
    block, offset = np.divmod(positions, states.block_size)
    buffers.slot_mapping_T.host[:num_tokens] = (
        states.block_table[token_rows, block].astype(np.int64) * states.block_size + offset
    )
    buffers.query_start_loc_R1.host[:num_requests] = starts
    buffers.query_start_loc_R1.host[num_requests] = num_tokens
    seq_lens = computed + lens
    buffers.seq_lens_R.host[:num_requests] = seq_lens
    buffers.block_table_RB.host[:num_requests] = states.block_table[rows]

    samples = np.fromiter((request.samples for request in scheduled), bool, num_requests)
    num_sampling = int(samples.sum())
    buffers.logits_rows_R.host[:num_sampling] = (starts + lens - 1)[samples]
    all_sample = num_sampling == num_tokens

    padded_tokens, padded_requests = num_tokens, num_requests
    num_decodes, longest_query, longest_context = int((lens == 1).sum()), int(lens.max()), int(seq_lens.max())
    if key is not None:
        padded_tokens = key.num_tokens
        _pad_tokens(buffers, num_tokens, padded_tokens)
    if key is not None and key.kind is GraphKind.FULL:
        padded_requests = key.num_requests
        _pad_requests(buffers, num_tokens, num_requests, key)
        num_decodes, longest_query, longest_context = key.num_decodes, key.max_query_len, key.max_seq_len
    buffers.publish(padded_tokens, padded_requests)
    return InputBatch(
        request_ids=request_ids,
        rows=rows,
        query_starts=starts,
        num_computed=computed,
        sampling_ids=[request.request_id for request in scheduled if request.samples],
        sampling_rows=rows[samples],
        sampling_positions=seq_lens[samples],
        input_ids_T=buffers.input_ids_T.device[:padded_tokens],
        positions_T=buffers.positions_T.device[:padded_tokens],
        attention_inputs=attention_inputs(
            buffers, padded_tokens, padded_requests, (num_decodes, longest_query, longest_context), backend
        ),
        logits_rows_R=None if all_sample else buffers.logits_rows_R.device[:num_sampling],
        num_tokens=num_tokens,
        num_requests=num_requests,
    )


def _pad_tokens(buffers: InputBuffers, num_tokens: int, padded_tokens: int) -> None:
    buffers.input_ids_T.host[num_tokens:padded_tokens] = 0
    buffers.positions_T.host[num_tokens:padded_tokens] = 0
    buffers.slot_mapping_T.host[num_tokens:padded_tokens] = -1


def _pad_requests(buffers: InputBuffers, num_tokens: int, num_requests: int, key: GraphKey) -> None:
    """The rows that attention in a graph finds: in a graph of decodes one token each, otherwise the first has all."""
    ends = buffers.query_start_loc_R1.host[num_requests + 1 : key.num_requests + 1]
    ends[:] = num_tokens + 1 + np.arange(len(ends)) if key.is_decode else key.num_tokens
    buffers.seq_lens_R.host[num_requests : key.num_requests] = 0
    buffers.block_table_RB.host[num_requests : key.num_requests] = 0


def empty_batch(buffers: InputBuffers, num_tokens: int, num_requests: int) -> None:
    """Fill the buffers with a batch that leaves no trace: no slots, empty contexts, tokens shared out evenly."""
    buffers.reclaim()
    for buffer in (buffers.input_ids_T, buffers.positions_T, buffers.seq_lens_R, buffers.block_table_RB):
        buffer.host[:] = 0
    buffers.slot_mapping_T.host[:] = -1
    borders = np.linspace(0, num_tokens, num_requests + 1).astype(np.int32)
    buffers.query_start_loc_R1.host[: num_requests + 1] = borders
    buffers.logits_rows_R.host[:num_requests] = borders[1:] - 1
    buffers.publish(num_tokens, num_requests)


def attention_inputs(
    buffers: InputBuffers, num_tokens: int, num_requests: int, host: tuple[int, int, int], backend: str
) -> AttentionInputs:
    """The attention's view of the buffers. `host`: leading decodes, longest query, bound of the contexts."""
    return AttentionInputs(
        query_start_loc_R1=buffers.query_start_loc_R1.device[: num_requests + 1],
        seq_lens_R=buffers.seq_lens_R.device[:num_requests],
        block_table_RB=buffers.block_table_RB.device[:num_requests],
        slot_mapping_T=buffers.slot_mapping_T.device[:num_tokens],
        host_3=torch.tensor(host, dtype=torch.int32, device="cpu"),
        backend=backend,
    )
