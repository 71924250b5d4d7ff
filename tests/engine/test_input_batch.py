"""A step's inputs: gathered from the rows, padded to a graph's size, and without influence from the padding."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from compiled_engine.attention.inputs import AttentionInputs, attention_inputs_of
from compiled_engine.attention.op import write_and_attend
from compiled_engine.engine.input_batch import (
    LAST_NUMBER,
    RING,
    InputBatch,
    InputBuffers,
    make_batch,
    prepare,
    step_of_batch,
)
from compiled_engine.engine.messages import NewRequest, SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_sampling import TokenRing, advance
from compiled_engine.features.speculation.draft_rows import DraftedRows, DraftedSteps, StepRows, make_drafted_batch
from compiled_engine.features.speculation.drafting_rows import DraftingRows, DraftingSteps
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey, GraphKind, decode_key, mixed_key
from compiled_engine.process.profiling import StepClock
from compiled_engine.sampling.params import SamplingParams

BLOCK_SIZE = 4
MAX_MODEL_LEN = 32


@pytest.fixture
def states() -> RequestStates:
    return RequestStates(6, MAX_MODEL_LEN, BLOCK_SIZE, torch.device("cpu"))


@pytest.fixture
def buffers(states: RequestStates) -> InputBuffers:
    return InputBuffers(64, 7, states.block_table_SB.shape[1], states.writes, torch.device("cpu"))


def new_request(request_id: str, tokens: list[int], blocks: list[int], num_prompt_tokens: int = 0) -> NewRequest:
    return NewRequest(
        request_id,
        tuple(tokens),
        num_prompt_tokens or len(tokens),
        SamplingParams(seed=1),
        frozenset(),
        (tuple(blocks),),
    )


def scheduled(request_id: str, computed: int, count: int, samples: bool = True) -> tuple[str, int, int, bool]:
    return request_id, computed, count, samples


def step_of(*shares: tuple[str, int, int, bool]) -> SchedulerOutput:
    request_ids, starts, counts, samples = map(list, zip(*shares, strict=True))
    return SchedulerOutput(1, (), (), request_ids, starts, counts, samples, {})


def gathered(
    shares: tuple[tuple[str, int, int, bool], ...],
    states: RequestStates,
    buffers: InputBuffers,
    key: GraphKey | None = None,
) -> tuple[InputBatch, AttentionInputs]:
    batch = make_batch(step_of(*shares), states, buffers, key)
    states.writes.apply()
    prepare(batch, states, buffers)
    return batch, attention_inputs_of(step_of_batch(batch, buffers), "torch")


def leave_leftovers(buffers: InputBuffers) -> None:
    for tensor in (buffers.seq_lens_R, buffers.slot_mapping_T, buffers.block_table_RB, buffers.query_start_loc_R1):
        tensor[:] = 31  # of another batch


def test_a_mixed_batch(states: RequestStates, buffers: InputBuffers) -> None:
    states.add(new_request("decode", [10, 11, 12, 13, 14, 15], [7, 2]), 5)
    states.add(new_request("chunk", list(range(100, 120)), [1, 3, 5, 4, 6]), 6)
    step = (scheduled("decode", 5, 1), scheduled("chunk", 6, 5, samples=False))
    batch, attention = gathered(step, states, buffers)
    assert buffers.input_ids_T[:6].tolist() == [15, 106, 107, 108, 109, 110]
    assert buffers.positions_T[:6].tolist() == [5, 6, 7, 8, 9, 10]
    assert attention.slot_mapping_T.tolist() == [2 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 5 * 4, 5 * 4 + 1, 5 * 4 + 2]
    assert attention.query_start_loc_R1.tolist() == [0, 1, 6]
    assert attention.seq_lens_R.tolist() == [6, 11]  # a chunk's keys include what was computed before
    assert attention.block_table_RB[:, :5].tolist() == [[7, 2, 0, 0, 0], [1, 3, 5, 4, 6]]
    assert attention.host_3.tolist() == [1, 5, 11]
    assert buffers.logits_index_R[:2].tolist() == [0, 5]
    assert buffers.sample_positions_R[:2].tolist() == [6, 11]
    assert [id_ for id_, samples in zip(batch.request_of_row, batch.samples, strict=True) if samples] == ["decode"]


def test_padding_reads_and_writes_nothing(states: RequestStates, buffers: InputBuffers) -> None:
    leave_leftovers(buffers)
    states.add(new_request("a", [1, 2, 3], [4]), 2)
    states.add(new_request("b", [5, 6, 7, 8, 9], [2, 3]), 4)
    step = (scheduled("a", 2, 1), scheduled("b", 4, 1))
    batch, attention = gathered(step, states, buffers, decode_key(5, MAX_MODEL_LEN))
    assert (batch.num_tokens, batch.num_real_rows, batch.num_rows) == (2, 2, 5)
    assert batch.request_of_row == ["b", "a"]  # the longest context first
    assert batch.order is not None
    assert batch.order.tolist() == [1, 0]
    assert buffers.input_ids_T[:5].tolist() == [9, 3, 0, 0, 0]
    assert attention.slot_mapping_T.tolist() == [3 * 4, 4 * 4 + 2, -1, -1, -1]
    assert attention.seq_lens_R.tolist() == [5, 3, 0, 0, 0]
    assert attention.query_start_loc_R1.tolist() == [0, 1, 2, 3, 4, 5]
    assert attention.host_3.tolist() == [5, 1, MAX_MODEL_LEN]


def test_decodes_without_a_graph(states: RequestStates, buffers: InputBuffers) -> None:
    states.add(new_request("a", [1, 2, 3], [4]), 2)
    states.add(new_request("b", [5, 6, 7, 8, 9], [2, 3]), 4)
    batch, attention = gathered((scheduled("a", 2, 1), scheduled("b", 4, 1)), states, buffers)
    assert batch.decodes_only
    assert attention.host_3.tolist() == [2, 1, 5]
    assert attention.seq_lens_R.tolist() == [5, 3]


def test_decodes_in_a_graph_that_takes_any_batch(states: RequestStates, buffers: InputBuffers) -> None:
    states.add(new_request("a", [1, 2, 3], [4]), 2)
    states.add(new_request("b", [5, 6, 7, 8, 9], [2, 3]), 4)
    step = (scheduled("a", 2, 1), scheduled("b", 4, 1))
    batch, attention = gathered(step, states, buffers, mixed_key(5, 3, MAX_MODEL_LEN))
    assert (batch.decodes_only, batch.request_of_row) == (False, ["a", "b"])
    assert attention.query_start_loc_R1.tolist() == [0, 1, 2, 5, 5]
    assert attention.host_3.tolist() == [0, 5, MAX_MODEL_LEN]


def test_padding_of_graphs_that_take_any_batch(states: RequestStates, buffers: InputBuffers) -> None:
    leave_leftovers(buffers)
    states.add(new_request("a", [1, 2, 3], [4]), 2)
    states.add(new_request("b", [5, 6, 7, 8, 9], [2, 3]), 2)
    step = (scheduled("a", 2, 1), scheduled("b", 2, 3))
    _, full = gathered(step, states, buffers, mixed_key(6, 3, MAX_MODEL_LEN))
    assert full.slot_mapping_T[4:].tolist() == [-1, -1]
    assert full.query_start_loc_R1.tolist() == [0, 1, 4, 6, 6]  # all padding tokens are one row's
    assert full.seq_lens_R.tolist() == [3, 5, 0, 0]
    assert full.host_3.tolist() == [0, 6, MAX_MODEL_LEN]
    _, around = gathered(step, states, buffers, GraphKey(GraphKind.PIECEWISE, 6))
    assert around.slot_mapping_T[4:].tolist() == [-1, -1]
    assert around.query_start_loc_R1.tolist() == [0, 1, 4]  # attention has the batch as it is
    assert around.host_3.tolist() == [1, 3, 5]


def test_attention_of_real_rows_is_bit_identical_whatever_stands_in_the_padding(
    states: RequestStates, buffers: InputBuffers
) -> None:
    states.add(new_request("a", [1, 2, 3], [4]), 2)
    states.add(new_request("b", [5, 6, 7, 8, 9], [2, 3]), 4)
    step = (scheduled("a", 2, 1), scheduled("b", 4, 1))
    _, inputs = gathered(step, states, buffers, decode_key(4, MAX_MODEL_LEN))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, heads, 64, generator=generator) for heads in (4, 2, 2))
    cache = torch.randn(8, 2, BLOCK_SIZE, 2, 64, generator=generator)
    results = []
    for poison in (0.0, float("nan"), 1e30):
        q[2:], k[2:], v[2:] = poison, poison, poison
        kv_cache, out = cache.clone(), torch.full_like(q, float("nan"))
        kv_cache[[0, 1, 5, 6, 7]] = poison  # blocks that belong to nobody
        before = kv_cache.clone()
        write_and_attend(q, k, v, kv_cache, out, 0.125, *[0, 0.0, None, None], *replace(inputs, backend="torch").flat())
        changed = (kv_cache != before) & ~(kv_cache.isnan() & before.isnan())
        assert set(torch.nonzero(changed.flatten(3).any(-1).any(1))[:, 0].tolist()) == {3, 4}
        results.append(out[:2].clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_rows_are_permanent_and_come_free_again(states: RequestStates) -> None:
    rows = [states.add(new_request(str(i), [i], [i]), 0) for i in range(6)]
    assert sorted(rows) == list(range(6))
    assert states.remove("3") == rows[3]
    assert [states.row(str(i)) for i in (0, 5)] == [rows[0], rows[5]]
    resumed = states.add(new_request("3", [3, 30, 31], [9, 8], num_prompt_tokens=1), 2)
    states.writes.apply()
    states.append_blocks(resumed, (7,))
    states.append_blocks(resumed, (6, 5))
    states.writes.apply()
    assert resumed == rows[3]
    assert (int(states.prefill_len_S[resumed]), int(states.num_computed_S[resumed])) == (3, 2)
    assert states.num_prompt_tokens[resumed] == 1
    assert states.block_table_SB[resumed].tolist() == [9, 8, 7, 6, 5, 0, 0, 0]


def test_sampled_tokens_and_blocks_are_read_by_the_next_step(states: RequestStates, buffers: InputBuffers) -> None:
    row = states.add(new_request("a", [1, 2, 3, 4], [6]), 0)
    states.add(new_request("b", list(range(20)), [1, 2, 3, 4, 5]), 0)
    batch, _ = gathered((scheduled("a", 0, 4), scheduled("b", 0, 7, samples=False)), states, buffers)
    advance(states, buffers, torch.tensor([50, 77]), batch.num_rows, decodes_only=False)
    assert buffers.tokens_KR1[1, :3].tolist() == [1, 50, -1]  # b is in its prompt
    states.append_blocks(row, (2,))
    batch, attention = gathered((scheduled("a", 4, 1), scheduled("b", 7, 1, samples=False)), states, buffers)
    assert batch.request_of_row == ["b", "a"]
    assert buffers.input_ids_T[:2].tolist() == [7, 50]
    assert attention.slot_mapping_T.tolist() == [2 * 4 + 3, 2 * 4]
    advance(states, buffers, torch.tensor([78, 51]), batch.num_rows, decodes_only=True)
    advance(states, buffers, torch.tensor([79, 52]), batch.num_rows, decodes_only=True, again=True)
    assert buffers.tokens_KR1[2:4, :3].tolist() == [[2, -1, 51], [3, -1, 52]]
    assert states.num_computed_S[:].tolist().count(8) == 1
    gathered((scheduled("a", 5, 1),), states, buffers)
    assert buffers.input_ids_T[0] == 52


def test_tokens_come_back_in_the_order_of_the_step(states: RequestStates, buffers: InputBuffers) -> None:
    for request_id, known, blocks in (("a", 3, [0]), ("b", 8, [1, 2]), ("c", 5, [3, 4])):
        states.add(new_request(request_id, list(range(known)), blocks), known - 1)
    step = (scheduled("a", 2, 1), scheduled("b", 6, 1, samples=False), scheduled("c", 4, 1))
    batch, _ = gathered(step, states, buffers)
    assert batch.request_of_row == ["b", "c", "a"]
    assert batch.samples.tolist() == [False, True, True]
    assert batch.num_computed.tolist() == [6, 4, 2]
    ring = TokenRing(buffers, torch.device("cpu"), StepClock(torch.device("cpu")))
    ring.catch_up()
    advance(states, buffers, torch.tensor([71, 72, 73]), batch.num_rows, decodes_only=True)
    ring.launched()
    step_of_three = ring.pending_step(batch, None, {})
    assert step_of_three.result().token_ids == [73, 72]

    # A step that failed after it was launched: the host may not know of it, the device does.
    advance(states, buffers, torch.tensor([81, 82, 83]), batch.num_rows, decodes_only=True, again=True)
    ring.lose_count()
    ring.catch_up()
    advance(states, buffers, torch.tensor([91, 92, 93]), batch.num_rows, decodes_only=True, again=True)
    ring.launched()
    assert ring.pending_step(batch, None, {}).result().token_ids == [93, 92]

    for _ in range(RING):
        advance(states, buffers, torch.tensor([0, 0, 0]), batch.num_rows, decodes_only=True, again=True)
    with pytest.raises(RuntimeError, match=f"the tokens of step 1 were overwritten by step {1 + RING}"):
        step_of_three.result()


def test_numbers_of_steps_begin_again(states: RequestStates, buffers: InputBuffers) -> None:
    """A server may take more steps than an integer of 32 bits can count."""
    states.add(new_request("a", [0, 1, 2], [0]), 2)
    batch, _ = gathered((scheduled("a", 2, 1),), states, buffers)
    buffers.num_steps_1.fill_(LAST_NUMBER - 2)
    ring = TokenRing(buffers, torch.device("cpu"), StepClock(torch.device("cpu")))
    ring.catch_up()
    for token_id in range(70, 75):
        advance(states, buffers, torch.tensor([token_id]), batch.num_rows, decodes_only=True, again=token_id > 70)
        ring.launched()
        assert ring.pending_step(batch, None, {}).result().token_ids == [token_id]
    assert buffers.num_steps_1.tolist() == [2]


def test_a_steady_batch_of_decodes_stages_nothing(states: RequestStates, buffers: InputBuffers) -> None:
    states.add(new_request("a", [1, 2, 3], [4, 5]), 2)
    make_batch(step_of(scheduled("a", 2, 1)), states, buffers, decode_key(2, MAX_MODEL_LEN))
    states.writes.apply()
    staged = (buffers.rows_R, buffers.query_start_loc_R1, states.num_computed_S, states.block_table_SB)
    for tensor in staged:
        tensor.fill_(77)
    make_batch(step_of(scheduled("a", 3, 1)), states, buffers, decode_key(2, MAX_MODEL_LEN))
    states.writes.apply()
    assert all((tensor == 77).all() for tensor in staged)
    make_batch(step_of(scheduled("a", 3, 1)), states, buffers, None)
    states.writes.apply()
    assert any((tensor != 77).any() for tensor in staged)


def test_decodes_are_staged_anew_when_anything_of_them_is_new(states: RequestStates, buffers: InputBuffers) -> None:
    """Other rows, another batch in between, some of the requests, a step that did not come to the device."""
    key = decode_key(3, MAX_MODEL_LEN)

    def add(*tokens: tuple[str, int]) -> None:
        for request_id, token in tokens:
            states.add(new_request(request_id, [1, token], [ord(request_id) - ord("a")]), 1)

    def input_ids(*request_ids: str) -> list[int]:
        gathered(tuple(scheduled(i, 1, 1) for i in request_ids), states, buffers, key)
        return buffers.input_ids_T[:3].tolist()

    add(("a", 50), ("b", 60))
    assert input_ids("a", "b") == [50, 60, 0]
    states.remove("a")
    states.remove("b")
    add(("a", 51), ("b", 61))
    assert input_ids("a", "b") == [51, 61, 0]
    assert input_ids("b") == [61, 0, 0]
    assert input_ids("a") == [51, 0, 0]
    assert input_ids("a", "b") == [51, 61, 0]
    gathered((scheduled("b", 0, 2), scheduled("a", 0, 2)), states, buffers)
    assert input_ids("a", "b") == [51, 61, 0]
    make_batch(step_of(scheduled("b", 1, 1), scheduled("a", 1, 1)), states, buffers, key)
    states.writes.discard()
    buffers.forget_staged()
    assert input_ids("b", "a") == [61, 51, 0]


@pytest.mark.parametrize("known", [True, False])
def test_a_prompt_that_ends_with_one_token_has_no_drafts(known: bool) -> None:
    """Its share is as large as that of a request that has sampled, and one token of it is computed."""
    states = RequestStates(6, MAX_MODEL_LEN, BLOCK_SIZE, torch.device("cpu"), num_ahead=3)
    states.add(new_request("ends", [1, 2, 3, 4, 5], [0, 1]), 4)
    rows = StepRows.of(step_of(scheduled("ends", 4, 4)), states, known=known, query_lens=(1, 4))
    assert (rows.offset_A.tolist(), rows.lens_A.tolist(), rows.exists_A.tolist()) == ([0], [1], [True])


def test_a_batch_with_drafts_that_did_not_reach_the_device_is_staged_again() -> None:
    states = RequestStates(6, MAX_MODEL_LEN, BLOCK_SIZE, torch.device("cpu"), num_ahead=3)
    blocks = states.block_table_SB.shape[1]
    buffers = InputBuffers(64, 25, blocks, states.writes, torch.device("cpu"), has_offsets=True)
    row = states.add(new_request("r", [1, 2, 3], [0, 1]), 0)
    states.writes.apply()
    step = step_of(scheduled("r", 0, 3))
    buffers.rows_R[:] = -5
    make_drafted_batch(step, states, buffers, StepRows.of(step, states, known=True, query_lens=(1, 4)))
    states.writes.discard()
    buffers.forget_staged()
    make_drafted_batch(step, states, buffers, StepRows.of(step, states, known=True, query_lens=(1, 4)))
    states.writes.apply()
    assert buffers.rows_R[0] == row
    assert buffers.query_start_loc_R1[:2].tolist() == [0, 3]


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_are_taken_over_are_those_that_would_be_made(seed: int) -> None:
    """Between steps with drafts there are others, failures, and requests that go or have fewer drafts."""
    generator = random.Random(seed)
    states = RequestStates(6, MAX_MODEL_LEN, BLOCK_SIZE, torch.device("cpu"), num_ahead=3)
    blocks = states.block_table_SB.shape[1]
    buffers = InputBuffers(64, 25, blocks, states.writes, torch.device("cpu"), has_offsets=True)
    steps, drafting = DraftedSteps(states, buffers, (1, 2, 4), known=False), DraftingSteps(states)
    computed = dict.fromkeys("abcd", 3)
    for request_id in computed:
        states.add(new_request(request_id, [1, 2, 3, 4], [0, 1]), 3)
    names, counts, taken_over = [*computed], [1, 1, 1, 1], 0
    for number in range(60):
        happens = generator.randrange(12)
        if happens == 0:
            counts = [generator.randint(1, 4) for _ in names]
        elif happens == 1:
            name = generator.choice(names)
            states.remove(name)
            states.add(new_request(name, [1, 2, 3, 4], [0, 1]), 3)
            computed[name] = 3
            counts = [1 if computed[each] == 3 else count for each, count in zip(names, counts, strict=True)]
        elif happens == 2:
            make_batch(step_of(scheduled(names[0], computed[names[0]], 1)), states, buffers, decode_key(2, 32))
        elif happens == 3:
            generator.shuffle(names)
            counts = [1 if computed[name] == 3 else 4 for name in names]
        step = step_of(*(scheduled(n, computed[n], count) for n, count in zip(names, counts, strict=True)))
        before = steps.rows(step) if number else None
        rows = steps.rows(step)
        taken_over += rows is before
        in_parts = GraphKey(GraphKind.PIECEWISE, 24)  # attention is not captured: its bound follows the contexts
        key = generator.choice([None, in_parts, decode_key(5, MAX_MODEL_LEN, query_len=rows.query_len or 1)])
        batch = steps.make_batch(step, rows, key)
        if generator.random() < 0.2:  # the step fails
            states.writes.discard()
            buffers.forget_staged()
            batch = steps.make_batch(step, steps.rows(step), key)
        states.writes.apply()
        own = InputBuffers(64, 25, blocks, states.writes, torch.device("cpu"), has_offsets=True)
        fresh = StepRows.of(step, states, known=False, query_lens=(1, 2, 4))
        expected = make_drafted_batch(step, states, own, fresh, key)
        states.writes.apply()
        assert _by_request(batch, buffers) == _by_request(expected, own)
        assert (batch.host, batch.num_rows, batch.padded_tokens) == (
            expected.host,
            expected.num_rows,
            expected.padded_tokens,
        )
        assert isinstance(batch.combine, DraftedRows)
        assert [batch.request_of_row[i] for i in batch.combine.places[batch.combine.starts].tolist()] == names
        found, made = drafting.rows(step), DraftingRows.of(step, states)
        assert dict(zip(found.rows_R.tolist(), found.room_R.tolist(), strict=True)) == dict(
            zip(made.rows_R.tolist(), made.room_R.tolist(), strict=True)
        )
        assert (found.num_drafting, found.longest(step)) == (made.num_drafting, made.longest(step))
        for name, count in zip(names, counts, strict=True):
            computed[name] = min(computed[name] + generator.randint(1, count), MAX_MODEL_LEN - 6)
    assert taken_over > 10


def _by_request(batch: InputBatch, buffers: InputBuffers) -> list[tuple[Any, ...]]:
    """The rows of a batch, and what the device has of each, in an order that does not depend on the batch's."""
    rows_R, offsets_R = buffers.rows_R[: batch.num_rows].tolist(), buffers.offsets_R
    assert offsets_R is not None
    starts = buffers.query_start_loc_R1[: batch.num_rows + 1]
    real = zip(
        batch.request_of_row,
        batch.rows.tolist(),
        rows_R,
        offsets_R.tolist(),
        starts.diff().tolist(),
        batch.step_starts,
        batch.samples.tolist(),
        strict=False,
    )
    count = len(batch.request_of_row)
    padding = zip(rows_R[count:], offsets_R[count : batch.num_rows].tolist(), starts[count:].tolist(), strict=False)
    return [*sorted(real), *padding]
