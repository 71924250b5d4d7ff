"""Graphs of the stretches between two attentions, and the attentions, which run between them on the batch as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.op import ATTENTION_OPS, OnAttention

# Where the attention ops take what AttentionInputs holds: counted from the end, since only the tensors before differ.
INPUTS = slice(-8, -2)


class Graph(Protocol):
    """A captured stretch. `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class SegmentedGraph:
    """Replays its graphs and runs its attention calls in turn; with a single graph it is just that."""

    def __init__(self) -> None:
        self._graphs: list[Graph] = []
        self._calls: list[tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...]]] = []

    def add_graph(self, graph: Graph) -> None:
        self._graphs.append(graph)

    def add_call(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """An attention op's function with the arguments of the capture; a replay puts its own inputs into them."""
        self._calls.append((function, arguments[: INPUTS.start], arguments[INPUTS.stop :]))

    def replay(self, inputs: AttentionInputs | None) -> None:
        *stretches, last = self._graphs
        if stretches:
            assert inputs is not None
            middle = input_arguments(inputs)
            for graph, (function, before, after) in zip(stretches, self._calls, strict=True):
                graph.replay()
                function(*before, *middle, *after)
        last.replay()

    def reset(self) -> None:
        for graph in self._graphs:
            graph.reset()
        self._graphs, self._calls = [], []


def input_arguments(inputs: AttentionInputs) -> tuple[Any, ...]:
    """In the order of the attention ops' parameters."""
    return (
        inputs.query_start_loc_R1,
        inputs.seq_lens_R,
        inputs.block_table_RB,
        inputs.slot_mapping_T,
        inputs.host_3,
        inputs.backend,
    )


class AttentionsOfEagerCode(TorchDispatchMode):
    """While it is entered, the attention ops that code calls go to `on_attention` instead."""

    def __init__(self, on_attention: OnAttention):
        super().__init__()
        self._on_attention = on_attention

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = ATTENTION_OPS.get(func.name()) if isinstance(func, torch._ops.OpOverload) else None
        if function is None:
            return func(*args, **(kwargs or {}))
        return self._on_attention(function, args)
