"""The captured graphs: the order of captures, what each is measured to take, how that is predicted, and replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_capture import ScriptedCapture

from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey, GraphKind, decode_key, mixed_key
from compiled_engine.graphs.cuda_graphs.manager import CudaGraphManager
from compiled_engine.graphs.cuda_graphs.memory import MemoryReading, capture_order, enough_samples, total_bytes
from compiled_engine.process.progress import SilentProgress

MIB = 1 << 20
DECODES = [decode_key(size, 4096) for size in (1, 2, 8)]
SHORT = [decode_key(size, context, short=True) for size in (2, 8) for context in (64, 256)]
MIXED = [mixed_key(size, 8, 4096) for size in (16, 64)]
PIECES = [GraphKey(GraphKind.PIECEWISE, size) for size in (16, 64)]
KEYS = [*DECODES, *MIXED, *PIECES, *SHORT]
IN_ORDER = [
    *("piecewise 64", "piecewise 16", "full 64", "full 16"),
    *("decode 8", "short-256 8", "short-64 8", "decode 2", "short-256 2", "short-64 2", "decode 1"),
]


def alone(value: int) -> int:
    """The minimum over one rank."""
    return value


def manager_of(capture: ScriptedCapture, keys: Sequence[GraphKey] = KEYS) -> CudaGraphManager:
    return CudaGraphManager(dict.fromkeys(keys, capture), capture)


class Advances:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.totals: list[int | None] = []
        self.counts: list[int] = []

    def stage(self, name: str, total: int | None = None, **options: Any) -> AbstractContextManager[Callable[..., None]]:
        self.totals.append(total)
        return nullcontext(self.counts.append)


# Order


@given(st.permutations(KEYS))
def test_graphs_around_attention_come_first_then_mixed_ones_then_decodes_the_large_before_the_small(
    keys: list[GraphKey],
) -> None:
    assert [key.name for key in sorted(keys, key=capture_order)] == IN_ORDER
    capture, advances = ScriptedCapture(), Advances()
    manager = manager_of(capture, keys)
    assert manager.names_to_capture == IN_ORDER[::-1]
    manager.capture_all(advances)
    assert capture.done("whole", "segments") == IN_ORDER
    assert (manager.num_captures, manager.names_to_capture) == (len(KEYS), [])
    assert (advances.totals, advances.counts) == ([len(KEYS)], [1] * len(KEYS))


def test_each_capture_follows_its_own_batch_and_warm_up() -> None:
    """Full graphs are captured whole, others in segments around attention. The device is idle before and after."""
    capture = ScriptedCapture()
    manager_of(capture, [PIECES[0], DECODES[0]]).capture_all(SilentProgress())
    assert capture.log == [
        ("settle",),
        *((("fill", "piecewise 16")), ("warm_up", "piecewise 16"), ("segments", "piecewise 16")),
        *((("fill", "decode 1")), ("warm_up", "decode 1"), ("whole", "decode 1")),
        ("settle",),
    ]


def test_a_capture_that_fails_is_passed_on() -> None:
    def fail(key: GraphKey) -> MemoryReading:
        raise MemoryError("out of memory")

    manager = manager_of(ScriptedCapture(fail))
    with pytest.raises(MemoryError):
        manager.capture_all(SilentProgress())
    assert manager.num_captures == 0


# Memory of graphs that were captured


def test_the_memory_of_a_capture_is_its_own() -> None:
    """Not that of the warm-up, in which libraries allocate what they keep."""
    capture = ScriptedCapture(lambda key: MemoryReading(key.num_tokens * MIB, 3 * MIB), lazy=5 * MIB)
    manager = manager_of(capture)
    assert (manager.bytes_used, manager.capture_seconds) == (0, 0.0)
    manager.capture_all(SilentProgress())
    assert manager.memory_by_key == {key.name: MemoryReading(key.num_tokens * MIB, 3 * MIB) for key in KEYS}
    assert manager.bytes_used == sum(key.num_tokens + 3 for key in KEYS) * MIB
    assert 0 < manager.capture_seconds < 60


def test_readings_are_told_apart_by_what_holds_the_memory() -> None:
    assert MemoryReading(70, 900).since(MemoryReading(50, 1000)) == MemoryReading(20, -100)


# Prediction


READINGS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 64 * MIB - 1)), min_size=1, max_size=5)


@given(st.lists(st.tuples(READINGS, st.integers(1, 50)), max_size=4))
def test_the_prediction_is_the_pool_of_the_samples_and_the_mean_of_the_driver_for_each_graph(
    kinds: list[tuple[list[tuple[int, int]], int]],
) -> None:
    expected = 0.0
    for readings, count in kinds:
        expected += sum(pool for pool, _ in readings) + count * sum(driver for _, driver in readings) / len(readings)
    found = total_bytes([([MemoryReading(*reading) for reading in readings], count) for readings, count in kinds])
    assert found == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("other", [-1, -(2 * MIB), 64 * MIB, 1 << 40])
def test_driver_memory_that_other_processes_took_or_freed_is_no_sample(other: int) -> None:
    """Neither of what a graph takes nor of when there are enough."""
    readings = [MemoryReading(7, 2 * MIB), MemoryReading(5, other), MemoryReading(0, 0)]
    assert total_bytes([(readings, 10)]) == 12 + 10 * MIB
    assert total_bytes([(readings[1:2], 10)]) == 5
    assert not enough_samples(readings[1:2])


@pytest.mark.parametrize(
    ("driver", "count"), [(24 * MIB, 1), (24 * MIB - 1, 2), (12 * MIB, 2), (8 * MIB, 3), (2 * MIB, 12), (0, 16)]
)
def test_samples_are_enough_when_they_are_many_or_took_much_of_the_driver(driver: int, count: int) -> None:
    """The driver gives memory in steps: a few small graphs say nothing."""
    readings = [MemoryReading(0, driver)] * count
    assert enough_samples(readings)
    assert not enough_samples(readings[1:])


@pytest.mark.parametrize("number", [1, 2, 3, 5, 16, 17, 20, 33, 40, 64, 200])
def test_the_two_largest_are_sampled_then_some_of_all_sizes(number: int) -> None:
    capture = ScriptedCapture(lambda key: MemoryReading(key.num_tokens, 0))
    keys = [decode_key(size, 4096) for size in range(1, number + 1)]
    predicted = manager_of(capture, keys).predict(alone)
    sampled = [number - int(name.split()[1]) for name in capture.done("whole")]  # from the largest
    assert len(sampled) == min(number, 16)
    assert sampled[:2] == [0, 1][:number]
    assert len({after - before for before, after in pairwise(sampled[1:])}) <= 1
    if number > 2:
        assert sampled[-1] >= 2 * number // 5  # into the smaller half, as far as there are samples
    assert predicted == sum(number - place for place in sampled)


def test_a_prediction_leaves_nothing_behind() -> None:
    """It samples each kind by itself; what the graphs took is given back, and later captures have a new pool."""
    capture = ScriptedCapture(lambda key: MemoryReading(MIB, key.num_tokens * MIB // 32))
    manager = manager_of(capture)
    predicted = manager.predict(alone)
    sampled = capture.done("whole", "segments")
    assert sampled == IN_ORDER  # there are fewer than the most samples of each kind, and they are small
    assert sorted(capture.done("reset")) == sorted(sampled)
    assert capture.log[0] == ("settle",)
    assert capture.log[-2:] == [("renew",), ("settle",)]
    assert predicted == sum(MIB + key.num_tokens * MIB // 32 for key in KEYS)
    assert (manager.num_captures, manager.bytes_used, manager.names_to_capture) == (0, 0, IN_ORDER[::-1])
    assert not capture.in_session
    manager.capture_all(SilentProgress())
    assert manager.bytes_used == predicted


def test_kinds_are_sampled_and_counted_apart() -> None:
    """Two of a kind that takes much, all of one that takes little; each sample stands for the graphs of its kind."""
    much, little = ([decode_key(size, 4096, query_len=query_len) for size in range(1, 6)] for query_len in (2, 4))
    capture = ScriptedCapture(lambda key: MemoryReading(0, (14 if key.max_query_len == 2 else 1) * MIB))
    predicted = manager_of(capture, [*much, *little]).predict(alone)
    assert sorted(capture.done("whole")) == sorted(["verify-2 10", "verify-2 8", *(key.name for key in little)])
    assert predicted == 5 * 14 * MIB + 5 * MIB


@pytest.mark.parametrize(("kept", "counted"), [(0, 0), (MIB, 2 * MIB), (64 * MIB, 6 * MIB), (-MIB, 0)])
def test_what_the_driver_keeps_of_the_samples_counts_as_used(kept: int, counted: int) -> None:
    """At most what was predicted, as another process may have taken the rest; never less than nothing."""
    capture = ScriptedCapture(lambda key: MemoryReading(0, 3 * MIB), kept=kept)
    manager = manager_of(capture, DECODES[:2])
    assert manager.predict(alone) == 6 * MIB
    assert manager.bytes_used == counted


def test_a_prediction_of_an_earlier_process_is_taken_over_with_what_warm_ups_take() -> None:
    """The largest of each kind is warmed up, as its workspaces are; nothing is captured."""
    capture = ScriptedCapture(lazy=MIB)
    manager = manager_of(capture)
    assert manager.expect(123) == 123
    largest = ["piecewise 64", "full 64", "decode 8"]
    assert capture.log == [*((what, name) for name in largest for what in ("fill", "warm_up")), ("settle",)]
    assert (manager.num_captures, manager.bytes_used, manager.names_to_capture) == (0, 0, IN_ORDER[::-1])


def test_without_graphs_the_device_is_left_alone() -> None:
    capture = ScriptedCapture()
    manager = manager_of(capture, [])
    assert (manager.predict(alone), manager.expect(0)) == (0, 0)
    assert capture.log == []


# Replay


def test_a_replay_runs_the_graph_of_the_key_on_the_inputs_and_returns_what_it_computes() -> None:
    capture: Any = ScriptedCapture()
    manager = manager_of(capture, DECODES)
    manager.capture_all(SilentProgress())
    inputs: Any = object()
    for key in DECODES:
        assert manager.replay(key, inputs).tolist() == [key.num_tokens]
        assert capture.log[-1] == ("replay", key.name, inputs)


def test_a_buffer_that_was_replaced_since_the_capture_is_found_out() -> None:
    capture = ScriptedCapture()
    manager = manager_of(capture, DECODES)
    manager.capture_all(SilentProgress())
    capture.ids = (1, 3)
    with pytest.raises(AssertionError, match="a buffer that the graph reads was replaced"):
        manager.replay(DECODES[0], None)


def test_a_closed_manager_has_given_every_graph_back_and_captures_no_more() -> None:
    capture = ScriptedCapture()
    manager = manager_of(capture)
    manager.capture_all(SilentProgress())
    manager.close()
    assert sorted(capture.done("reset")) == sorted(IN_ORDER)
    assert manager.num_captures == 0
    manager.close()
    assert len(capture.done("reset")) == len(KEYS)
    unused = manager_of(capture)
    unused.close()
    assert unused.names_to_capture == []
