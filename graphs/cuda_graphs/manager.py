"""Manages the CUDA graphs of an engine: captures them, replays them by key, predicts and measures their memory.

A graph captures the work of a `Capturable`. `GraphCounters` counts batches that run with and without a graph.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.graphs.cuda_graphs.capture import Capture, Replayable
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher, GraphKey, GraphKind
from compiled_engine.graphs.cuda_graphs.memory import (
    MOST_SAMPLES,
    MemoryReading,
    capture_order,
    enough_samples,
    families,
    total_bytes,
)
from compiled_engine.process.progress import Progress

log = logging.getLogger("compiled_engine")


class Capturable(Protocol):
    """Work that can be captured, such as a step of the engine. Its kernels only access buffers at fixed addresses."""

    def fill(self, key: GraphKey) -> None:
        """Write a dummy batch of the key's size to the buffers, for which `run` changes no state.

        Called before the capture.
        """
        ...

    def warm_up(self, key: GraphKey) -> None:
        """Load and allocate everything that the first `run` for the key needs. Called before the capture."""
        ...

    def run(self, key: GraphKey) -> torch.Tensor:
        """Run the work on the padded batch in the buffers; this is captured.

        Returns the graph's result: [num_tokens, ...] for a step of the engine's model, the logits of the last forward
        for a draft model. Unless the key is FULL, attention ops are passed to `Capture.on_attention`.
        """
        ...

    def tensor_ids(self) -> tuple[int, ...]:
        """Return the `id` of each buffer's tensor. Replays assert that no buffer was replaced since the capture."""
        ...


class Captured(NamedTuple):
    """A captured graph, the work that it holds, and its result."""

    graph: Replayable
    result: torch.Tensor  # see Capturable.run
    step: Capturable
    tensor_ids: tuple[int, ...]  # result of the step's tensor_ids at the capture


class CudaGraphManager:
    """Captures one graph for each key, replays the graphs, and owns their memory pool.

    steps: the work to capture for each key. The kernels of a graph read fixed addresses. The caller writes the inputs
    of each batch to the same buffers, and reads the result before the next replay. Graphs without attention are
    captured first, and large graphs before small ones, so that the memory pool grows to the size that the largest graph
    needs, and the other graphs fit into the pool.
    """

    def __init__(self, steps: Mapping[GraphKey, Capturable], capture: Capture):
        self._capture, self._steps = capture, dict(steps)
        self._pending = sorted(self._steps, key=capture_order, reverse=True)
        self._graphs: dict[GraphKey, Captured] = {}
        self._memory: dict[GraphKey, MemoryReading] = {}
        self._kept_by_driver = 0  # bytes that the driver keeps for later graphs after `predict` has released its graphs
        self.capture_seconds = 0.0

    @property
    def num_captures(self) -> int:
        return len(self._graphs)

    @property
    def bytes_used(self) -> int:
        """The device memory of all captured graphs in bytes, as measured, including memory that the driver keeps."""
        of_graphs = (([self._memory[key] for key in family], len(family)) for family in families(self._memory))
        return total_bytes(of_graphs) + self._kept_by_driver

    @property
    def memory_by_key(self) -> dict[str, MemoryReading]:
        """The increase of device memory during the capture of each graph, by the key's name."""
        return {key.name: reading for key, reading in self._memory.items()}

    @property
    def names_to_capture(self) -> list[str]:
        """The names of the keys whose graphs are not captured yet, in reverse order: the last one is captured next."""
        return [key.name for key in self._pending]

    def predict(self, all_reduce_min: Callable[[int], int]) -> int:
        """Predict the device memory of all graphs, in bytes, by capturing, measuring and releasing a few of them.

        Must be called when everything that a step uses is in memory, except the full KV cache. all_reduce_min: returns
        the minimum of a number over all ranks; all ranks must capture the same graphs, although each rank measures its
        own device.
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
        """Prepare captures if `predict` is not called. Returns `predicted`, the prediction of an earlier process.

        Allocates the memory that captures need in addition to the graphs' memory, such as cuBLAS workspaces.
        """
        if self._pending:
            with self._capture.session():
                for family in families(self._pending):
                    step = self._steps[family[0]]
                    step.fill(family[0])
                    step.warm_up(family[0])
            self._capture.settle()
        return predicted

    def capture_all(self, progress: Progress) -> None:
        """Capture all graphs that are not captured yet. Errors of a capture are passed on."""
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
        self.capture_seconds += time.perf_counter() - start

    def _capture_one(self, key: GraphKey) -> tuple[Captured, MemoryReading]:
        step = self._steps[key]
        step.fill(key)
        step.warm_up(key)  # so that lazy initialisation is not captured
        before = self._capture.memory()
        capture = self._capture.whole if key.kind is GraphKind.FULL else self._capture.segments
        captured = Captured(*capture(lambda: step.run(key)), step, step.tensor_ids())
        return captured, self._capture.memory().since(before)

    def replay(self, key: GraphKey, inputs: AttentionInputs | None) -> torch.Tensor:
        """Replay the key's graph on the batch in the buffers. Returns the result, see Capturable.run.

        The key's graph must have been captured. The result is valid until the next replay of any graph. inputs:
        attention inputs of the unpadded batch if attention runs between graphs; None for a FULL graph.
        """
        captured = self._graphs[key]
        assert captured.step.tensor_ids() == captured.tensor_ids, "a buffer that the graph reads was replaced"
        captured.graph.replay(inputs)
        return captured.result

    def close(self) -> None:
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()
        self._pending.clear()


def _spread(family: Sequence[GraphKey]) -> Iterator[GraphKey]:
    """Yield the keys of a family that are to be captured for a prediction: the two largest, then evenly spaced ones.

    family: keys that differ only in size, the largest first. The largest graphs determine the size of the memory pool:
    even the second largest graph may not fit into the memory of the largest.
    """
    yield from family[:2]
    step = max(1, len(family) // MOST_SAMPLES)
    yield from family[1 + step :: step]


class Fallback(Enum):
    """Reasons why a batch runs without a graph although graphs are enabled."""

    NO_SUCH_GRAPH = "the mode captures only decodes"
    TOO_LARGE = "larger than every captured size"
    DECODES_TOO_LARGE = "more decodes than every captured size"
    NO_VARIANT = "no graph of the forward's variant holds the batch"
    HIDDEN_STATES = "prompt log-probabilities need the hidden states"


class GraphCounters:
    """Counts the batches that run with and without a graph, by size and by reason.

    Logs a warning for the first batch with more decodes than the largest decode graph.
    """

    def __init__(self, dispatcher: Dispatcher):
        self._dispatcher = dispatcher
        self._replays: Counter[GraphKey] = Counter()
        self._padded_tokens = 0
        self._fallbacks: Counter[Fallback] = Counter()
        self._decodes: Counter[int] = Counter()
        self._mixed: Counter[int] = Counter()

    def batch(self, num_tokens: int, decodes_only: bool) -> None:
        """Add a batch to the histogram of batch sizes. Must be called for every batch, with or without a graph."""
        (self._decodes if decodes_only else self._mixed)[num_tokens] += 1

    def replay(self, key: GraphKey, num_tokens: int) -> None:
        self._replays[key] += 1
        self._padded_tokens += key.num_tokens - num_tokens

    def no_key(self, num_tokens: int, decodes_only: bool, variant: str = "") -> None:
        """Count a batch for which the dispatcher has no graph; count nothing if it has no graphs at all.

        variant: that of the forward.
        """
        if variant and self._dispatcher.keys:
            self.fallback(Fallback.NO_VARIANT, f"{num_tokens} tokens")
        elif decodes_only and self._dispatcher.keys:
            self.fallback(Fallback.DECODES_TOO_LARGE, f"{num_tokens} decodes")
        elif self._dispatcher.token_keys:
            self.fallback(Fallback.TOO_LARGE, f"{num_tokens} tokens")
        elif self._dispatcher.decode_keys:
            self.fallback(Fallback.NO_SUCH_GRAPH, f"{num_tokens} tokens")

    def fallback(self, reason: Fallback, batch: str) -> None:
        """Count a batch that runs without a graph for this reason. batch: describes the batch in the warning."""
        self._fallbacks[reason] += 1
        if reason is Fallback.DECODES_TOO_LARGE and self._fallbacks[reason] == 1:
            log.warning("a batch runs without a CUDA graph: %s (%s)", reason.value, batch)

    def metrics(self) -> dict[str, Any]:
        """Return the counts since the start, by metric name. `batch_histogram` counts batches by number of tokens."""
        return {
            "graph_replays": self._replays.total(),
            "graph_replays_by_key": {key.name: count for key, count in self._replays.items()},
            "graph_padded_tokens": self._padded_tokens,
            "graph_fallbacks": self._fallbacks.total(),
            "graph_fallbacks_by_reason": {reason.value: count for reason, count in self._fallbacks.items()},
            "batch_histogram": {"decodes": dict(self._decodes), "mixed": dict(self._mixed)},
        }
