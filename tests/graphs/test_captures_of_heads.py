"""The graphs of an engine with drafts: which there are, how many, and that the report lists them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from compiled_engine.attention.backends.decode_splits import contexts_of_drafts, short_contexts_of, short_splits
from compiled_engine.config import GraphConfig, GraphMode, SchedulerConfig, draft_lengths, json_value
from compiled_engine.features.speculation.graph_keys import StepKeys, head_keys, model_keys, prefill_head_keys
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher, GraphKey, KeyField
from compiled_engine.graphs.inspection.report import make_report
from compiled_engine.resolve.cuda_graphs import default_capture_sizes, graphs_of_head

SHORT = ((2, 50), (2, 90))
GRAPH = GraphConfig(GraphMode.FULL, (1, 2, 8), (4, 16), SHORT, SHORT[1:])
SCHEDULER = SchedulerConfig(8, 32, 128, "fcfs")
HOPPER_SMS = 132


def captures(
    graph: GraphConfig, scheduler: SchedulerConfig, *, adapts: bool, draft: GraphConfig | None, head: bool
) -> list[str]:
    """The names of the graphs in the report."""
    aux_layers = (2, 4, 6) if head else ()
    speculation = {
        "num_tokens": 3,
        "adapts": adapts,
        "aux_layers": aux_layers,
        "draft": draft and {"graph": json_value(draft)},
    }
    config: dict[str, Any] = {
        "device": "cuda",
        "graph": json_value(graph),
        "scheduler": json_value(scheduler),
        "speculation": json_value(speculation),
    }
    found = make_report(config, None, []).data["captures"]
    names = [f"{capture['kind']} {capture['size']}" for capture in found]
    assert len(set(names)) == len(names)
    return names


def test_the_captures_of_a_head() -> None:
    """It follows each step that it reads; contexts of any length have the same graph of it."""
    found = captures(GRAPH, SCHEDULER, adapts=False, draft=graphs_of_head((1, 2, 8)), head=True)
    assert found == [
        *("decode 1", "decode 2", "decode 8", "verify-4 4", "verify-4 8", "verify-4 32"),
        *("short-50 2", "short-90 2", "verify-4-short-90 8", "full 4", "full 16"),
        *("draft-3 1", "draft-3 2", "draft-3 8"),
        *("follow-decode 1", "follow-decode 2", "follow-decode 8"),
        *("follow-verify-4 4", "follow-verify-4 8", "follow-verify-4 32"),
    ]


def test_the_captures_of_a_head_that_may_rest() -> None:
    """Its graphs without drafts are those of an engine without a head."""
    found = captures(GRAPH, SCHEDULER, adapts=True, draft=graphs_of_head((1, 2, 8)), head=True)
    assert found == [
        *("plain-decode 1", "plain-decode 2", "plain-decode 8"),
        *("verify-2 2", "verify-2 4", "verify-2 16", "verify-4 4", "verify-4 8", "verify-4 32"),
        *("plain-short-50 2", "plain-short-90 2", "verify-2-short-90 4", "verify-4-short-90 8", "full 4", "full 16"),
        *("decode 1", "decode 2", "decode 8"),
        *("draft-1 1", "draft-1 2", "draft-1 8", "draft-3 1", "draft-3 2", "draft-3 8"),
        *("follow-decode 1", "follow-decode 2", "follow-decode 8"),
        *("follow-verify-2 2", "follow-verify-2 4", "follow-verify-2 16"),
        *("follow-verify-4 4", "follow-verify-4 8", "follow-verify-4 32"),
    ]


def test_rare_numbers_of_queries_have_graphs_of_few_sizes() -> None:
    """With their short contexts; the largest size that a step has room for is among them."""
    sizes, short = default_capture_sizes(256), ((1, 256), (24, 512), (32, 512))
    graph, scheduler = GraphConfig(GraphMode.FULL, sizes, (), short, short), SchedulerConfig(256, 200, 4096, "fcfs")
    few = Dispatcher(graph, scheduler, query_lens=(2, 4), rare=(1, 2))
    all_sizes = Dispatcher(graph, scheduler, query_lens=(2, 4))
    found = {
        query_len: [key.num_rows // query_len for key in few.decode_keys if key.max_query_len == query_len]
        for query_len in (1, 2)
    }
    assert found == {1: [1, 2, 4, 8, 16, 32, 64, 128, 256], 2: [1, 2, 4, 8, 16, 32, 64, 96]}
    names = {
        (count, query_len): key.name
        for count in (20, 70, 96)
        for query_len in (1, 2)
        if (key := dispatched(few, count, query_len))
    }
    assert names == {
        **{(20, 1): "short-512 32", (20, 2): "verify-2-short-512 64"},
        **{(70, 1): "decode 128", (70, 2): "verify-2 192", (96, 1): "decode 128", (96, 2): "verify-2 192"},
    }
    for count in range(1, 51):
        assert dispatched(few, count, 4) == dispatched(all_sizes, count, 4)
        for query_len in (1, 2):
            key, exact = dispatched(few, count, query_len), dispatched(all_sizes, count, query_len)
            assert key is not None
            assert exact is not None
            assert exact.num_tokens <= key.num_tokens
            assert exact.max_seq_len <= key.max_seq_len


@pytest.mark.parametrize("most_tokens", [256, 8192])
def test_rare_numbers_of_queries_have_graphs_for_as_many_requests(most_tokens: int) -> None:
    for num_drafts in range(1, 17):
        query_lens = tuple(1 + length for length in draft_lengths(num_drafts) if length)
        for most in (1, 3, 16, 24, 40, 48, 72, 80, 100, 256):
            graph = GraphConfig(GraphMode.FULL_AND_PIECEWISE, default_capture_sizes(most), (), (), ())
            scheduler = SchedulerConfig(most, most_tokens, 4096, "fcfs")
            few = Dispatcher(graph, scheduler, query_lens=query_lens, rare=(1, *query_lens))
            every = Dispatcher(graph, scheduler, query_lens=query_lens)
            for number, count in product((1, *query_lens), range(1, most + 1)):
                assert (dispatched(few, count, number) is None) == (dispatched(every, count, number) is None)


def dispatched(dispatcher: Dispatcher, num_requests: int, query_len: int) -> GraphKey | None:
    return dispatcher.dispatch(num_requests * query_len, num_requests, query_len, 300)


@pytest.mark.parametrize("num_requests", [1, 2, 3, 8, 16, 24, 40, 72])
def test_verifications_that_launch_the_same_share_a_graph(num_requests: int) -> None:
    """Without a tile for all keys the kernel differs by its splits alone: each context has a graph with its own."""
    contexts = short_contexts_of(num_requests, 8, HOPPER_SMS)
    kept = contexts_of_drafts(num_requests, contexts, in_one_tile=False)
    for longest in range(1, 20_000, 63):
        bound = next((context for context in kept if longest <= context), None)
        expected = next((context for context in contexts if longest <= context), None)
        found = {short_splits(num_requests, each, contexts) for each in (bound, expected) if each is not None}
        assert (bound is None) == (expected is None)
        assert len(found) <= 1


def test_each_number_of_drafts_has_its_graphs() -> None:
    dispatcher = Dispatcher(GRAPH, SCHEDULER, query_lens=(2, 3, 4))
    names = {}
    for query_len in (1, 2, 3, 4, 5):
        key = dispatcher.dispatch(2 * query_len, 2, query_len, 100)
        names[query_len] = None if key is None else key.name
    assert names == {1: "decode 2", 2: "verify-2 4", 3: "verify-3 6", 4: "verify-4 8", 5: "full 16"}


def test_a_head_drafts_in_graphs_of_few_sizes() -> None:
    """Up to 256 rows those that powers of two are padded to."""
    assert graphs_of_head(default_capture_sizes(256)).decode_sizes == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert graphs_of_head(default_capture_sizes(70)).decode_sizes == (1, 2, 4, 8, 16, 32, 64, 70)
    assert graphs_of_head(default_capture_sizes(320)).decode_sizes[-4:] == (128, 256, 288, 320)
    assert graphs_of_head((3, 6, 12)).decode_sizes == (3, 6, 12)


def test_steps_that_a_head_reads_have_fewer_graphs_without_drafts() -> None:
    """Padded to a size of the head, for contexts of any length; those at which it rests are as without a head."""
    dispatcher = Dispatcher(GRAPH, SCHEDULER, query_lens=(2, 4))
    steps = StepKeys.of(dispatcher.keys, 128, (2, 8))
    found = {key.name: (steps.unread[key].name, steps.read[key].name) for key in dispatcher.keys}
    assert {name: keys for name, keys in found.items() if keys != (name, name)} == {
        **{"decode 1": ("plain-decode 1", "decode 2"), "decode 2": ("plain-decode 2", "decode 2")},
        **{"decode 8": ("plain-decode 8", "decode 8"), "short-50 2": ("plain-short-50 2", "decode 2")},
        "short-90 2": ("plain-short-90 2", "decode 2"),
    }
    assert StepKeys.of(dispatcher.keys, 128).captured == dispatcher.keys
    in_all_sizes = StepKeys.of(dispatcher.keys, 128, ())  # attention of the head cannot be captured
    assert [key.name for key in set(in_all_sizes.captured) - set(steps.captured)] == ["decode 1"]


def launched_with(key: GraphKey) -> tuple[object, ...]:
    """The values that a step brings along, but for its size and its context."""
    return key.kind, key.max_query_len, key.num_decodes > 0, key.extra


@pytest.mark.parametrize("sizes_read", [None, (2, 8), ()])
def test_a_step_has_a_graph_that_holds_it_and_its_fields(sizes_read: tuple[int, ...] | None) -> None:
    """With adapters of each rank as without, at rest or read by the head; followed by one graph for all ranks."""
    dispatcher = Dispatcher(GRAPH, SCHEDULER, [KeyField("rank", (8, 16))], query_lens=(2, 4))
    steps = StepKeys.of(dispatcher.keys, 128, sizes_read)
    assert len({key.name for key in steps.captured}) == len(steps.captured)
    assert {key.extra for key in steps.captured} == {(), (("rank", 8),), (("rank", 16),)}
    for key in dispatcher.keys:
        for found in (steps.unread[key], steps.read[key]):
            assert launched_with(found) == launched_with(key)
            assert found.num_tokens >= key.num_tokens
            assert found.max_seq_len >= key.max_seq_len
    prefills = prefill_head_keys(steps.read.values(), 128)
    assert prefills.keys() == {key for key in steps.read.values() if key.is_decode}
    assert {key.extra for key in prefills.values()} == {()}
    for key, found in prefills.items():
        assert (found.num_tokens, found.max_query_len, found.max_seq_len) == (key.num_tokens, key.max_query_len, 128)


@pytest.mark.parametrize("keys_of", [model_keys, head_keys])
def test_passes_that_draft_have_a_graph_for_each_size_context_and_number_of_drafts(keys_of: Any) -> None:
    """Those of a draft model begin with two tokens of each request, a head's with one."""
    query_len = 2 if keys_of is model_keys else 1
    graph = GraphConfig(GraphMode.FULL_DECODE_ONLY, (1, 2, 8), short_decodes=SHORT, short_verified=SHORT)
    dispatcher = Dispatcher(graph, SCHEDULER, query_lens=(2,) if query_len == 2 else ())
    keys = keys_of(dispatcher, (0, 1, 3))
    found = {(drafts, key.num_tokens // query_len, key.max_seq_len) for key, drafts in keys.items()}
    shapes = [(1, 128), (2, 128), (8, 128), *SHORT]
    assert found == {(drafts, *shape) for drafts in (1, 3) for shape in shapes}
    assert {key.max_query_len for key in keys} == {query_len}
    assert len({key.name for key in keys}) == len(keys) == len(found)
