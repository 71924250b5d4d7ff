"""Stands in for CUDA captures on a CPU: what would be captured runs again at each replay, on the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from compiled_engine.attention.inputs import AttentionInputs, without_inputs
from compiled_engine.graphs.cuda_graphs.memory import MemoryReading

Work = Callable[[], torch.Tensor]


class RecordedGraph:
    """Takes the place of a CUDA graph: fixed results, attention only where it was captured."""

    def __init__(self, capture: RecordedCapture, work: Work, in_segments: bool):
        self._capture, self._work, self._in_segments = capture, work, in_segments
        # Nothing has run yet: a replay that did not write its result would be found out.
        self.result = torch.full_like(work(), float("nan"))

    def replay(self, inputs: AttentionInputs | None) -> None:
        self._capture.inputs = inputs if self._in_segments else None
        self.result.copy_(self._work())
        self._capture.inputs = None

    def reset(self) -> None:
        self._capture.num_reset += 1


class RecordedCapture:
    """Implements `Capture` by recording calls on a CPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._capturing = False
        self.inputs: AttentionInputs | None = None
        self.num_reset = 0

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def whole(self, work: Work) -> tuple[RecordedGraph, torch.Tensor]:
        graph = RecordedGraph(self, work, in_segments=False)
        return graph, graph.result

    def segments(self, work: Work) -> tuple[RecordedGraph, torch.Tensor]:
        self._capturing = True
        graph = RecordedGraph(self, work, in_segments=True)
        self._capturing = False
        return graph, graph.result

    def on_attention(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.inputs is not None:
            function(*without_inputs(arguments), *self.inputs.flat())
        elif not self._capturing:
            function(*arguments)

    def memory(self) -> MemoryReading:
        return MemoryReading(0, 0)

    def settle(self) -> None:
        pass

    def renew(self) -> None:
        self.num_reset = 0
