"""The dispatcher: total, minimal, and a graph whenever one is allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.config import GraphMode
from compiled_engine.graphs.dispatcher import Dispatcher, GraphKey, default_capture_sizes

MAX_SEQ_LEN = 4096


def test_default_sizes() -> None:
    assert default_capture_sizes(1) == (1,)
    assert default_capture_sizes(7) == (1, 2, 4, 7)
    assert default_capture_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert default_capture_sizes(256)[-3:] == (240, 248, 256)
    assert len(default_capture_sizes(256)) == 35
    assert default_capture_sizes(300) == (*default_capture_sizes(256), 272, 288, 300)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 64, 256])
def test_every_decode_batch_has_the_smallest_graph_that_holds_it(max_num_seqs: int) -> None:
    sizes = default_capture_sizes(max_num_seqs)
    dispatcher = Dispatcher(GraphMode.FULL_DECODE_ONLY, sizes, MAX_SEQ_LEN)
    assert len(dispatcher.keys) == len(sizes)
    for requests in range(1, max_num_seqs + 1):
        key = dispatcher.dispatch(requests, requests, 1)
        assert key == GraphKey(min(size for size in sizes if size >= requests), 1, MAX_SEQ_LEN)
        assert key in dispatcher.keys


@given(
    sizes=st.sets(st.integers(1, 64), max_size=8),
    tokens=st.integers(1, 200),
    requests=st.integers(1, 100),
    uniform=st.sampled_from([None, 1, 2]),
)
def test_total_over_all_batches(sizes: set[int], tokens: int, requests: int, uniform: int | None) -> None:
    key = Dispatcher(GraphMode.FULL_DECODE_ONLY, tuple(sizes), MAX_SEQ_LEN).dispatch(tokens, requests, uniform)
    fitting = [size for size in sizes if size >= requests]
    if uniform == 1 and tokens == requests and fitting:
        assert key is not None
        assert key.num_requests == min(fitting)
    else:
        assert key is None


def test_without_graphs_nothing_is_replayed() -> None:
    dispatcher = Dispatcher(GraphMode.NONE, (1, 2), MAX_SEQ_LEN)
    assert dispatcher.keys == ()
    assert dispatcher.dispatch(1, 1, 1) is None
