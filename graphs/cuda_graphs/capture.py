"""Captures work, such as a forward, as CUDA graphs by stream capture. All graphs share a memory pool.

Work is captured as one graph, or in segments: a graph for each part between two attention calls. `Capture` is the
interface, `CudaCapture` the implementation for a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_engine.attention.inputs import AttentionInputs, without_inputs
from compiled_engine.attention.op import ATTENTION_OPS, OnAttention
from compiled_engine.graphs.cuda_graphs.memory import MemoryReading
from compiled_engine.process.memory import collection_paused

Work = Callable[[], torch.Tensor]


class Replayable(Protocol):
    """Captured work. A replay runs the work again, on the memory addresses that it used during the capture."""

    def replay(self, inputs: AttentionInputs | None) -> None:
        """Launch the captured work. inputs: the batch's attention inputs if attention was not captured, else None."""
        ...

    def reset(self) -> None: ...


class Capture(Protocol):
    """Interface for capturing a set of graphs, which share a memory pool.

    Work does not run while it is captured. Each replay fills the result tensor that the capture returned. This tensor
    does not own its memory, and its content is valid until the next replay of any graph of the set.
    """

    def session(self) -> AbstractContextManager[None]:
        """Return a context manager. Work must be warmed up and then captured within its `with` block."""
        ...

    def whole(self, work: Work) -> tuple[Replayable, torch.Tensor]:
        """Capture all of the work as one graph. Returns the graph and the result tensor that its replays fill."""
        ...

    def segments(self, work: Work) -> tuple[Replayable, torch.Tensor]:
        """Capture the work in segments: one graph for each part between attention calls. Attention is not captured.

        Returns the captured work and the result tensor that its replays fill.
        """
        ...

    def on_attention(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Handle an attention call that the work makes, function(*arguments).

        During `segments`, end the current graph, keep the call for replays, and begin the next graph. At other times,
        call `function` at once.
        """
        ...

    def memory(self) -> MemoryReading: ...

    def settle(self) -> None:
        """Wait for the device and release idle memory, so that `memory` measures the memory in use."""
        ...

    def renew(self) -> None:
        """Begin another set of graphs. The graphs of the current set must have been reset."""
        ...


class CudaCapture:
    """Captures graphs on a CUDA device.

    Work is captured on a stream of its own, since the default stream cannot be captured. Unlike `torch.cuda.graph`, a
    capture neither synchronises nor collects garbage, which would take long with a model's many pieces.
    """

    def __init__(self, device: torch.device):
        self._device = device
        # A single stream, as cuBLAS keeps a workspace for every stream it was used in.
        self._stream = torch.cuda.Stream(device)
        self.renew()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._segmented: SegmentedGraph | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            # Garbage collection may free memory that must not be freed during a capture.
            with collection_paused(), torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def whole(self, work: Work) -> tuple[Replayable, torch.Tensor]:
        return self._segments(work, SegmentedGraph(), breaks=False)

    def segments(self, work: Work) -> tuple[Replayable, torch.Tensor]:
        return self._segments(work, SegmentedGraph(), breaks=True)

    def _segments(self, work: Work, captured: SegmentedGraph, breaks: bool) -> tuple[Replayable, torch.Tensor]:
        self._segmented = captured if breaks else None
        try:
            self._begin()
            result = work()
            captured.add_graph(self._end())
        except BaseException:
            self._abandon()
            captured.reset()
            raise
        finally:
            self._segmented = None
        return captured, alias_memory(result)

    def on_attention(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self._segmented is None:
            function(*arguments)
            return
        self._segmented.add_graph(self._end())
        held = (alias_memory(a) if isinstance(a, torch.Tensor) and a.is_cuda else a for a in arguments)
        self._segmented.add_call(function, tuple(held))
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during a capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def _end(self) -> torch.cuda.CUDAGraph:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        return graph

    def _abandon(self) -> None:
        if self._graph is not None:
            with contextlib.suppress(RuntimeError):  # the error that led here may have ended the capture
                self._end()

    def memory(self) -> MemoryReading:
        free, total = torch.cuda.mem_get_info(self._device)
        # The value of `memory_reserved`, without its conversion of hundreds of statistics.
        reserved = torch.cuda.memory_stats_as_nested_dict(self._device)["reserved_bytes"]["all"]["current"]
        return MemoryReading(reserved, total - free - reserved)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def renew(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()


class Graph(Protocol):
    """A captured graph, such as `torch.cuda.CUDAGraph`."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class SegmentedGraph:
    """Captured work as a sequence of graphs with attention calls between them; a single graph has no calls.

    A replay launches the graphs and makes the attention calls, in order.
    """

    def __init__(self) -> None:
        self._graphs: list[Graph] = []
        self._calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def add_graph(self, graph: Graph) -> None:
        self._graphs.append(graph)

    def add_call(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Add an attention call, function(*arguments). A replay makes it after the last graph that was added so far.

        arguments: the arguments during the capture. Attention inputs among them are dropped, since each replay passes
        those of its batch.
        """
        self._calls.append((function, without_inputs(arguments)))

    def replay(self, inputs: AttentionInputs | None) -> None:
        *stretches, last = self._graphs
        if stretches:
            assert inputs is not None
            fields_of_inputs = inputs.flat()
            for graph, (function, arguments) in zip(stretches, self._calls, strict=True):
                graph.replay()
                function(*arguments, *fields_of_inputs)
        last.replay()

    def reset(self) -> None:
        for graph in self._graphs:
            graph.reset()
        self._graphs, self._calls = [], []


class AttentionsOfEagerCode(TorchDispatchMode):
    """A torch dispatch mode for eager code: calls `on_attention` in place of each attention op."""

    def __init__(self, on_attention: OnAttention):
        super().__init__()
        self._on_attention = on_attention

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = ATTENTION_OPS.get(func.name()) if isinstance(func, torch._ops.OpOverload) else None
        if function is None:
            return func(*args, **(kwargs or {}))
        return self._on_attention(function, args)


# Integer types by element size, since the CUDA array interface has no bfloat16.
_INTEGERS = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}


class _Memory:
    """Presents a tensor's memory as integers by the CUDA array interface, which torch.as_tensor can wrap."""

    def __init__(self, tensor: torch.Tensor):
        size = tensor.element_size()
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": _INTEGERS[size],
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }


def alias_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory, shape, strides and dtype of `tensor` that does not keep the memory alive.

    Results of captured work are in the graphs' memory pool. Replays need the results' addresses, but tensors that own
    the memory would prevent other graphs from reusing it. An empty tensor is returned itself.
    """
    if tensor.numel() == 0:
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
