"""Graph keys: their names, fields and order; and what the engine counts about its graphs."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from compiled_engine.config import GraphConfig, GraphMode, SchedulerConfig
from compiled_engine.features.speculation.graph_keys import drafting, head_keys, model_keys, prefill_head_keys
from compiled_engine.graphs.cuda_graphs.dispatcher import (
    Dispatcher,
    GraphKey,
    GraphKind,
    KeyField,
    decode_key,
    mixed_key,
)
from compiled_engine.graphs.cuda_graphs.manager import Fallback, GraphCounters

OTHER: dict[str, Any] = {
    "kind": GraphKind.BREAKABLE,
    "num_tokens": 9,
    "num_rows": 9,
    "num_decodes": 9,
    "max_query_len": 9,
    "max_seq_len": 9,
    "short": True,
    "without_offsets": True,
    "purpose": "draft-9",
    "extra": (("rank", 16),),
}

READ = [decode_key(8, 256, short=True, query_len=4), decode_key(8, 256, short=True)]
FOLLOWING = prefill_head_keys(READ, 4096).values()


@pytest.mark.parametrize("field", GraphKey._fields)
def test_keys_that_differ_in_any_value_are_different_keys(field: str) -> None:
    key = decode_key(8, 4096)
    other = key._replace(**{field: OTHER[field]})
    assert {key: "one", other: "other"} == {decode_key(8, 4096): "one", other._replace(): "other"}
    assert hash(other._replace()) == hash(other)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (decode_key(8, 4096), "decode 8"),
        (decode_key(8, 256, short=True), "short-256 8"),
        (decode_key(8, 4096, query_len=4), "verify-4 32"),
        (decode_key(8, 256, short=True, query_len=4), "verify-4-short-256 32"),
        (drafting(decode_key(16, 4096), 3), "draft-3 16"),
        (drafting(decode_key(16, 256, short=True), 3), "draft-3-short-256 16"),
        (drafting(decode_key(8, 4096, query_len=2), 3), "draft-3 16"),
        *((key, name) for key, name in zip(FOLLOWING, ("follow-verify-4 32", "follow-decode 8"), strict=True)),
        (decode_key(8, 4096)._replace(without_offsets=True), "plain-decode 8"),
        (decode_key(8, 256, short=True)._replace(without_offsets=True), "plain-short-256 8"),
        (mixed_key(512, 8, 4096), "full 512"),
        (drafting(mixed_key(512, 8, 4096), 3), "draft-3 512"),
        (GraphKey(GraphKind.FULL, 1024, 17, purpose="tower"), "tower 1024"),
        (GraphKey(GraphKind.PIECEWISE, 512), "piecewise 512"),
        (GraphKey(GraphKind.BREAKABLE, 512), "breakable 512"),
        (decode_key(8, 4096)._replace(extra=(("rank", 16), ("pictures", 2))), "decode 8 rank 16 pictures 2"),
    ],
)
def test_names(key: GraphKey, name: str) -> None:
    assert key.name == name


def test_what_attention_is_launched_with_is_in_the_key_where_it_is_captured() -> None:
    """A decode has a row for each request, a verification one for each query; a mixed batch a row for its padding."""
    values = ("kind", "num_tokens", "num_rows", "num_decodes", "max_query_len", "max_seq_len", "short")

    def of(key: GraphKey) -> tuple[Any, ...]:
        assert (key.without_offsets, key.purpose, key.extra) == (False, "", ())
        return tuple(getattr(key, value) for value in values)

    assert of(decode_key(8, 4096)) == (GraphKind.FULL, 8, 8, 8, 1, 4096, False)
    assert of(decode_key(8, 64, short=True)) == (GraphKind.FULL, 8, 8, 8, 1, 64, True)
    assert of(decode_key(8, 4096, query_len=4)) == (GraphKind.FULL, 32, 32, 32, 4, 4096, False)
    assert of(decode_key(8, 64, short=True, query_len=4)) == (GraphKind.FULL, 32, 32, 32, 4, 64, True)
    assert of(mixed_key(512, 8, 4096)) == (GraphKind.FULL, 512, 9, 0, 512, 4096, False)
    assert of(mixed_key(4, 8, 4096)) == (GraphKind.FULL, 4, 5, 0, 4, 4096, False)
    # Attention around the graphs is launched with its own batch.
    assert of(GraphKey(GraphKind.PIECEWISE, 512)) == (GraphKind.PIECEWISE, 512, 0, 0, 0, 0, False)
    assert [key.is_decode for key in (decode_key(1, 9), decode_key(1, 9, query_len=2), mixed_key(4, 1, 9))] == [
        True,
        True,
        False,
    ]


def test_a_field_is_rounded_up_and_nothing_is_nothing() -> None:
    field = KeyField("rank", (16, 8))
    assert {value: field.size_for(value) for value in (0, 1, 8, 9, 16, 17)} == {
        **{0: 0, 1: 8, 8: 8},
        **{9: 16, 16: 16, 17: None},
    }


@pytest.mark.parametrize(("query_lens", "num_rows"), [((), 5), ((4,), 17), ((2, 4), 17)])
def test_a_mixed_graph_has_rows_for_all_queries_of_drafts(query_lens: tuple[int, ...], num_rows: int) -> None:
    graph = GraphConfig(GraphMode.FULL, (4,), (64,))
    (key,) = Dispatcher(graph, SchedulerConfig(4, 64, 4096, "fcfs"), query_lens=query_lens).token_keys
    assert key.num_rows == num_rows


@pytest.mark.parametrize("keys_of", [model_keys, head_keys])
def test_passes_that_draft_are_captured_for_decodes_alone(keys_of: Any) -> None:
    """Though a mixed graph of two tokens has as long a query as the first pass of a draft model."""
    scheduler = SchedulerConfig(8, 64, 128, "fcfs")
    mixed = Dispatcher(GraphConfig(GraphMode.FULL, (), (1, 2, 16)), scheduler, query_lens=(2,))
    assert mixed.keys
    assert not keys_of(mixed, (0, 1, 3))
    both = Dispatcher(GraphConfig(GraphMode.FULL, (1, 2), (1, 2, 16)), scheduler, query_lens=(2,))
    assert keys_of(both, (3,))
    assert {key.is_decode for key in keys_of(both, (3,))} == {True}


BATCHES = [(n * q, n, q, longest) for n in (1, 2, 3, 5, 8) for q in (1, 2, 4) for longest in (40, 50, 60, 101)]


def test_the_order_of_sizes_is_of_no_account_with_drafts() -> None:
    """Nor that of the contexts for which there are short graphs."""
    short = ((2, 50), (2, 100), (8, 50), (8, 100))
    ordered = GraphConfig(GraphMode.FULL, (1, 2, 8), (16, 64), short, short)
    turned = GraphConfig(GraphMode.FULL, (8, 2, 1), (64, 16), short[::-1], short[::-1])
    found, expected = (
        Dispatcher(graph, SchedulerConfig(8, 64, 128, "fcfs"), query_lens=(2, 4)) for graph in (turned, ordered)
    )
    assert found.keys == expected.keys
    for batch in BATCHES:
        key = found.dispatch(*batch)
        assert key == expected.dispatch(*batch)
        assert key is not None
        assert key.num_tokens >= batch[0]
        assert key.max_seq_len >= batch[3]


def test_drafts_are_verified_in_graphs_that_a_step_has_room_for() -> None:
    """With all their queries; up to the very number of tokens of a step."""
    graph = GraphConfig(GraphMode.FULL, (1, 4, 8), (), ((8, 50),), ((4, 50), (8, 50)))
    names = {
        limit: [key.name for key in Dispatcher(graph, SchedulerConfig(8, limit, 128, "fcfs"), query_lens=(4,)).keys[3:]]
        for limit in (15, 16, 31, 32)
    }
    assert names == {
        15: ["verify-4 4", "short-50 8"],
        16: ["verify-4 4", "verify-4 16", "short-50 8", "verify-4-short-50 16"],
        31: ["verify-4 4", "verify-4 16", "short-50 8", "verify-4-short-50 16"],
        32: [
            *("verify-4 4", "verify-4 16", "verify-4 32", "short-50 8"),
            *("verify-4-short-50 16", "verify-4-short-50 32"),
        ],
    }


# Counters


def counters(mode: GraphMode = GraphMode.FULL, decodes: tuple[int, ...] = (4,), tokens: tuple[int, ...] = (16,)) -> Any:
    graph = GraphConfig(mode, decodes, tokens)
    return GraphCounters(Dispatcher(graph, SchedulerConfig(8, 64, 4096, "fcfs")))


def test_a_new_count_is_empty() -> None:
    assert counters().metrics() == {
        "graph_replays": 0,
        "graph_replays_by_key": {},
        "graph_padded_tokens": 0,
        "graph_fallbacks": 0,
        "graph_fallbacks_by_reason": {},
        "batch_histogram": {"decodes": {}, "mixed": {}},
    }


def test_replays_are_counted_by_key_and_padding_by_token() -> None:
    counted = counters()
    for key, num_tokens in ((decode_key(4, 4096), 3), (decode_key(4, 4096), 4), (mixed_key(16, 8, 4096), 10)):
        counted.replay(key, num_tokens)
    found = counted.metrics()
    assert found["graph_replays"] == 3
    assert found["graph_replays_by_key"] == {"decode 4": 2, "full 16": 1}
    assert found["graph_padded_tokens"] == 1 + 0 + 6
    assert found["graph_fallbacks"] == 0


def test_batches_are_counted_by_size_decodes_apart() -> None:
    counted = counters()
    for num_tokens, decodes_only in ((3, True), (3, True), (4, True), (3, False), (20, False)):
        counted.batch(num_tokens, decodes_only)
    assert counted.metrics()["batch_histogram"] == {"decodes": {3: 2, 4: 1}, "mixed": {3: 1, 20: 1}}


NO_SUCH = Fallback.NO_SUCH_GRAPH
LARGE, DECODES_LARGE = Fallback.TOO_LARGE, Fallback.DECODES_TOO_LARGE


@pytest.mark.parametrize(
    ("mode", "sizes", "decodes_only", "reason"),
    [
        (GraphMode.FULL, ((4,), (16,)), True, DECODES_LARGE),
        (GraphMode.FULL, ((4,), (16,)), False, LARGE),
        (GraphMode.FULL_DECODE_ONLY, ((4,), ()), True, DECODES_LARGE),
        (GraphMode.FULL_DECODE_ONLY, ((4,), ()), False, NO_SUCH),
        (GraphMode.PIECEWISE, ((), (16,)), True, DECODES_LARGE),
        (GraphMode.PIECEWISE, ((), (16,)), False, LARGE),
        (GraphMode.NONE, ((), ()), True, None),
        (GraphMode.NONE, ((), ()), False, None),
    ],
)
def test_why_a_batch_has_no_graph(
    mode: GraphMode, sizes: tuple[tuple[int, ...], tuple[int, ...]], decodes_only: bool, reason: Fallback | None
) -> None:
    """An engine without graphs does not miss one."""
    counted = counters(mode, *sizes)
    counted.no_key(20, decodes_only)
    found = counted.metrics()
    assert found["graph_fallbacks_by_reason"] == ({} if reason is None else {reason.value: 1})
    assert found["graph_fallbacks"] == (0 if reason is None else 1)
    counted.no_key(20, decodes_only, "images")
    if reason is not None:
        assert counted.metrics()["graph_fallbacks_by_reason"][Fallback.NO_VARIANT.value] == 1


def test_the_first_batch_of_decodes_without_a_graph_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Others have to be expected: prompts are longer than the largest graph, and some need what graphs do not keep."""
    counted = counters()
    with caplog.at_level(logging.WARNING, "compiled_engine"):
        counted.no_key(100, decodes_only=False)
        counted.fallback(Fallback.HIDDEN_STATES, "7 tokens")
        assert caplog.messages == []
        counted.no_key(7, decodes_only=True)
        counted.no_key(8, decodes_only=True)
    (message,) = caplog.messages
    assert message.endswith("more decodes than every captured size (7 decodes)")
    assert counted.metrics()["graph_fallbacks_by_reason"] == {
        LARGE.value: 1,
        Fallback.HIDDEN_STATES.value: 1,
        DECODES_LARGE.value: 2,
    }
