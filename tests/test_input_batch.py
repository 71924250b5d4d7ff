"""A step's inputs: gathered from the rows, padded to a graph's size, and without influence from the padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compiled_engine.attention.op import write_and_attend
from compiled_engine.graphs.graph_key import GraphKey, GraphKind, decode_key, mixed_key
from compiled_engine.runner.input_batch import gather_batch
from compiled_engine.runner.input_buffers import InputBuffers
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.scheduling.step import NewRequest, ScheduledRequest

BLOCK_SIZE = 4
MAX_MODEL_LEN = 32


@pytest.fixture
def states() -> RequestStates:
    return RequestStates(max_num_rows=6, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)


@pytest.fixture
def buffers(states: RequestStates) -> InputBuffers:
    return InputBuffers(64, 6, states.block_table.shape[1], torch.device("cpu"))


def new_request(request_id: str, tokens: list[int], blocks: list[int], num_prompt_tokens: int = 0) -> NewRequest:
    return NewRequest(
        request_id, tuple(tokens), num_prompt_tokens or len(tokens), SamplingParams(), frozenset(), tuple(blocks)
    )


def scheduled(request_id: str, computed: int, count: int, samples: bool = True) -> ScheduledRequest:
    return ScheduledRequest(request_id, computed, count, (), samples)


def test_a_mixed_batch(states: RequestStates, buffers: InputBuffers) -> None:
    states.add(new_request("decode", [10, 11, 12, 13, 14, 15], [7, 2]))
    states.add(new_request("chunk", list(range(100, 120)), [1, 3, 5, 4, 6]))
    step = (scheduled("decode", 5, 1), scheduled("chunk", 6, 5, samples=False))
    batch = gather_batch(step, states, buffers, "torch", None)
    attention = batch.attention_inputs
    assert batch.input_ids_T.tolist() == [15, 106, 107, 108, 109, 110]
    assert batch.positions_T.tolist() == [5, 6, 7, 8, 9, 10]
    assert attention.slot_mapping_T.tolist() == [2 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 5 * 4, 5 * 4 + 1, 5 * 4 + 2]
    assert attention.query_start_loc_R1.tolist() == [0, 1, 6]
    assert attention.seq_lens_R.tolist() == [6, 11]  # a chunk's keys include what was computed before
    assert attention.block_table_RB[:, :5].tolist() == [[7, 2, 0, 0, 0], [1, 3, 5, 4, 6]]
    assert attention.host_3.tolist() == [1, 5, 11]
    assert batch.logits_rows_R is not None
    assert batch.logits_rows_R.tolist() == [0]
    assert (batch.sampling_ids, batch.sampling_positions.tolist()) == (["decode"], [6])


def test_padding_reads_and_writes_nothing(states: RequestStates, buffers: InputBuffers) -> None:
    for buffer in (buffers.seq_lens_R, buffers.slot_mapping_T, buffers.block_table_RB, buffers.query_start_loc_R1):
        buffer.host[:] = 31  # left over from another batch
    states.add(new_request("a", [1, 2, 3], [4]))
    states.add(new_request("b", [5, 6, 7, 8, 9], [2, 3]))
    key = decode_key(5, MAX_MODEL_LEN)
    batch = gather_batch((scheduled("a", 2, 1), scheduled("b", 4, 1)), states, buffers, "torch", key)
    attention = batch.attention_inputs
    assert (batch.num_tokens, batch.num_requests) == (2, 2)
    assert batch.input_ids_T.shape == (5,)
    assert attention.slot_mapping_T.tolist() == [4 * 4 + 2, 3 * 4, -1, -1, -1]
    assert attention.seq_lens_R.tolist() == [3, 5, 0, 0, 0]
    assert attention.query_start_loc_R1.tolist() == [0, 1, 2, 3, 4, 5]
    assert attention.host_3.tolist() == [5, 1, MAX_MODEL_LEN]
    assert batch.logits_rows_R is None


def test_padding_of_graphs_that_take_any_batch(states: RequestStates, buffers: InputBuffers) -> None:
    for buffer in (buffers.seq_lens_R, buffers.slot_mapping_T, buffers.block_table_RB, buffers.query_start_loc_R1):
        buffer.host[:] = 31  # left over from another batch
    states.add(new_request("a", [1, 2, 3], [4]))
    states.add(new_request("b", [5, 6, 7, 8, 9], [2, 3]))
    step = (scheduled("a", 2, 1), scheduled("b", 2, 3))
    full = gather_batch(step, states, buffers, "torch", mixed_key(6, 3, MAX_MODEL_LEN)).attention_inputs
    assert full.slot_mapping_T[4:].tolist() == [-1, -1]
    assert full.query_start_loc_R1.tolist() == [0, 1, 4, 6, 6]  # all padding tokens are one row's
    assert full.seq_lens_R.tolist() == [3, 5, 0, 0]
    assert full.host_3.tolist() == [0, 6, MAX_MODEL_LEN]
    around = gather_batch(step, states, buffers, "torch", GraphKey(GraphKind.PIECEWISE, 6))
    assert around.input_ids_T.shape == (6,)
    assert around.attention_inputs.slot_mapping_T[4:].tolist() == [-1, -1]
    assert around.attention_inputs.query_start_loc_R1.tolist() == [0, 1, 4]  # attention has the batch as it is
    assert around.attention_inputs.host_3.tolist() == [1, 3, 5]


def test_attention_of_real_rows_is_bit_identical_whatever_stands_in_the_padding(
    states: RequestStates, buffers: InputBuffers
) -> None:
    states.add(new_request("a", [1, 2, 3], [4]))
    states.add(new_request("b", [5, 6, 7, 8, 9], [2, 3]))
    batch = gather_batch(
        (scheduled("a", 2, 1), scheduled("b", 4, 1)), states, buffers, "torch", decode_key(4, MAX_MODEL_LEN)
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, heads, 64, generator=generator) for heads in (4, 2, 2))
    cache = torch.randn(8, 2, BLOCK_SIZE, 2, 64, generator=generator)
    inputs = replace(batch.attention_inputs)
    results = []
    for poison in (0.0, float("nan"), 1e30):
        q[2:], k[2:], v[2:] = poison, poison, poison
        kv_cache, out = cache.clone(), torch.full_like(q, float("nan"))
        kv_cache[[0, 1, 5, 6, 7]] = poison  # blocks that belong to nobody
        before = kv_cache.clone()
        write_and_attend(
            q,
            k,
            v,
            kv_cache,
            out,
            inputs.query_start_loc_R1,
            inputs.seq_lens_R,
            inputs.block_table_RB,
            inputs.slot_mapping_T,
            inputs.host_3,
            "torch",
            0.125,
            0,
        )
        changed = (kv_cache != before) & ~(kv_cache.isnan() & before.isnan())
        assert set(torch.nonzero(changed.flatten(3).any(-1).any(1))[:, 0].tolist()) == {3, 4}
        results.append(out[:2].clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_rows_are_permanent_and_come_free_again(states: RequestStates) -> None:
    rows = [states.add(new_request(str(i), [i], [i])) for i in range(6)]
    assert sorted(rows) == list(range(6))
    assert states.remove("3") == rows[3]
    assert [states.row(str(i)) for i in (0, 5)] == [rows[0], rows[5]]
    resumed = states.add(new_request("3", [3, 30, 31], [9, 8], num_prompt_tokens=1))
    assert resumed == rows[3]
    assert states.num_tokens[resumed] == 3
    assert states.num_prompt_tokens[resumed] == 1
    np.testing.assert_array_equal(states.block_table[resumed, :2], [9, 8])


def test_appended_tokens_and_blocks_are_read_by_the_next_step(states: RequestStates, buffers: InputBuffers) -> None:
    row = states.add(new_request("a", [1, 2, 3, 4], [6]))
    states.append_token(row, 50)
    states.append_blocks(row, (2,))
    batch = gather_batch((scheduled("a", 4, 1),), states, buffers, "torch", None)
    assert batch.input_ids_T.tolist() == [50]
    assert batch.attention_inputs.slot_mapping_T.tolist() == [2 * 4]
    assert batch.attention_inputs.block_table_RB[0, :2].tolist() == [6, 2]
