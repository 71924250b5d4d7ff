"""Random values for a graph's inputs: a valid batch of so many tokens, a filled cache, and weights of ordinary size."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compiled_engine.passes.graph_inputs import Source, source_of
from compiled_engine.passes.parameter import Parameter, compute

MOST_CONTEXT = 24


class RandomInputs:
    """One batch; the same name always has the same value, so both sides of a rewrite see the same numbers."""

    def __init__(self, graph: fx.Graph, num_tokens: int, device: torch.device, scale: float):
        """Decodes first, then one prompt with the tokens that are left; the first token is written nowhere.

        scale: of embeddings, matrices and biases. A small one makes hidden states in which an eps counts.
        """
        self._scale = scale
        self._generator = torch.Generator(device="cpu").manual_seed(num_tokens)
        self._device = device
        self._parameters: dict[str, torch.Tensor] = {}
        self._arguments: dict[str, torch.Tensor] = {}
        placeholders = {source_of(node).name: node for node in graph.find_nodes(op="placeholder")}
        caches = {name: node.meta["val"] for name, node in placeholders.items() if name.startswith("kv_caches.")}
        block_size = next(iter(caches.values())).shape[2] if caches else 16
        self._fill_batch(num_tokens, int(block_size))
        num_blocks = int(self._arguments["attention_inputs.block_table_RB"].max()) + 2
        for name, fake in caches.items():
            self._arguments[name] = self._normal((num_blocks, *fake.shape[1:]), fake.dtype)

    def of(self, placeholder: fx.Node) -> Any:
        """The value of a graph input."""
        source = source_of(placeholder)
        if isinstance(source, Source):
            value = self._arguments[source.name]
            return value.shape[source.dim] if source.kind == "size" else value
        return compute(source, self.parameter) if source.make else self.parameter(source)

    def parameter(self, parameter: Parameter) -> torch.Tensor:
        """With scale 1 matrices keep the size of what they multiply; the weights of norms are around 1."""
        name, shape = parameter.name, parameter.shape
        if name not in self._parameters:
            value = self._normal(shape, torch.float32)
            if len(shape) > 1:
                value *= self._scale if "embed" in name else self._scale / shape[-1] ** 0.5
            else:
                value = self._scale * value if name.endswith("bias") else 1 + 0.2 * value
            self._parameters[name] = value.to(parameter.torch_dtype)
        return self._parameters[name]

    def _normal(self, shape: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
        sizes = tuple(int(size) for size in shape)
        return torch.randn(sizes, generator=self._generator).to(self._device, dtype)

    def _integers(self, high: int, count: int) -> torch.Tensor:
        return torch.randint(high, (count,), generator=self._generator)

    def _fill_batch(self, num_tokens: int, block_size: int) -> None:
        num_requests = min(num_tokens, 3)
        lens_R = torch.ones(num_requests, dtype=torch.int64)
        lens_R[-1] = num_tokens - (num_requests - 1)
        computed_R = self._integers(MOST_CONTEXT, num_requests) + 1
        seq_lens_R = computed_R + lens_R
        blocks_each = int(-(-seq_lens_R.max() // block_size))
        # Block 0 is nobody's: what a wrong slot hits is seen.
        table_RB = torch.randperm(num_requests * blocks_each, generator=self._generator) + 1
        table_RB = table_RB.view(num_requests, blocks_each)
        ends_R = lens_R.cumsum(0)
        rows_T = torch.repeat_interleave(torch.arange(num_requests), lens_R)
        positions_T = torch.arange(num_tokens) - (ends_R - lens_R)[rows_T] + computed_R[rows_T]
        slots_T = table_RB[rows_T, positions_T // block_size] * block_size + positions_T % block_size
        if num_tokens > 1:
            slots_T[0] = -1
        num_decodes = num_requests if num_tokens == num_requests else num_requests - 1
        host_3 = torch.tensor([num_decodes, int(lens_R.max()), int(seq_lens_R.max())], dtype=torch.int32)
        on_device = {
            "input_ids_T": self._integers(8, num_tokens),
            "positions_T": positions_T,
            "attention_inputs.query_start_loc_R1": torch.cat([torch.zeros(1), ends_R]).int(),
            "attention_inputs.seq_lens_R": seq_lens_R.int(),
            "attention_inputs.block_table_RB": table_RB.int(),
            "attention_inputs.slot_mapping_T": slots_T,
            "attention_inputs.work_W": torch.empty(0, dtype=torch.int32),
        }
        self._arguments = {name: value.to(self._device) for name, value in on_device.items()}
        self._arguments["attention_inputs.host_3"] = host_3
