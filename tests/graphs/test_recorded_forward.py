"""Forwards on a CPU that are called, recorded and replayed; the memory that their results are given."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_batch_linear_cases import Case, arguments_of

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.graphs.cache.lookup import Lookup
from compiled_engine.graphs.cache.work_folder import WorkFolder
from compiled_engine.graphs.compiled_model import BoundRange, CompileCounts, CompiledModel
from compiled_engine.graphs.compiler.compiled_range import CompiledRange
from compiled_engine.graphs.compiler.plan import Plan, PlannedStep
from compiled_engine.graphs.cpu_graphs.recorded_forward import RecordedForward, recorded
from compiled_engine.graphs.cpu_graphs.recorder import Arena, recording
from compiled_engine.passes.framework.graph_inputs import Source
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.passes.linear.small_batch_linear_op import on_cpu

SMALL, WHOLE = CompileRange(1, 4, small=True), CompileRange(1, 64)
PIECES: dict[str, Callable[..., Any]] = {}


def plan_calling(piece: str) -> Plan:
    """piece(x_TD, w)"""
    inputs = (Source("argument", "x_TD"), Parameter("w", (1,), "float32"))
    return Plan(("x_TD",), inputs, (PlannedStep(piece, None, ({"value": 0}, {"value": 1}), (2,)),), (2,))


def model_of(*ranges: CompiledRange, direct: tuple[str, ...] = ()) -> CompiledModel:
    lookup = Lookup(Path("nowhere"), "key", "hit", None, WorkFolder(None, "test_"))
    return CompiledModel(ranges, PIECES, frozenset(direct), lookup, CompileCounts(0, 0))


def range_of(name: str, compile_range: CompileRange, piece: str) -> CompiledRange:
    return CompiledRange(name, compile_range, plan_calling(piece), ("result",), ())


def batch(x: torch.Tensor, num_decodes: int | None = None) -> tuple[Any, ...]:
    """Arguments of a step of one request for each row of x, decodes or not."""
    rows = x.shape[0]
    number = rows if num_decodes is None else num_decodes
    integers = torch.zeros(rows, dtype=torch.int32)
    host = torch.tensor([number, 1, 1], dtype=torch.int32)
    inputs = AttentionInputs(integers, integers, integers, integers, host, "cpp", integers)
    return x, torch.zeros(rows), inputs, [torch.zeros(1)]


class Doubles:
    """A forward that counts its calls."""

    def __init__(self, several: bool = False, reads: bool = False) -> None:
        self.calls, self._several, self._reads = 0, several, reads

    def __call__(self, x: torch.Tensor, *others: Any) -> Any:
        self.calls += 1
        if self._reads:
            float(x.sum())
        doubled = x * 2
        return (doubled, doubled + 1) if self._several else doubled + 1


@pytest.mark.parametrize("several", [False, True])
def test_a_kind_of_batch_is_called_then_recorded_then_replayed(several: bool) -> None:
    forward = Doubles(several)
    replayed = RecordedForward(forward, Arena())
    x = torch.ones(3, 4)
    arguments = batch(x)
    for number in range(6):
        x.fill_(number)
        found = replayed(*arguments)
        results = found if several else (found,)
        assert isinstance(found, tuple) is several
        expected = (2.0 * number, 2.0 * number + 1) if several else (2.0 * number + 1,)
        assert [set(result.flatten().tolist()) for result in results] == [{value} for value in expected]
    assert forward.calls == 2
    counts = replayed.counts
    assert (counts.recordings, counts.kernels, counts.replays) == (1, 0, 4)


def test_batches_of_another_size_address_or_number_of_threads_are_recorded_apart(one_thread: None) -> None:
    forward = Doubles()
    replayed = RecordedForward(forward, Arena())
    x = torch.ones(4, 4)
    same, smaller, elsewhere = batch(x), batch(x[:2]), batch(torch.ones(4, 4))
    for number, arguments in enumerate((same, smaller, elsewhere), 1):
        for _ in range(3):
            assert set(replayed(*arguments).flatten().tolist()) == {3.0}
        assert (replayed.counts.recordings, forward.calls) == (number, 2 * number)
    torch.set_num_threads(2)
    for _ in range(3):
        replayed(*same)
    assert replayed.counts.recordings == 4
    torch.set_num_threads(1)
    replayed(*same)
    assert (replayed.counts.recordings, replayed.counts.replays) == (4, 5)


class Buffers:
    """The fixed buffers of an engine: a batch has the beginning of each."""

    def __init__(self) -> None:
        self._x, self._rows = torch.ones(8, 4), [torch.zeros(8, dtype=torch.int32) for _ in range(6)]
        self._host, self._caches = torch.zeros(3, dtype=torch.int32), [torch.zeros(1)]

    def batch(self, rows: int) -> tuple[Any, ...]:
        self._host.copy_(torch.tensor([rows, 1, 100 + rows]))
        positions, *of_attention = (each[:rows] for each in self._rows)
        inputs = AttentionInputs(*of_attention[:4], self._host, "cpp", of_attention[4])
        return self._x[:rows], positions, inputs, self._caches


def test_batches_of_several_sizes_in_the_same_buffers_are_recorded_apart() -> None:
    forward, buffers = Doubles(), Buffers()
    replayed = RecordedForward(forward, Arena())
    for number, rows in enumerate((2, 3, 8), 1):
        for _ in range(3):
            assert replayed(*buffers.batch(rows)).shape == (rows, 4)
        assert (replayed.counts.recordings, forward.calls) == (number, 2 * number)
    assert replayed(*buffers.batch(3)).shape == (3, 4)
    assert (replayed.counts.recordings, replayed.counts.replays, forward.calls) == (3, 4, 6)


@pytest.mark.parametrize(("place", "recordings"), [(0, 1), (1, 0), (2, 0)])
def test_the_host_may_read_the_number_of_decodes_alone(place: int, recordings: int) -> None:
    """It is the same in each replay, as the size of the batch is; the contexts' bound is not."""
    buffers = Buffers()

    def forward(x: torch.Tensor, positions: torch.Tensor, inputs: AttentionInputs, caches: Any) -> torch.Tensor:
        return x * int(inputs.host_3[place])

    replayed = RecordedForward(forward, Arena())
    for _ in range(3):
        replayed(*buffers.batch(2))
    assert replayed.counts.recordings == recordings


KERNEL = arguments_of(Case(3, 64, 48, silu_mul=True, norm=True), torch.float32)


class KernelForward:
    """As many calls of a kernel in C++ as there are rows, at least two if several results are wanted."""

    def __init__(self, several: bool) -> None:
        self._several = several

    def __call__(self, x: torch.Tensor, *others: Any) -> Any:
        for _ in range(x.shape[0] - 1):
            on_cpu(*KERNEL.values())
        first = on_cpu(*KERNEL.values())
        return (first, on_cpu(*KERNEL.values())) if self._several else first


@pytest.mark.parametrize("several", [False, True])
def test_results_lie_in_the_arena_and_do_not_keep_others_from_it(several: bool) -> None:
    """Kernels of another size, which run at other times, write to the same memory."""
    replayed, buffers, found = RecordedForward(KernelForward(several), Arena()), Buffers(), {}
    for rows in (2, 1):
        for _ in range(3):
            result = replayed(*buffers.batch(rows))
        results = result if several else (result,)
        assert all(torch.equal(each, on_cpu(*KERNEL.values())) for each in results)
        found[rows] = {each.data_ptr() for each in results}
    assert found[1] == found[2]
    assert len(found[1]) == (2 if several else 1)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_the_most_kernels_of_a_recording_are_counted(sizes: tuple[int, int]) -> None:
    """Of the longest list, whichever was recorded first."""
    replayed, buffers = RecordedForward(KernelForward(False), Arena()), Buffers()
    for rows in sizes:
        for _ in range(2):
            replayed(*buffers.batch(rows))
    assert (replayed.counts.recordings, replayed.counts.kernels) == (2, 2)


def test_batches_with_prompts_are_called() -> None:
    forward = Doubles()
    replayed = RecordedForward(forward, Arena())
    arguments = batch(torch.ones(3, 4), num_decodes=2)
    for _ in range(4):
        replayed(*arguments)
    assert (forward.calls, replayed.counts.recordings, replayed.counts.replays) == (4, 0, 0)


def test_a_forward_that_cannot_be_recorded_is_called_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    forward = Doubles(reads=True)
    replayed = RecordedForward(forward, Arena())
    x = torch.ones(3, 4)
    arguments = batch(x)
    with caplog.at_level(logging.WARNING, "compiled_engine"):
        for number in range(5):
            x.fill_(number)
            assert set(replayed(*arguments).flatten().tolist()) == {2.0 * number + 1}
    assert forward.calls == 6  # one of them failed half-way
    assert len(caplog.messages) == 1
    assert "decodes run without recorded calls: the host reads a tensor" in caplog.messages[0]
    assert (replayed.counts.recordings, replayed.counts.replays) == (0, 0)


def test_only_small_forwards_that_call_from_python_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    other = CompileRange(5, 8, small=True)
    model = model_of(
        *(range_of("forward", SMALL, "small"), range_of("forward", other, "head"), range_of("forward", WHOLE, "whole")),
        direct=("small", "whole"),
    )
    plain = [BoundRange(SMALL, Doubles(), True), BoundRange(other, Doubles()), BoundRange(WHOLE, Doubles())]
    with caplog.at_level(logging.WARNING, "compiled_engine"):
        found = recorded(model, plain)
    assert isinstance(found[0].call, RecordedForward)
    assert (found[0].compile_range, found[0].ends_at_logits) == (SMALL, True)
    assert found[1:] == (*plain[1:],)
    assert ["5-8 tokens" in message for message in caplog.messages] == [True]


def test_an_arena_gives_the_smallest_block_that_is_free_and_large_enough() -> None:
    arena = Arena()
    sizes = (400, 100, 200)
    blocks = [arena.empty_like(torch.empty(size, dtype=torch.uint8)) for size in sizes]
    addresses = {size: block.data_ptr() for size, block in zip(sizes, blocks, strict=True)}
    del blocks
    living = []
    for size, block in ((150, 200), (100, 100), (128, 400), (128, None)):
        living.append(arena.empty_like(torch.empty(size, dtype=torch.uint8)))
        assert living[-1].data_ptr() % 16 == 0
        taken = [size for size, address in addresses.items() if living[-1].data_ptr() == address]
        assert taken == ([] if block is None else [block])


def test_what_is_computed_into_memory_of_its_own_is_computed_again_and_views_are_not() -> None:
    x = torch.ones(2, 3)
    with recording(Arena(), []) as calls:
        transposed = torch.empty_like(x.t())  # not contiguous, so it is not of the arena
        dense = torch.empty_like(x)
        view = x.view(3, 2).t()
        largest, place = x.max(1)
        x.add_(1, alpha=2)
    assert (transposed.shape, transposed.stride()) == ((3, 2), (1, 3))
    assert (dense.shape, dense.stride()) == ((2, 3), (3, 1))
    assert calls.num_kernels == 0
    x.copy_(torch.tensor([[1.0, 5.0, 2.0], [7.0, 3.0, 4.0]]))
    calls.replay()
    assert (largest.tolist(), place.tolist()) == ([5.0, 7.0], [1, 0])
    assert x.tolist() == [[3.0, 7.0, 4.0], [9.0, 5.0, 6.0]]
    assert view.tolist() == [[3.0, 4.0, 5.0], [7.0, 9.0, 6.0]]
