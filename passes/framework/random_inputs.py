"""Makes random inputs for a graph: a valid batch, a filled KV cache, and weights of ordinary magnitude.

Inputs that passes add (step tensors) hold their padding value, such as "no adapter", with which an op changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compiled_engine.attention.inputs import ANGLE_LENGTHS, TOKEN_TYPES, padding_of, step_of
from compiled_engine.attention.kv_codes import encode, planes
from compiled_engine.attention.latent_codes import CodedRows
from compiled_engine.attention.op import LATENT_ATTENTION, LATENT_ATTENTION_VALUE
from compiled_engine.kv_format import head_dim_of, is_coded
from compiled_engine.passes.framework.graph_inputs import Source, source_of
from compiled_engine.passes.framework.matching import named
from compiled_engine.passes.framework.parameter import (
    CODES,
    COLUMNS,
    INPUT_SCALE,
    KEPT,
    KV_SCALES,
    ROW_SCALES,
    SCALES,
    ZEROS,
    Parameter,
    compute,
)

MOST_CONTEXT = 24


def _latent_dim(cache: fx.Node) -> int:
    """Return the number of elements of a latent in the rows of a cache; 0 without latent attention to it."""
    calls = [user for user in cache.users if user.target in (LATENT_ATTENTION, LATENT_ATTENTION_VALUE)]
    return int(named(calls[0])["weight_Cr"].meta["val"].shape[1]) if calls else 0


class RandomInputs:
    """Random values for the inputs of a graph.

    A value is drawn once per input name, so the graphs before and after a rewrite read the same values.
    """

    def __init__(self, graph: fx.Graph, num_tokens: int, device: torch.device, scale: float):
        """Make a batch of `num_tokens` tokens: up to two decodes, and a prompt with the remaining tokens.

        If there is more than one token, the first has no KV cache slot (-1), so it is not written to the cache. scale:
        factor of embeddings, matrices and biases; a small one makes hidden states so small that a norm's eps matters.
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
            latent_dim = _latent_dim(placeholders[name])
            self._arguments[name] = self._cache((num_blocks, *fake.shape[1:]), fake.dtype, latent_dim)
        sizes = {"tokens": num_tokens, "requests": len(self._arguments["attention_inputs.seq_lens_R"])}
        asked = [node.meta["step_tensor"] for node in placeholders.values() if "step_tensor" in node.meta]
        self._arguments |= padding_of((*asked, TOKEN_TYPES), sizes, device)
        if "rows_R" in placeholders:  # state rows of recurrences; requests beyond them have none
            sources = map(source_of, placeholders.values())
            num_rows = min(s.shape[0] for s in sources if isinstance(s, Parameter) and s.role == KEPT)
            rows_R = torch.arange(sizes["requests"], dtype=torch.int32)
            rows_R[num_rows:] = -1
            self._arguments["rows_R"] = rows_R.to(device)
        if ANGLE_LENGTHS.name in placeholders:  # some of the requests are longer than any border
            positions_T = self._arguments["positions_T"]
            self._arguments[ANGLE_LENGTHS.name] = torch.where(positions_T % 2 == 0, positions_T + 1, 1 << 20)
        for name, node in placeholders.items():  # other inputs with a row per token: hidden states, and indices
            if source_of(node).kind == "argument" and name not in self._arguments:
                fake = node.meta["val"]
                shape = (num_tokens, *fake.shape[1:])
                if fake.is_floating_point():
                    self._arguments[name] = self._normal(shape, fake.dtype)
                else:
                    self._arguments[name] = torch.zeros(shape, dtype=fake.dtype, device=device)

    def of(self, placeholder: fx.Node) -> Any:
        """Return the value of a placeholder: a tensor, or an int for a size."""
        source = source_of(placeholder)
        if isinstance(source, Source):
            value = self._arguments[source.name]
            return value.shape[source.dim] if source.kind == "size" else value
        return compute(source, self.parameter)

    def parameter(self, parameter: Parameter) -> torch.Tensor:
        """Return the value of a tensor of the model, drawn at the first call. The parameter must have no members.

        Norm weights are around 1. With scale 1, multiplying by a matrix preserves the magnitude of the input.
        """
        name, shape = parameter.name, parameter.shape
        if name not in self._parameters:
            value = self._normal(shape, torch.float32)
            if parameter.role == COLUMNS:  # the same, so that linears may be merged
                value = torch.arange(shape[1] - 1, -1, -1).view(shape)
            elif parameter.role == SCALES and parameter.torch_dtype == torch.uint8:  # exponents plus 127
                value = 117 + self._integers(8, value.numel()).view(shape)
            elif parameter.torch_dtype in (torch.uint8, torch.int8):  # codes, all patterns; zero points of four bits
                value = self._integers(16 if parameter.role == ZEROS else 256, value.numel()).view(shape)
            elif parameter.role == CODES:
                largest = torch.finfo(parameter.torch_dtype).max
                value = (100 * value).clamp(-largest, largest)  # torch 2.11 converts larger ones to NaN
            elif parameter.role == SCALES and parameter.torch_dtype == torch.float8_e4m3fn:
                value = value.exp().clamp(max=torch.finfo(parameter.torch_dtype).max)
            elif parameter.role in (SCALES, ROW_SCALES):  # over three decades
                value = value.exp() / 1e3 * self._scale
            elif parameter.role == INPUT_SCALE:  # equal, so that linears may be merged
                value = torch.full_like(value, 0.02)
            elif parameter.role == KV_SCALES:
                value = (0.3 * value).exp()
            elif len(shape) > 1:
                value *= self._scale if "embed" in name else self._scale / shape[-1] ** 0.5
            else:
                value = self._scale * value if name.endswith("bias") else 1 + 0.2 * value
            self._parameters[name] = value.to(self._device, parameter.torch_dtype)
        return self._parameters[name]

    def _normal(self, shape: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
        sizes = tuple(int(size) for size in shape)
        return torch.randn(sizes, generator=self._generator).to(self._device, dtype)

    def _cache(self, shape: tuple[Any, ...], dtype: torch.dtype, latent_dim: int) -> torch.Tensor:
        """Return a KV cache of this shape with normally distributed keys and values, or rows of latent attention.

        If the dtype is that of 8-bit codes, the cache holds the codes that the KV write kernels would store.
        """
        if not is_coded(dtype):
            return self._normal(shape, dtype)
        cache = torch.zeros(tuple(int(size) for size in shape), dtype=dtype, device=self._device)
        of_cache: tuple[torch.Tensor, ...]
        if latent_dim:
            of_cache = CodedRows.planes(cache, latent_dim)
            rows = self._normal((*of_cache[0].shape[:2], head_dim_of(cache, latent_dim)), torch.float32)
            new: tuple[torch.Tensor, ...] = CodedRows.of(rows, dtype, latent_dim)
        else:
            of_cache = planes(cache)
            new = encode(self._normal(of_cache[0].flatten(0, 1).shape, torch.float32), dtype, None)
        for plane, values in zip(of_cache, new, strict=True):
            plane.copy_(values.view_as(plane))
        return cache

    def _integers(self, high: int, count: int) -> torch.Tensor:
        return torch.randint(high, (count,), generator=self._generator)

    def _fill_batch(self, num_tokens: int, block_size: int) -> None:
        num_requests = min(num_tokens, 3)
        lens_R = [1] * (num_requests - 1) + [num_tokens - (num_requests - 1)]
        computed_R = (self._integers(MOST_CONTEXT, num_requests) + 1).tolist()
        spans = [range(start, start + count) for start, count in zip(computed_R, lens_R, strict=True)]
        blocks_each = -(-max(span.stop for span in spans) // block_size)
        # Block 0 belongs to no request, so that writes to a wrong slot are detected.
        table_RB = torch.randperm(num_requests * blocks_each, generator=self._generator) + 1
        table_RB = table_RB.view(num_requests, blocks_each)
        ids_T = self._integers(8, num_tokens).tolist()
        self._arguments = step_of(ids_T, spans, table_RB.tolist(), block_size, self._device)
        if num_tokens > 1:
            self._arguments["attention_inputs.slot_mapping_T"][0] = -1
