"""The contents of a step's tensors, and the launches that follow from them, as plain data on a CPU."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from compiled_engine.attention.backends.coded_decode import coded_plan
from compiled_engine.attention.backends.decode_splits import (
    LONG_SPLIT,
    MAX_SPLITS,
    BatchFacts,
    contexts_of_drafts,
    few_short_contexts,
)
from compiled_engine.attention.backends.work_list import HEADER, WorkLayout
from compiled_engine.attention.case import AttentionCase, KVFormat, Refused
from compiled_engine.attention.inputs import (
    ANGLE_LENGTHS,
    STEP_TENSORS,
    AttentionInputs,
    Rotation,
    StepTensor,
    addresses,
    arguments_of,
    attention_inputs_of,
    inputs_of,
    kv_cache_tensors,
    padding_of,
    request_of_tokens,
    step_of,
    tensors_of_model,
    without_inputs,
)

CPU = torch.device("cpu")
H200_SMS = 132


def example_step() -> dict[str, torch.Tensor]:
    """A decode at position 4, and prompts of 3 and 2 tokens, in blocks of 4."""
    other = StepTensor("other_T", ("tokens", 2), torch.float32, padding=0.5)
    spans = [range(4, 5), range(3), range(2, 4)]
    return step_of([9, 5, 6, 7, 2, 3], spans, [[3, 1], [2, 0], [5, 0]], 4, CPU, [other])


def test_a_step_names_where_each_token_goes() -> None:
    step = example_step()
    name = "attention_inputs."
    assert step["input_ids_T"].tolist() == [9, 5, 6, 7, 2, 3]
    assert step["positions_T"].tolist() == [4, 0, 1, 2, 2, 3]
    assert step[f"{name}slot_mapping_T"].tolist() == [1 * 4, 8, 9, 10, 22, 23]
    assert step[f"{name}seq_lens_R"].tolist() == [5, 3, 4]
    assert step[f"{name}block_table_RB"].tolist() == [[3, 1], [2, 0], [5, 0]]
    assert step[f"{name}query_start_loc_R1"].tolist() == [0, 1, 4, 6]
    assert step[f"{name}host_3"].tolist() == [1, 3, 5]
    assert step[f"{name}work_W"].numel() == 0
    assert step["other_T"].tolist() == [[0.5, 0.5]] * 6
    assert request_of_tokens(step).tolist() == [0, 1, 1, 1, 2, 2]


def test_tokens_behind_the_last_request_are_padding_of_any() -> None:
    step = example_step()
    for name in ("input_ids_T", "positions_T"):
        step[name] = torch.nn.functional.pad(step[name], (0, 3))
    assert request_of_tokens(step).tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 2]


def test_arguments_of_a_forward_and_their_addresses() -> None:
    step, caches = example_step(), [torch.zeros(2) for _ in range(3)]
    inputs = attention_inputs_of(step, "torch")
    assert inputs.backend == "torch"
    assert inputs.keys_ahead_T is None
    for field in fields(AttentionInputs):
        if field.name not in ("backend", "keys_ahead_T"):
            assert getattr(inputs, field.name) is step[f"attention_inputs.{field.name}"]
    arguments = arguments_of(step, inputs, caches)
    assert arguments[:4] == (step["input_ids_T"], step["positions_T"], inputs, caches)
    assert [each is step["other_T"] for each in arguments[4:]] == [True]
    found = addresses(arguments)
    on_device = [value for name, value in step.items() if name != "attention_inputs.host_3"]
    assert sorted(found) == sorted(tensor.data_ptr() for tensor in (*on_device, caches[0], caches[2]))
    assert addresses(arguments_of(step, replace(inputs, host_3=inputs.host_3.clone()), caches)) == found
    for name in ("slot_mapping_T", "seq_lens_R", "block_table_RB", "query_start_loc_R1"):
        moved = replace(inputs, **{name: getattr(inputs, name).clone()})
        assert addresses(arguments_of(step, moved, caches)) != found


def test_the_inputs_are_the_last_arguments_of_an_op() -> None:
    inputs = attention_inputs_of(example_step(), "cpp")
    arguments: tuple[Any, ...] = (1, "two", *inputs.flat())
    again = inputs_of(arguments)
    assert all(getattr(again, field.name) is getattr(inputs, field.name) for field in fields(AttentionInputs))
    assert without_inputs(arguments) == (1, "two")


def test_padding_has_its_own_values_and_places() -> None:
    sizes = {"tokens": 3, "requests": 2, "blocks_per_request": 4, "work": 0, "request_borders": 3, "blocks": 7}
    step = padding_of((*STEP_TENSORS, *kv_cache_tensors([(9, 2, 4), (9, 3)], torch.bfloat16)), sizes, CPU)
    assert step["attention_inputs.slot_mapping_T"].tolist() == [-1, -1, -1]
    assert not step["attention_inputs.seq_lens_R"].any()
    assert step["attention_inputs.block_table_RB"].shape == (2, 4)
    assert (step["kv_caches.0"].shape, step["kv_caches.1"].shape) == ((7, 2, 4), (7, 3))
    assert step["kv_caches.1"].dtype is torch.bfloat16
    assert [tensor.on_host for tensor in STEP_TENSORS if tensor.name.endswith("host_3")] == [True]
    assert [len(tensors_of_model(count)) for count in (0, 2)] == [0, 1]
    assert tensors_of_model(0, length_angles=True) == (ANGLE_LENGTHS,)


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        *(({}, True), ({"norm_offset": 1.0, "norm_wide": True}, True)),
        *(({"rotary_dim": 8}, False), ({"interleaved": True}, False), ({"wide": True}, False)),
        ({"norm_last": True}, False),
    ],
)
def test_a_rotation_is_plain_whatever_its_norm(change: dict[str, Any], plain: bool) -> None:
    angles = torch.zeros(1, 1, 4)
    assert Rotation(None, None, 1e-6, angles, angles)._replace(**change).is_plain == plain


def batch(num_decodes: int, longest: int, max_seq_len: int, num_requests: int, num_tokens: int) -> AttentionInputs:
    step = example_step()
    inputs = attention_inputs_of(step, "triton")
    return replace(
        inputs,
        host_3=torch.tensor([num_decodes, longest, max_seq_len], dtype=torch.int32),
        seq_lens_R=torch.zeros(num_requests, dtype=torch.int32),
        slot_mapping_T=torch.zeros(num_tokens, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("decodes", "query_len", "requests", "tokens", "listed", "min_keys", "found_query_len"),
    [
        # 132 multiprocessors and 8 K/V heads: decodes alone have a list where programs are more, but not twice as many.
        (16, 1, 16, 16, False, 256, 1),
        (17, 1, 17, 17, True, 256, 1),
        (33, 1, 33, 33, True, 256, 1),
        (34, 1, 34, 34, False, 256, 1),
        # Those with drafts never have one.
        (20, 4, 20, 20, False, 256, 4),
        # Whatever has prompts has a list; splits are short while rows are few.
        (0, 40, 1, 40, True, 128, 1),
        (16, 40, 17, 56, True, 128, 1),
        (100, 40, 128, 400, True, 128, 1),
        (100, 40, 129, 400, True, 256, 1),
    ],
)
def test_facts_of_a_batch(
    decodes: int, query_len: int, requests: int, tokens: int, listed: bool, min_keys: int, found_query_len: int
) -> None:
    facts = BatchFacts.of(batch(decodes, query_len, 900, requests, tokens).sizes, 8, H200_SMS)
    assert facts == BatchFacts(tokens, requests, decodes, 900, listed, min_keys, found_query_len)


@pytest.mark.parametrize(
    ("num_requests", "num_kv_heads", "expected"),
    [(1, 8, (256, 512)), (16, 8, (256, 512)), (17, 4, ()), (16, 9, ()), (12, 11, (256, 512)), (1, 133, ())],
)
def test_codes_of_short_contexts_are_read_by_one_kernel_if_requests_are_few(
    num_requests: int, num_kv_heads: int, expected: tuple[int, ...]
) -> None:
    assert few_short_contexts(num_requests, num_kv_heads, H200_SMS) == expected


@pytest.mark.parametrize(
    ("num_requests", "contexts", "tiled", "split"),
    [
        (2, (256, 512), (256, 512), (256, 512)),
        *((count, (256, 512), (256, 512), (512,)) for count in (3, 16)),
        (2, (), (), ()),
        (17, (512,), (512,), (512,)),
        *((count, (512, 16384), (16384,), (16384,)) for count in (16, 33)),
        (33, (), (), ()),
    ],
)
def test_contexts_that_change_the_launches_of_drafts(
    num_requests: int, contexts: tuple[int, ...], tiled: tuple[int, ...], split: tuple[int, ...]
) -> None:
    """With and without a tile that holds the keys of few requests."""
    assert contexts_of_drafts(num_requests, contexts, in_one_tile=True) == tiled
    assert contexts_of_drafts(num_requests, contexts, in_one_tile=False) == split


@pytest.mark.product(one_in=1000, each=("max_seq_len", "scaled"))
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize("max_seq_len", [1, 32, 256, 257, 512, 513, 5000, 40960, 1 << 20])
def test_splits_of_codes_cover_every_context(num_kv_heads: int, max_seq_len: int, scaled: bool) -> None:
    for num_requests in (1, 2, 3, 16, 17, 66, 67, 400):
        plan = coded_plan(num_requests, num_kv_heads, max_seq_len, H200_SMS, scaled)
        programs = num_requests * num_kv_heads
        assert 1 <= plan.splits.count <= MAX_SPLITS
        assert plan.splits.count == MAX_SPLITS or plan.splits.count * LONG_SPLIT >= max_seq_len
        is_short = programs <= H200_SMS and max_seq_len <= 512
        assert plan.raw_keys != is_short
        if is_short:
            assert plan.splits.count == (16 if num_requests <= 2 and max_seq_len > 256 else 1)
            # All tiles of a context that is not split are under way at once.
            assert plan.splits.count > 1 or (plan.stages - 1) * plan.keys >= max_seq_len
        elif max_seq_len <= LONG_SPLIT:
            assert plan.splits.count == max(1, min(4 * H200_SMS // programs, -(-max_seq_len // 32), MAX_SPLITS))


@pytest.mark.parametrize(("requests", "heads", "queries"), [(1, 1, 1), (3, 2, 4), (5, 8, 16)])
def test_lists_of_work_do_not_overlap(requests: int, heads: int, queries: int) -> None:
    layout = WorkLayout(requests, heads, queries)
    assert layout.arrived == HEADER >= 2
    assert layout.splits - layout.arrived == requests * heads
    assert layout.tiles - layout.splits == requests * 16
    for num_tokens in (1, 7, 40):
        # As many tiles as any division of the tokens among the requests needs.
        most = max(
            -(-first // queries) + -(-(num_tokens - first) // queries) + max(0, requests - 2)
            for first in range(num_tokens + 1)
        )
        assert layout.most_tiles(num_tokens) >= most if requests > 1 else layout.most_tiles(num_tokens) >= 1
        assert layout.length(num_tokens) == layout.tiles + (2 + heads) * layout.most_tiles(num_tokens)


PACKED = AttentionCase("cpu", torch.float32, 4, 2, 64, None, causal=False)


def test_what_is_packed_has_no_cache_and_sees_both_ways() -> None:
    paged = replace(PACKED, cache=KVFormat(torch.float32, 16), causal=True)
    found = [each.packed for each in (PACKED, paged, replace(PACKED, causal=True), replace(paged, causal=False))]
    assert found == [True, False, False, False]
    assert PACKED.group == 2
    assert PACKED.with_block_size(32) == PACKED
    assert paged.with_block_size(32).cache == KVFormat(torch.float32, 32)
    PACKED.require_packed()
    replace(PACKED, value_dim=64).require_packed()
    wrong: tuple[dict[str, Any], ...] = ({"num_heads": 5}, {"value_dim": 32})
    for changes in wrong:
        with pytest.raises(Refused, match=next(iter(changes))):
            replace(PACKED, **changes).require_packed()
