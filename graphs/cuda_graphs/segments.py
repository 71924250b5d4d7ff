"""Graphs of the stretches between attentions, and the attentions, which run between them on the unpadded batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_engine.attention.inputs import AttentionInputs, without_inputs
from compiled_engine.attention.op import ATTENTION_OPS, OnAttention


class Graph(Protocol):
    """A captured stretch, such as `torch.cuda.CUDAGraph`."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class SegmentedGraph:
    """Replays graphs and runs attention calls in turn; may consist of a single graph."""

    def __init__(self) -> None:
        self._graphs: list[Graph] = []
        self._calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def add_graph(self, graph: Graph) -> None:
        self._graphs.append(graph)

    def add_call(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Add an attention call with the arguments of the capture; a replay substitutes its own inputs."""
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
    """A mode that passes all attention ops to `on_attention`."""

    def __init__(self, on_attention: OnAttention):
        super().__init__()
        self._on_attention = on_attention

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = ATTENTION_OPS.get(func.name()) if isinstance(func, torch._ops.OpOverload) else None
        if function is None:
            return func(*args, **(kwargs or {}))
        return self._on_attention(function, args)
