"""The dispatcher, exhaustively: total, minimal, only captured keys, and a full graph whenever one is allowed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compiled_engine.config import GraphConfig, GraphMode, SchedulerConfig
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher, GraphKey, GraphKind, KeyField, prompt_sizes
from compiled_engine.resolve.cuda_graphs import default_capture_sizes, default_token_sizes

MAX_SEQ_LEN = 4096
SIZES = st.lists(st.integers(1, 64), max_size=8, unique=True)
MODES = [mode for mode in GraphMode if mode is not GraphMode.NONE]


def make(
    mode: GraphMode,
    max_num_seqs: int,
    max_tokens: int,
    decodes: list[int] | None = None,
    tokens: list[int] | None = None,
) -> tuple[Dispatcher, GraphConfig]:
    decode_sizes = default_capture_sizes(max_num_seqs) if decodes is None else tuple(decodes)
    token_sizes = default_token_sizes(max_tokens) if tokens is None else tuple(tokens)
    graph = GraphConfig(mode, decode_sizes if mode.captures_decodes else (), token_sizes if mode.captures_mixed else ())
    return Dispatcher(graph, SchedulerConfig(max_num_seqs, 8192, MAX_SEQ_LEN, "fcfs")), graph


def smallest(sizes: tuple[int, ...], needed: int) -> int | None:
    return min((size for size in sizes if size >= needed), default=None)


def test_default_sizes() -> None:
    assert default_capture_sizes(1) == (1,)
    assert default_capture_sizes(7) == (1, 2, 4, 7)
    assert default_capture_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert default_capture_sizes(256)[-6:] == (120, 128, 160, 192, 224, 256)
    assert len(default_capture_sizes(256)) == 23
    assert len(default_capture_sizes(512)) == 31
    assert default_token_sizes(300) == default_capture_sizes(300)
    assert default_token_sizes(700)[-4:] == (480, 512, 640, 700)
    assert default_token_sizes(9000)[-3:] == (7680, 8192, 9000)
    assert default_capture_sizes(300) == (*default_capture_sizes(256), 288, 300)


def test_the_order_of_sizes_is_of_no_account() -> None:
    graph = GraphConfig(GraphMode.FULL, (8, 1), (64, 2), short_decodes=((8, 512), (1, 512), (8, 128)))
    found = Dispatcher(graph, SchedulerConfig(8, 64, MAX_SEQ_LEN, "fcfs"))
    ordered = replace(graph, decode_sizes=(1, 8), token_sizes=(2, 64), short_decodes=((1, 512), (8, 128), (8, 512)))
    expected = Dispatcher(ordered, SchedulerConfig(8, 64, MAX_SEQ_LEN, "fcfs"))
    for batch in ((1, 1, 1, 100), (5, 5, 1, 100), (5, 5, 1, 300), (5, 5, 1, 600), (20, 5, None, 100), (2, 1, 2, 9)):
        assert found.dispatch(*batch) == expected.dispatch(*batch) is not None
    bounds = {
        longest: key and key.max_seq_len for longest in (100, 300, 600) for key in [found.dispatch(5, 5, 1, longest)]
    }
    assert bounds == {100: 128, 300: 512, 600: MAX_SEQ_LEN}


@given(limit=st.integers(1, 1 << 20))
def test_padding_beyond_the_small_sizes_is_a_fifth_at_most(limit: int) -> None:
    sizes = default_token_sizes(limit)
    assert sizes[-1] == limit
    assert all((size - smaller - 1) * 5 <= size for smaller, size in pairwise(sizes) if size > 32)


def expected_size(graph: GraphConfig, tokens: int, requests: int, uniform: int | None) -> tuple[bool, int] | None:
    """(whether a graph of decodes, its size)"""
    decodes = smallest(graph.decode_sizes, tokens) if uniform == 1 and tokens == requests else None
    if decodes is not None:
        return True, decodes
    size = smallest(graph.token_sizes, tokens)
    return None if size is None else (False, size)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("max_num_seqs", "max_tokens"), [(1, 1), (3, 20), (24, 70), (64, 64)])
def test_every_batch_up_to_the_limits_and_beyond(mode: GraphMode, max_num_seqs: int, max_tokens: int) -> None:
    dispatcher, graph = make(mode, max_num_seqs, max_tokens)
    keys = set(dispatcher.keys)
    assert len(keys) == len(graph.decode_sizes) + len(graph.token_sizes)
    assert len({key.name for key in keys}) == len(keys)
    for tokens in range(max_tokens + 10):
        for requests in range(tokens + 2):
            for uniform in {None, 1, 2, tokens // requests if requests else None}:
                key = dispatcher.dispatch(tokens, requests, uniform, MAX_SEQ_LEN)
                expected = expected_size(graph, tokens, requests, uniform)
                if not 1 <= requests <= tokens or expected is None:
                    assert key is None
                    continue
                assert key in keys
                assert (key.is_decode, key.num_tokens) == expected
                assert key.num_tokens >= tokens
                if key.kind is GraphKind.FULL and requests <= max_num_seqs:
                    check_full(key, requests)


def check_full(key: GraphKey, requests: int) -> None:
    """Everything that attention is launched with holds for the batch."""
    padding_rows = 0 if key.is_decode else 1
    assert key.num_rows >= requests + padding_rows
    assert key.max_seq_len == MAX_SEQ_LEN
    assert key.max_query_len == (1 if key.is_decode else key.num_tokens)


@given(
    mode=st.sampled_from(MODES),
    sizes=st.tuples(SIZES, SIZES),
    tokens=st.integers(0, 200),
    requests=st.integers(0, 100),
    uniform=st.sampled_from([None, 1, 2]),
)
@example(mode=GraphMode.FULL, sizes=([8, 4], [64, 32]), tokens=3, requests=3, uniform=1)
@example(mode=GraphMode.FULL, sizes=([8, 4], [64, 32]), tokens=20, requests=3, uniform=None)
def test_any_sizes(
    mode: GraphMode, sizes: tuple[list[int], list[int]], tokens: int, requests: int, uniform: int | None
) -> None:
    """In any order."""
    dispatcher, graph = make(mode, 64, 64, *sizes)
    key = dispatcher.dispatch(tokens, requests, uniform, MAX_SEQ_LEN)
    expected = expected_size(graph, tokens, requests, uniform) if 1 <= requests <= tokens else None
    assert (None if key is None else (key.is_decode, key.num_tokens)) == expected


def test_without_graphs_nothing_is_replayed() -> None:
    dispatcher = Dispatcher(GraphConfig(GraphMode.NONE), SchedulerConfig(8, 64, 64, "fcfs"))
    assert dispatcher.keys == ()
    assert dispatcher.dispatch(1, 1, 1, 1) is None


def test_kinds_by_mode() -> None:
    kinds = {mode: {key.name.split()[0] for key in make(mode, 4, 8)[0].keys} for mode in MODES}
    assert kinds == {
        GraphMode.PIECEWISE: {"piecewise"},
        GraphMode.FULL: {"decode", "full"},
        GraphMode.FULL_DECODE_ONLY: {"decode"},
        GraphMode.FULL_AND_PIECEWISE: {"decode", "piecewise"},
        GraphMode.BREAKABLE: {"breakable"},
        GraphMode.RECORDED: set(),
    }


def test_short_contexts_have_graphs_of_their_own() -> None:
    short = tuple((size, context) for size in (1, 2, 4) for context in (50, 100))
    graph = GraphConfig(GraphMode.FULL, (1, 2, 4, 8), (64,), short_decodes=short)
    dispatcher = Dispatcher(graph, SchedulerConfig(8, 64, MAX_SEQ_LEN, "fcfs"))
    assert len({key.name for key in dispatcher.keys}) == len(dispatcher.keys) == 11
    for requests in range(1, 9):
        for longest, least in ((1, 50), (50, 50), (51, 100), (100, 100), (101, MAX_SEQ_LEN)):
            key = dispatcher.dispatch(requests, requests, 1, longest)
            assert key is not None
            bound = least if requests <= 4 else MAX_SEQ_LEN
            assert (key.is_decode, key.short, key.max_seq_len) == (True, bound <= 100, bound)
            assert key.num_tokens == min(size for size in graph.decode_sizes if size >= requests)
    mixed = dispatcher.dispatch(20, 3, None, 50)
    assert mixed is not None
    assert (mixed.is_decode, mixed.max_seq_len) == (False, MAX_SEQ_LEN)


def test_a_batch_takes_a_graph_for_short_contexts_only_in_its_own_size() -> None:
    graph = GraphConfig(GraphMode.FULL, (2, 4, 8), (64,), short_decodes=((4, 50), (8, 100)))
    dispatcher = Dispatcher(graph, SchedulerConfig(8, 64, MAX_SEQ_LEN, "fcfs"))
    found = {
        (requests, longest): dispatcher.dispatch(requests, requests, 1, longest)
        for requests in (2, 3, 4, 5)
        for longest in (50, 51, 101)
    }
    bounds = {shape: key.max_seq_len for shape, key in found.items() if key is not None and key.short}
    assert bounds == {(3, 50): 50, (4, 50): 50, (5, 50): 100, (5, 51): 100}


def test_drafts_of_short_contexts_have_graphs_of_their_own() -> None:
    """As many rows a request as it has queries; as far as a step has room for them."""
    graph = GraphConfig(GraphMode.FULL, (1, 2, 4, 8), (64,), short_decodes=((4, 50),))
    graph = replace(graph, short_verified=((1, 50), (4, 50), (4, 100), (8, 50)))
    dispatcher = Dispatcher(graph, SchedulerConfig(8, 16, MAX_SEQ_LEN, "fcfs"), query_lens=(4,))
    assert len({key.name for key in dispatcher.keys}) == len(dispatcher.keys) == 12
    found = {}
    for requests in range(1, 5):
        for longest in (50, 51, 101):
            key = dispatcher.dispatch(4 * requests, requests, 4, longest)
            assert key is not None
            assert (key.max_query_len, key.num_decodes) == (4, key.num_tokens)
            found[requests, longest] = key.name
    assert found == {
        (1, 50): "verify-4-short-50 4",
        (1, 51): "verify-4 4",
        (1, 101): "verify-4 4",
        (2, 50): "verify-4 8",
        (2, 51): "verify-4 8",
        (2, 101): "verify-4 8",
        **dict.fromkeys([(3, 50), (4, 50)], "verify-4-short-50 16"),
        **dict.fromkeys([(3, 51), (4, 51)], "verify-4-short-100 16"),
        **dict.fromkeys([(3, 101), (4, 101)], "verify-4 16"),
    }
    plain = dispatcher.dispatch(4, 4, 1, 50)
    assert plain is not None
    assert plain.name == "short-50 4"


FIELDS = st.lists(
    st.builds(KeyField, st.sampled_from(["rank", "pictures"]), st.sampled_from([(8,), (4, 16), (1, 2, 3)])),
    max_size=2,
    unique_by=lambda field: field.name,
)


@given(fields=FIELDS, tokens=st.integers(1, 80), decodes=st.booleans(), data=st.data())
def test_a_pass_adds_a_field_to_the_keys(
    fields: list[KeyField], tokens: int, decodes: bool, data: st.DataObject
) -> None:
    """A batch without it has the graph that it had; one with it the smallest that holds it, or none."""
    graph = GraphConfig(GraphMode.FULL, (1, 8), (2, 64), short_decodes=((8, 512),))
    limits = SchedulerConfig(8, 64, MAX_SEQ_LEN, "fcfs")
    plain, dispatcher = Dispatcher(graph, limits), Dispatcher(graph, limits, fields)
    batch = (tokens, tokens, 1, 100) if decodes else (tokens, 1, tokens, 100)
    expected = plain.dispatch(*batch)
    assert dispatcher.dispatch(*batch) == dispatcher.dispatch(*batch, dict.fromkeys("ab", 0)) == expected
    values = {field.name: data.draw(st.integers(0, 18)) for field in fields}
    sizes = {field.name: smallest((0, *field.sizes), values[field.name]) for field in fields}
    found = dispatcher.dispatch(*batch, values)
    if None in sizes.values() or expected is None:
        assert found is None
    else:
        extra = tuple((name, size) for name, size in sizes.items() if size)
        assert found == expected._replace(extra=extra)
        assert found in dispatcher.keys
    assert len({key.name for key in dispatcher.keys}) == len(dispatcher.keys)
    assert set(plain.keys) <= set(dispatcher.keys)


def test_sizes_that_are_not_captured_have_no_keys() -> None:
    """Their batches run without a graph; decodes keep theirs."""
    graph, scheduler = GraphConfig(GraphMode.FULL, (1, 2), (8, 16, 32)), SchedulerConfig(8, 64, MAX_SEQ_LEN, "fcfs")
    every, few = Dispatcher(graph, scheduler), Dispatcher(graph, scheduler, token_sizes=(8,))
    assert [key.num_tokens for key in every.keys] == [1, 2, 8, 16, 32]
    assert few.keys == every.keys[:3]
    assert [few.dispatch(tokens, 2, None, 64) for tokens in (5, 9)] == [every.dispatch(5, 2, None, 64), None]


def test_a_field_of_some_sizes_rounds_up_to_them() -> None:
    """Decodes use these graphs too, and the field joins no other."""
    graph = GraphConfig(GraphMode.FULL, (1, 4), (4, 8, 16, 32))
    fields = KeyField("rank", (1, 2)), KeyField("pictures", (1,), (8, 32))
    dispatcher = Dispatcher(graph, SchedulerConfig(8, 64, MAX_SEQ_LEN, "fcfs"), fields)
    assert [key.name for key in dispatcher.keys if "pictures" in key.name] == [
        "full 8 pictures 1",
        "full 32 pictures 1",
    ]
    assert len(dispatcher.keys) == 3 * 6 + 2
    found = {
        tokens: key and key.name
        for tokens in (1, 4, 8, 9, 32, 33)
        for key in [dispatcher.dispatch(tokens, 1, 1 if tokens == 1 else None, 9, {"pictures": 1})]
    }
    assert found == {
        **dict.fromkeys((1, 4, 8), "full 8 pictures 1"),
        **dict.fromkeys((9, 32), "full 32 pictures 1"),
        33: None,
    }
    assert dispatcher.dispatch(3, 1, None, 9, {"pictures": 1, "rank": 1}) is None
    without = Dispatcher(graph, SchedulerConfig(8, 64, MAX_SEQ_LEN, "fcfs"), [KeyField("pictures", (1,), ())])
    assert without.dispatch(3, 1, None, 9, {"pictures": 1}) is None
    assert without.dispatch(3, 1, None, 9) is not None


def test_sizes_of_prompts_are_captured_ones() -> None:
    assert prompt_sizes(default_token_sizes(8192)) == (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
    assert prompt_sizes((100, 700)) == (100, 700)
    assert prompt_sizes((8, 32)) == ()
