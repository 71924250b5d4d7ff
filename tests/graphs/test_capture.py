"""Captures in one piece or around attention, on a device that only keeps a log; replay of what was captured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from compiled_engine.attention.inputs import FIELDS, AttentionInputs
from compiled_engine.graphs.cuda_graphs import capture as capture_module
from compiled_engine.graphs.cuda_graphs.capture import AttentionsOfEagerCode, CudaCapture, SegmentedGraph, alias_memory
from compiled_engine.graphs.cuda_graphs.memory import MemoryReading

DEVICE = torch.device("cuda", 0)
NOTHING = torch.empty(0)  # has no memory that would have to be on the device


def inputs_of(name: str) -> AttentionInputs:
    values: dict[str, Any] = {field: f"{name} {field}" for field in FIELDS}
    return AttentionInputs(**values)


class Device:
    """What the parts of torch.cuda that captures use were told."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.outside, self.current = self.stream("outside"), None
        self.graphs, self.pools = count(), count()
        self.fails_to_end = False

    def stream(self, name: str) -> Any:
        stream = SimpleNamespace(name=name)
        stream.wait_stream = lambda other: self.log.append(f"{name} waits for {other.name}")
        return stream

    def graph(self) -> Any:
        name = f"graph {next(self.graphs)}"

        def end() -> None:
            self.log.append(f"{name} ends")
            if self.fails_to_end:
                raise RuntimeError("the capture was invalidated")

        return SimpleNamespace(
            capture_begin=lambda pool, capture_error_mode: self.log.append(f"{name} begins in pool {pool}"),
            capture_end=end,
            replay=lambda: self.log.append(f"{name} runs"),
            reset=lambda: self.log.append(f"{name} is reset"),
        )

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def attend(self, *arguments: Any) -> None:
        self.log.append(("attention", *arguments))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    parts: dict[str, Callable[..., Any]] = {
        "Stream": lambda device: found.stream("own"),
        "current_stream": lambda device: found.outside,
        "stream": found.on,
        "CUDAGraph": found.graph,
        "graph_pool_handle": lambda: next(found.pools),
        "synchronize": lambda device: found.log.append("synchronize"),
        "empty_cache": lambda: found.log.append("empty cache"),
        "mem_get_info": lambda device: (300, 1000),
        "memory_stats_as_nested_dict": lambda device: {"reserved_bytes": {"all": {"current": 450, "peak": 460}}},
    }
    for name, part in parts.items():
        monkeypatch.setattr(torch.cuda, name, part)
    return found


def work_of(device: Device, capture: CudaCapture, num_attentions: int) -> Callable[[], torch.Tensor]:
    def work() -> torch.Tensor:
        for number in range(num_attentions):
            device.log.append(f"piece {number}")
            capture.on_attention(device.attend, (f"layer {number}", *inputs_of("captured").flat()))
        device.log.append("last piece")
        return NOTHING

    return work


def test_work_that_is_captured_whole_is_one_graph_with_its_attention(device: Device) -> None:
    capture = CudaCapture(DEVICE)
    graph, result = capture.whole(work_of(device, capture, 1))
    attention = ("attention", "layer 0", *inputs_of("captured").flat())
    assert device.log == ["graph 0 begins in pool 0", "piece 0", attention, "last piece", "graph 0 ends"]
    assert result is NOTHING
    device.log.clear()
    graph.replay(None)
    graph.reset()
    assert device.log == ["graph 0 runs", "graph 0 is reset"]


def test_attention_between_segments_is_not_captured_and_runs_on_the_inputs_of_each_replay(device: Device) -> None:
    capture = CudaCapture(DEVICE)
    graph, _ = capture.segments(work_of(device, capture, 2))
    assert device.log == [
        *("graph 0 begins in pool 0", "piece 0", "graph 0 ends"),
        *("graph 1 begins in pool 0", "piece 1", "graph 1 ends"),
        *("graph 2 begins in pool 0", "last piece", "graph 2 ends"),
    ]
    for name in ("first", "second"):
        device.log.clear()
        graph.replay(inputs_of(name))
        attentions = [("attention", f"layer {number}", *inputs_of(name).flat()) for number in range(2)]
        assert device.log == ["graph 0 runs", attentions[0], "graph 1 runs", attentions[1], "graph 2 runs"]
    device.log.clear()
    graph.reset()
    assert device.log == [f"graph {number} is reset" for number in range(3)]


def test_attention_outside_of_a_capture_runs_as_it_is(device: Device) -> None:
    """Also after one in segments, and after one that failed."""

    def fail() -> torch.Tensor:
        raise MemoryError("out of memory")

    capture = CudaCapture(DEVICE)
    capture.segments(work_of(device, capture, 1))
    with pytest.raises(MemoryError):
        capture.segments(fail)
    device.log.clear()
    capture.on_attention(device.attend, ("layer 0", "batch"))
    assert device.log == [("attention", "layer 0", "batch")]


@pytest.mark.parametrize("fails_to_end", [False, True])
def test_a_capture_that_fails_is_ended_and_what_it_had_captured_is_reset(device: Device, fails_to_end: bool) -> None:
    """The error of the work is passed on, whatever the end of the capture says; the next capture is a new one."""
    capture = CudaCapture(DEVICE)

    def work() -> torch.Tensor:
        capture.on_attention(device.attend, ("layer 0", *inputs_of("captured").flat()))
        device.fails_to_end = fails_to_end
        raise ValueError("the work failed")

    with pytest.raises(ValueError, match="the work failed"):
        capture.segments(work)
    assert device.log[-2:] == ["graph 1 ends", "graph 0 is reset"]
    device.fails_to_end = False
    device.log.clear()
    graph, _ = capture.whole(work_of(device, capture, 0))
    graph.replay(None)
    assert device.log == ["graph 2 begins in pool 0", "last piece", "graph 2 ends", "graph 2 runs"]


def test_a_set_of_graphs_has_a_pool_and_the_next_set_another(device: Device) -> None:
    capture = CudaCapture(DEVICE)
    for _ in range(2):
        capture.whole(work_of(device, capture, 0))
    capture.renew()
    capture.segments(work_of(device, capture, 0))
    assert [entry for entry in device.log if "begins" in entry] == [
        f"graph {number} begins in pool {pool}" for number, pool in enumerate((0, 0, 1))
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_session_is_on_a_stream_of_its_own_in_order_with_the_work_around_it(device: Device, fails: bool) -> None:
    """Nothing is collected in it, as freed memory would be part of the capture."""
    capture = CudaCapture(DEVICE)
    try:
        with capture.session():
            assert device.log == ["own waits for outside"]
            assert device.current is not None
            assert device.current.name == "own"
            assert not gc.isenabled()
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert device.log == ["own waits for outside", "outside waits for own"]
    assert (device.current, gc.isenabled()) == (None, True)


def test_memory_is_what_torch_has_reserved_and_what_else_is_taken(device: Device) -> None:
    capture = CudaCapture(DEVICE)
    assert capture.memory() == MemoryReading(pool=450, driver=1000 - 300 - 450)
    capture.settle()
    assert device.log == ["synchronize", "empty cache"]


class AsNumPy:
    """The array interface of CUDA as that of NumPy, which has the same fields."""

    def __init__(self, memory: Any) -> None:
        self.__array_interface__ = memory.__cuda_array_interface__


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", ["contiguous", "transposed", "sliced", "scalar", "empty"])
def test_an_alias_is_of_the_same_elements(dtype: torch.dtype, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(memory: Any, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(np.asarray(AsNumPy(memory)))

    monkeypatch.setattr(capture_module.torch, "as_tensor", read)
    whole = torch.arange(24).view(4, 6).to(dtype)
    tensor = {
        "contiguous": whole,
        "transposed": whole.T,
        "sliced": whole[1:, ::2],
        "scalar": whole[2, 3],
        "empty": whole[:0],
    }[shape]
    alias = alias_memory(tensor)
    assert (alias.dtype, alias.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(alias, tensor)
    if tensor.numel():
        assert alias.stride() == tensor.stride()
        assert alias.data_ptr() == tensor.data_ptr()
        tensor.zero_()
        assert not alias.any()  # what the next replay writes is seen


def test_one_graph_needs_no_inputs_and_several_do() -> None:
    log: list[str] = []
    graphs: list[Any] = [SimpleNamespace(replay=lambda n=n: log.append(n), reset=lambda: None) for n in ("a", "b")]
    segmented = SegmentedGraph()
    segmented.add_graph(graphs[0])
    segmented.replay(None)
    segmented.add_call(lambda *arguments: log.append(str(arguments[0])), ("attention", *inputs_of("captured").flat()))
    segmented.add_graph(graphs[1])
    segmented.replay(inputs_of("now"))
    assert log == ["a", "a", "attention", "b"]


def test_attention_ops_of_eager_code_are_handed_over_and_others_run() -> None:
    seen: list[tuple[Any, tuple[Any, ...]]] = []
    out, cache = torch.zeros(1, 1, 16), torch.zeros(1, 2, 16, 1, 16)
    integers = torch.zeros(1, dtype=torch.int32)
    batch = torch.tensor([0, 1], dtype=torch.int32), integers + 1, integers[None], integers.long(), integers.repeat(3)
    arguments = [
        *(torch.ones(1, 1, 16) for _ in range(3)),
        cache,
        out,
        1.0,
        0,
        0.0,
        None,
        None,
        *batch,
        "torch",
        integers[:0],
        None,
    ]
    with AttentionsOfEagerCode(lambda function, given: seen.append((function, given))):
        torch.ops.compiled_engine.attention.default(*arguments)
        total = torch.ones(3).add(1, alpha=2).sum()
    assert total == 9
    assert len(seen) == 1
    assert all(one is other for one, other in zip(seen[0][1], arguments, strict=True) if isinstance(one, torch.Tensor))
    assert not out.any()
    assert not cache.any()
