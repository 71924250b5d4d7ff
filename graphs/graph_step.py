"""What the graphs need from whoever runs the model."""

from __future__ import annotations

from typing import Protocol

import torch

from compiled_engine.graphs.graph_key import GraphKey


class GraphStep(Protocol):
    """A step that can be captured: its kernels read buffers at fixed addresses alone."""

    def fill(self, key: GraphKey) -> None:
        """Write a batch of the key's size into the buffers that leaves no trace when it runs. Not captured."""
        ...

    def run(self, key: GraphKey) -> torch.Tensor:
        """The model on the padded batch in the buffers; what it returns is what the graph leaves, [num_tokens, ...].

        For a key that is not FULL it calls `on_attention` of the graphs in place of the attention ops.
        """
        ...

    def addresses(self) -> tuple[int, ...]:
        """Where the buffers are: in debug runs a replay checks that they still are there."""
        ...
