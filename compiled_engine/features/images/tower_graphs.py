"""CUDA graphs of a vision tower: fixed inputs, to which images are padded, and the tower's forward over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from compiled_engine.attention.inputs import padding_of
from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler.signature import Signature
from compiled_engine.graphs.compiler.stitch import Forward
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey, GraphKind
from compiled_engine.models.vision.padded_inputs import (
    blank_inputs,
    fits,
    padded_inputs,
    padded_sizes,
    patches_of_token,
)
from compiled_engine.vision import VisionDescription

PURPOSE = "tower"


@dataclass(frozen=True)
class TowerForwards:
    """A tower's forward, and `distinct`, a shorter one with one layer of each kind, which warms up all kernels."""

    signature: Signature
    call: Forward
    distinct: Forward


class TowerGraphs:
    """CUDA graphs of a vision tower's forward, for the numbers of tokens in config.graph.token_sizes.

    Implements Capturable, the interface of work that graphs capture. A token here is an embedding of an image's grid,
    or a tile if the tower divides images into tiles. Attention is captured too. config: the tower's. replay: replays
    the graph of a key for a number of tokens, and returns its result.
    """

    def __init__(
        self,
        description: VisionDescription,
        config: EngineConfig,
        forwards: TowerForwards,
        replay: Callable[[GraphKey, int], torch.Tensor],
    ) -> None:
        self._description, self._forwards, self._replay = description, forwards, replay
        self._tensors = forwards.signature.tensors
        self.keys: dict[int, GraphKey] = {}
        for num_tokens in config.graph.token_sizes:
            num_rows = padded_sizes(description, num_tokens)["requests"]
            longest = num_tokens * patches_of_token(description)  # of one image
            self.keys[num_tokens] = GraphKey(
                GraphKind.FULL,
                num_tokens,
                num_rows,
                max_query_len=longest,
                max_seq_len=longest,
                purpose=PURPOSE,
            )
        largest = padded_sizes(description, max(self.keys))
        self._buffers = padding_of(self._tensors, largest, config.device)
        self.num_replays = 0

    def key_for(self, inputs: Mapping[str, torch.Tensor]) -> GraphKey | None:
        """Return the key of the smallest graph for these inputs (`tower_inputs`); None if no graph holds them."""
        fitting = (
            key
            for num_tokens, key in self.keys.items()
            if fits(self._description, self._tensors, inputs, padded_sizes(self._description, num_tokens))
        )
        return next(fitting, None)

    def embed(self, key: GraphKey, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Replay the key's graph on inputs that fit it, and return the tower's result, followed by rows of padding.

        Does not wait for the device. The result is valid until the next replay of any graph.
        """
        self.write(key, inputs)
        self.num_replays += 1
        pixels = inputs[self._tensors[0].name]
        return self._replay(key, len(pixels))

    def write(self, key: GraphKey, inputs: Mapping[str, torch.Tensor]) -> None:
        """Copy inputs to the buffers of the key's graph, padded."""
        for name, tensor in padded_inputs(self._description, inputs, self._sizes(key)).items():
            into = self._buffers[name][: len(tensor)]
            is_there = tensor.device.type == into.device.type
            into.copy_(tensor if is_there else tensor.pin_memory(), non_blocking=True)

    # Capturable ------------------------------------------------------------------------------------------------------

    def fill(self, key: GraphKey) -> None:
        """Write the inputs of one image that takes all tokens of the key. See Capturable.

        The pixels in the buffer are left as they are.
        """
        self.write(key, blank_inputs(self._description, self._sizes(key)))

    def run(self, key: GraphKey) -> torch.Tensor:
        return self._run(key, self._forwards.call)

    def warm_up(self, key: GraphKey) -> None:
        self._run(key, self._forwards.distinct)

    def tensor_ids(self) -> tuple[int, ...]:
        return tuple(map(id, self._buffers.values()))

    def _run(self, key: GraphKey, forward: Forward) -> torch.Tensor:
        sizes = self._sizes(key)
        given = {
            tensor.name: self._buffers[tensor.name][: tensor.shape(sizes)[0]]
            for tensor in self._tensors
            if not tensor.on_host
        }
        host_3 = torch.tensor([0, key.max_query_len, key.max_seq_len], dtype=torch.int32, device="cpu")
        given["attention_inputs.host_3"] = host_3
        with torch.no_grad():
            result: torch.Tensor = forward(*self._forwards.signature.passed(given))
        return result

    def _sizes(self, key: GraphKey) -> dict[str, int]:
        return padded_sizes(self._description, key.num_tokens)
