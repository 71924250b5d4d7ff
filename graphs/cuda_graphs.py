"""Capture and replay of full decode graphs: forward and logits of a padded batch, as one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from compiled_engine.graphs.dispatcher import GraphKey
from compiled_engine.progress import Progress

Step = Callable[[GraphKey], torch.Tensor]


class CudaGraphManager:
    """Owns the captured graphs, their memory pool and the buffer that their results are left in.

    Kernels in a graph read fixed addresses: the caller writes a batch's inputs into the same buffers each time and
    reads the result before the next replay.
    """

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._result: torch.Tensor | None = None
        self._sealed = False
        self.capture_bytes: dict[int, int] = {}  # by the number of requests

    @property
    def bytes_used(self) -> int:
        return sum(self.capture_bytes.values())

    @property
    def num_captures(self) -> int:
        return len(self._graphs)

    def capture(self, keys: Iterable[GraphKey], step: Step, progress: Progress) -> None:
        """Capture `step(key)`, which returns logits [num_requests, V], for every key, the largest first.

        The largest needs the most memory, and the others then fit into its pool. Each key runs once before its
        capture, so that lazy initialisation does not end up in a graph. Afterwards no capture is accepted.
        """
        if self._sealed:
            raise RuntimeError("CUDA graphs are captured once, at start-up")
        keys = sorted(keys, key=lambda key: key.num_tokens, reverse=True)
        pool = torch.cuda.graph_pool_handle()
        with progress.stage("capture CUDA graphs", total=len(keys)) as advance:
            for key in keys:
                warm = step(key)
                if self._result is None:
                    self._result = torch.empty_like(warm)
                del warm
                torch.cuda.synchronize()
                free_before = torch.cuda.mem_get_info()[0]
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._result[: key.num_requests].copy_(step(key))
                self._graphs[key] = graph
                self.capture_bytes[key.num_requests] = max(0, free_before - torch.cuda.mem_get_info()[0])
                advance(1)
        self._sealed = True

    def replay(self, key: GraphKey) -> torch.Tensor:
        """Logits [key.num_requests, V] of the batch in the input buffers; valid until the next replay."""
        self._graphs[key].replay()
        assert self._result is not None
        return self._result[: key.num_requests]

    def close(self) -> None:
        """Give the graphs' memory back."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._result = None
