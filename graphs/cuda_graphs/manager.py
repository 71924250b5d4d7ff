"""The captured graphs: explicit capture in a fixed order, replay by key, memory predicted and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.graphs.cuda_graphs.capture import Capture, Replayable
from compiled_engine.graphs.cuda_graphs.key import GraphKey, GraphKind
from compiled_engine.graphs.cuda_graphs.memory import (
    MOST_SAMPLES,
    MemoryReading,
    capture_order,
    enough_samples,
    families,
    total_bytes,
)
from compiled_engine.process.progress import Progress


class Capturable(Protocol):
    """A step that can be captured: its kernels read buffers at fixed addresses alone."""

    def fill(self, key: GraphKey) -> None:
        """Write a batch of the key's size into the buffers that leaves no trace when it runs. Not captured."""
        ...

    def warm_up(self, key: GraphKey) -> None:
        """Load and allocate what `run` does when it first runs for the key. Not captured."""
        ...

    def run(self, key: GraphKey) -> torch.Tensor:
        """The model on the padded batch in the buffers; what it returns is what the graph leaves, [num_tokens, ...], or
        for a draft model the logits of its last pass.

        For a key that is not FULL it calls the capture's `on_attention` in place of the attention ops.
        """
        ...

    def tensor_ids(self) -> tuple[int, ...]:
        """The `id` of a buffer for each use: in debug runs a replay checks that none was replaced."""
        ...


class Captured(NamedTuple):
    """A graph and where its result lies: [key.num_tokens, ...]."""

    graph: Replayable
    result: torch.Tensor


class CudaGraphManager:
    """Owns the graphs of `keys` and their memory pool. Only these are ever captured, each once.

    Kernels in a graph read fixed addresses: the caller writes a batch's inputs into the same buffers each time and
    reads the result before the next replay.

    Graphs that hold no attention are captured first and large ones before small ones: the pool is then as large as
    the largest needs, and the others fit into it.
    """

    def __init__(self, keys: Iterable[GraphKey], capture: Capture, step: Capturable):
        self._capture, self._step = capture, step
        self._pending = sorted(keys, key=capture_order, reverse=True)
        self._graphs: dict[GraphKey, Captured] = {}
        self._captured_ids: tuple[int, ...] = ()
        self._memory: dict[GraphKey, MemoryReading] = {}
        self._kept_by_driver = 0  # of what the graphs of `predict` took, for the next ones
        self.capture_seconds = 0.0

    @property
    def num_captures(self) -> int:
        return len(self._graphs)

    @property
    def bytes_used(self) -> int:
        """Measured; memory that the driver kept ready for graphs included."""
        of_graphs = (([self._memory[key] for key in family], len(family)) for family in families(self._memory))
        return total_bytes(of_graphs) + self._kept_by_driver

    @property
    def memory_by_key(self) -> dict[str, MemoryReading]:
        """Memory of each capture, by the name of its key."""
        return {key.name: reading for key, reading in self._memory.items()}

    @property
    def names_to_capture(self) -> list[str]:
        """The remaining keys, the next one last."""
        return [key.name for key in self._pending]

    def predict(self, all_reduce_min: Callable[[int], int]) -> int:
        """Predict the bytes of all graphs: capture a few, measure and release them.

        Call it when everything that a step uses is in memory, except the full KV cache. all_reduce_min: minimum over
        ranks, which run the same steps but measure their own devices.
        """
        if not self._pending:
            return 0
        graphs: list[Captured] = []
        readings: list[tuple[list[MemoryReading], int]] = []
        self._capture.settle()
        before = self._capture.memory()
        with self._capture.session():
            for family in families(self._pending):
                found: list[MemoryReading] = []
                for key in _spread(family):
                    graph, reading = self._capture_one(key)
                    graphs.append(graph)
                    found.append(reading)
                    if all_reduce_min(enough_samples(found)):
                        break
                readings.append((found, len(family)))
        for captured in graphs:
            captured.graph.reset()
        graphs.clear()
        self._capture.renew()
        self._capture.settle()
        predicted = total_bytes(readings)
        self._kept_by_driver = max(0, min(predicted, self._capture.memory().since(before).driver))
        return predicted

    def expect(self, predicted: int) -> int:
        """Replace `predict` if an earlier process has predicted the same graphs: allocate what they need in addition,
        such as workspaces of the stream. Returns `predicted`.
        """
        if self._pending:
            with self._capture.session():
                for family in families(self._pending):
                    self._step.fill(family[0])
                    self._step.warm_up(family[0])
            self._capture.settle()
        return predicted

    def capture_all(self, progress: Progress) -> None:
        """Capture every key that is left. Raises what a capture raises; afterwards there is nothing left to capture."""
        with progress.stage("capture CUDA graphs", total=len(self._pending)) as advance, self._capture.session():
            self._capture.settle()
            while self._pending:
                self._capture_next()
                advance(1)
        self._capture.settle()

    def _capture_next(self) -> None:
        key = self._pending.pop()
        start = time.perf_counter()
        self._graphs[key], self._memory[key] = self._capture_one(key)
        self._captured_ids = self._step.tensor_ids()
        self.capture_seconds += time.perf_counter() - start

    def _capture_one(self, key: GraphKey) -> tuple[Captured, MemoryReading]:
        self._step.fill(key)
        self._step.warm_up(key)  # so that nothing lazy ends up in a graph
        before = self._capture.memory()
        capture = self._capture.whole if key.kind is GraphKind.FULL else self._capture.segments
        captured = Captured(*capture(lambda: self._step.run(key)))
        return captured, self._capture.memory().since(before)

    def replay(self, key: GraphKey, inputs: AttentionInputs | None) -> torch.Tensor:
        """The result of the batch in the buffers, [key.num_tokens, ...]; valid until the next replay.

        inputs: of the batch itself, for attention that runs between graphs; None for a full graph.
        """
        assert self._step.tensor_ids() == self._captured_ids, "a buffer that graphs read was replaced"
        captured = self._graphs[key]
        captured.graph.replay(inputs)
        return captured.result

    def close(self) -> None:
        """Give the graphs' memory back."""
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()
        self._pending.clear()


def _spread(family: Sequence[GraphKey]) -> Iterator[GraphKey]:
    """The two largest keys first, which determine the pool (the second may not fit into the first's memory); then
    evenly spaced samples.
    """
    yield from family[:2]
    step = max(1, len(family) // MOST_SAMPLES)
    yield from family[1 + step :: step]
