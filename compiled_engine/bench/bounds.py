"""Lower bounds on the time of a step, from what the step must read and multiply and from the device's rates.

A step reads every weight once and the keys and values of all earlier tokens once. It multiplies each token with every
weight and each query with its keys. Recurrent states are read and written, since the next step needs them. The bound is
the longer of reading and multiplying. Launches, activations and other writes are not counted, so no engine with these
weights in this precision can be faster.

The rates are known for some GPUs and measured for other devices.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from compiled_engine.config import ImagesConfig, ModelConfig, RowState
from compiled_engine.kv_format import halves_of
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.passes.linear.experts_codes import modules_of, of_experts
from compiled_engine.recurrence.states import without_drafts

# Modules of vision towers that multiply embeddings, not patches.
_OF_EMBEDDINGS = re.compile("merger|projector|connector")


@dataclass(frozen=True)
class Rates:
    """A device's rates: bytes read and written per second in large copies, and FLOP/s in large matrix products."""

    bytes_per_s: float
    flops_per_s: float
    source: str  # whether they are known or measured


class AttentionSizes(NamedTuple):
    """The sizes of a layer's attention. Layers of a model may differ in their heads."""

    window: int | None  # the most keys that a query sees; None for all
    kv_bytes: int  # a token's keys and values
    flops: int  # of one query with one key


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that determine the minimum cost of a step."""

    weight_bytes: int  # read in every step: all weights but experts and the embedding, of which a step reads a few rows
    linear_params: int  # multiplied with every token
    head_params: int  # multiplied with the tokens that sample
    attention: tuple[AttentionSizes, ...]  # of the layers that attend
    expert_bytes: int = 0  # one expert in all layers
    num_experts: int = 0
    experts_per_token: int = 0
    state_bytes: int = 0  # recurrent states of a request in all layers
    recurrence_flops: int = 0  # recurrences of a token in all layers
    patch_params: int = 0  # of the vision tower, multiplied with every patch
    merger_params: int = 0  # of the vision tower, multiplied with every embedding
    tower_attention_flops: int = 0  # of one query with one key in all layers of the tower
    merged_patches: int = 1  # that become one embedding


class Chunk(NamedTuple):
    """A request's part in a step: how many tokens were computed before, how many are new, and whether it samples."""

    context: float
    new: int
    samples: bool = True


class Job(NamedTuple):
    """A prompt's length, and the lengths of the completions generated from it, in tokens."""

    prompt: int
    outputs: Sequence[int]


def model_sizes(config: ModelConfig) -> ModelSizes:
    """Return the sizes of a model from its config, without allocating weights."""
    model = build_model(config)
    outside = ("embed_tokens", "lm_head", ".experts.")
    body = {id(p): (name, p) for name, p in model.named_parameters() if not any(part in name for part in outside)}
    of_experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
    num_experts = next(iter(of_experts.values())).shape[0] if of_experts else 0
    per_token = _experts_per_token(config) if of_experts else 0
    chosen_params = sum(p.numel() // num_experts for p in of_experts.values()) * per_token
    head = model.lm_head.weight  # type: ignore[union-attr]
    return ModelSizes(
        weight_bytes=sum(_stored_bytes(config, *each) for each in (*body.values(), ("lm_head.weight", head))),
        linear_params=sum(p.numel() for _, p in body.values() if p.dim() == 2) + chosen_params,
        head_params=head.numel(),  # type: ignore[operator]
        attention=tuple(_attention(config)),
        expert_bytes=sum(_stored_bytes(config, name, p) // num_experts for name, p in of_experts.items()),
        num_experts=num_experts,
        experts_per_token=per_token,
        state_bytes=sum(state.row_bytes for state in _states(config)),
        recurrence_flops=sum(_flops_of(state) for state in _states(config)),
    )


def _attention(config: ModelConfig) -> Iterator[AttentionSizes]:
    for layer, window in enumerate(config.sliding_windows):
        heads = config.heads_of(layer)
        if not heads.num_heads:
            continue
        values = halves_of(heads.latent_dim) * heads.num_kv_heads * heads.head_dim
        # With latents, a head's key and value are shorter than the row that they are made from.
        width = heads.key_dim + heads.value_dim if heads.latent_dim else 2 * heads.head_dim
        yield AttentionSizes(window, values * config.dtype.itemsize, 2 * heads.num_heads * width)


def _stored_bytes(config: ModelConfig, name: str, parameter: torch.Tensor) -> int:
    """Return the bytes of a parameter, as codes and scales if the model's rules quantise it."""
    module, _, attribute = name.rpartition(".")
    modules = modules_of(name, 1) if parameter.dim() == 3 else (module,) * (attribute == "weight")
    if config.quantisation is None or parameter.dim() < 2 or not modules:
        return parameter.nbytes
    scheme = config.quantisation.of_parameter(name, modules)
    if isinstance(scheme, str):
        return parameter.nbytes
    *leading, rows, columns = parameter.shape
    rounding = of_experts(scheme.weight) if leading else scheme.weight
    of_tile = rounding.format.scales.itemsize + rounding.format.has_zeros
    of_matrix = math.prod(rounding.stored(rows, columns)) + math.prod(rounding.grid(rows, columns)) * of_tile
    return math.prod(leading) * (of_matrix + 4 * rows * rounding.format.row_scales)


def _experts_per_token(config: ModelConfig) -> int:
    """Return the number of experts per token. If transformers' code runs the model, it is read from config.json."""
    if config.transformers is None:
        return config.experts.per_token
    fields = json.loads(config.transformers.config)
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")
    return next((int(fields[name]) for name in names if fields.get(name)), 0)


def _states(config: ModelConfig) -> list[RowState]:
    """Return the recurrent states that a step reads and writes for a request, without the room for drafts."""
    if (recurrences := config.recurrences) is None:
        return []
    return without_drafts(recurrences.states, recurrences.num_drafts)


def _flops_of(state: RowState) -> int:
    """Return the multiplications and additions that a token takes in the recurrence with this state.

    A state [D, W - 1] is a convolution's, which multiplies W weights per channel. Any other state is counted as a delta
    rule's, which multiplies each matrix with the key and the query, and updates it. For Mamba 2, which does not
    multiply by keys, this is a third too much; the error is less than a hundredth of a layer's products.
    """
    if len(state.shape) == 2:
        return 2 * (math.prod(state.shape) + state.shape[0])
    return 6 * math.prod(state.shape)


def with_tower(sizes: ModelSizes, images: ImagesConfig) -> ModelSizes:
    """Return `sizes` with the sizes of the model's vision tower added."""
    vision = images.vision
    from compiled_engine.models.vision.tower import build_tower  # imports transformers

    products = torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d
    counts = {
        name: module.weight.numel()
        for name, module in build_tower(images.config, torch.bfloat16).named_modules()
        if isinstance(module, products)
    }
    merger = sum(count for name, count in counts.items() if _OF_EMBEDDINGS.search(name))
    return replace(
        sizes,
        patch_params=sum(counts.values()) - merger,
        merger_params=merger,
        tower_attention_flops=4 * vision.num_layers * vision.num_heads * vision.head_dim,
        merged_patches=vision.merged_patches,
    )


def tower_seconds(sizes: ModelSizes, rates: Rates, images: Sequence[int]) -> float:
    """Return the lower bound of the vision tower's time in seconds, from its multiplications alone.

    images: number of embeddings of each image. All patches of an image attend to each other.
    """
    flops = 0
    for embeddings in images:
        patches = embeddings * sizes.merged_patches
        flops += 2 * (patches * sizes.patch_params + embeddings * sizes.merger_params)
        flops += patches**2 * sizes.tower_attention_flops
    return flops / rates.flops_per_s


def step_bytes(sizes: ModelSizes, step: Iterable[Chunk]) -> float:
    """Return the bytes that a step reads (weights once, each request's context and states) or writes (states)."""
    chunks = list(step)
    read = sizes.weight_bytes + _touched_bytes(sizes, sum(chunk.new for chunk in chunks))
    states = sum(sizes.state_bytes * (2 if chunk.context else 1) for chunk in chunks)
    return read + states + sum(_context_bytes(sizes, chunk.context) for chunk in chunks)


def _touched_bytes(sizes: ModelSizes, num_tokens: float) -> float:
    """Return the expected bytes of all experts that num_tokens tokens select, if they select uniformly at random."""
    if not sizes.num_experts:
        return 0.0
    left = (1 - sizes.experts_per_token / sizes.num_experts) ** num_tokens
    return sizes.expert_bytes * sizes.num_experts * (1 - left)


def _context_bytes(sizes: ModelSizes, context: float) -> float:
    """Return the bytes of earlier keys and values, in all layers, that a request's next token attends to.

    context: number of earlier tokens. A window includes the query's own key, which is not an earlier one.
    """
    return sum(
        layer.kv_bytes * (context if layer.window is None else min(context, layer.window - 1))
        for layer in sizes.attention
    )


def _decode_bytes(sizes: ModelSizes, context: int, count: int) -> float:
    """Return the bytes of context and states that `count` consecutive decodes of a request read and write.

    context: tokens before the first of these decodes.
    """
    chunk = Chunk(context, count)
    read = sum(layer.kv_bytes * (_pairs(chunk, layer.window) - count) for layer in sizes.attention)
    return read + 2 * count * sizes.state_bytes


def _decode_flops(sizes: ModelSizes, context: int, count: int) -> float:
    """Return the multiplications and additions of `count` consecutive decodes of a request, all of which sample.

    context: tokens before the first of these decodes.
    """
    return step_flops(sizes, [Chunk(context, count, samples=False)]) + 2.0 * count * sizes.head_params


def _common_bytes(sizes: ModelSizes, context: float) -> float:
    """Return the bytes of keys and values of a common prefix, except in layers whose window may exclude the prefix.

    context: tokens of the prefix.
    """
    return context * sum(layer.kv_bytes for layer in sizes.attention if layer.window is None)


def step_flops(sizes: ModelSizes, step: Iterable[Chunk]) -> float:
    """Return the multiplications and additions of a step: linears, logits of sampling rows, attention, recurrences."""
    flops = 0.0
    for chunk in step:
        flops += 2.0 * (chunk.new * sizes.linear_params + chunk.samples * sizes.head_params)
        flops += sum(_pairs(chunk, layer.window) * layer.flops for layer in sizes.attention)
        flops += chunk.new * sizes.recurrence_flops
    return flops


def _pairs(chunk: Chunk, window: int | None) -> float:
    context, new = chunk.context, chunk.new
    if window is None:
        return new * context + new * (new + 1) / 2
    growing = int(min(new, max(0.0, window - context)))  # queries whose window still covers all keys
    return growing * context + growing * (growing + 1) / 2 + (new - growing) * window


def step_seconds(sizes: ModelSizes, rates: Rates, step: Sequence[Chunk]) -> float:
    """Return the lower bound of a step's time in seconds."""
    return max(step_bytes(sizes, step) / rates.bytes_per_s, step_flops(sizes, step) / rates.flops_per_s)


def tpot_seconds(sizes: ModelSizes, rates: Rates, batch_size: int, prompt_len: int, output_len: int) -> float:
    """Return the lower bound of a decode step's time for `batch_size` requests, averaged over tokens 2 to output_len.

    Bytes are averaged over output positions, not taken at the mean context: with a sliding window the two differ.
    """
    count = max(output_len - 1, 1)
    each = batch_size / count
    read = sizes.weight_bytes + _touched_bytes(sizes, batch_size) + each * _decode_bytes(sizes, prompt_len, count)
    return max(read / rates.bytes_per_s, each * _decode_flops(sizes, prompt_len, count) / rates.flops_per_s)


def prefill_seconds(sizes: ModelSizes, rates: Rates, prompt_lens: Sequence[int]) -> float:
    """Return the lower bound of the time from the arrival of prompts to the first token of each, in seconds."""
    return step_seconds(sizes, rates, [Chunk(0, length) for length in prompt_lens])


def workload_seconds(sizes: ModelSizes, rates: Rates, jobs: Sequence[Job], max_num_seqs: int, common: int = 0) -> float:
    """Return the lower bound of many requests' time in seconds: all prefills, then decodes, `max_num_seqs` at once.

    All prompts begin with `common` tokens, in addition to their own tokens; these are computed once. Each decode reads
    its context, but a step reads a prompt with several completions once. Weights are read once per step, for the
    smallest number of steps. The bound does not hold for steps that overlap a prefill's multiplications with the reads
    of decodes.
    """
    lengths = [length for job in jobs for length in job.outputs]
    steps = max(max(lengths) - 1, -(-sum(length - 1 for length in lengths) // max_num_seqs))
    together = min(max_num_seqs, len(lengths))
    read = steps * (sizes.weight_bytes + _touched_bytes(sizes, together) + _common_bytes(sizes, common))
    flops = 0.0
    for job in jobs:
        alone = len(job.outputs) == 1
        read += 0.0 if alone else (max(job.outputs) - 1) * _common_bytes(sizes, job.prompt)
        for length in job.outputs:
            read += _decode_bytes(sizes, job.prompt if alone else 0, length - 1)
            flops += _decode_flops(sizes, common + job.prompt, length - 1)
    prompts = [Chunk(common, job.prompt) for job in jobs]
    prompt_flops = step_flops(sizes, [Chunk(0, common, samples=False), *prompts])
    prefill = max(sizes.weight_bytes / rates.bytes_per_s, prompt_flops / rates.flops_per_s)
    return prefill + max(read / rates.bytes_per_s, flops / rates.flops_per_s)


# Device name -> measured bytes/s of large copies, FLOP/s of large bf16 products. The whole name must match: a GH200 is
# another device, and "NVIDIA H200 MIG 1g.18gb" a part of one.
KNOWN = {"NVIDIA H200": (4.3e12, 790e12)}
COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
ATTEMPTS = 5


def device_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return the known rates of the device. If none are known, measure them, which takes about a second.

    dtype: that of the matrix products.
    """
    if device.type == "cuda" and dtype.itemsize == 2:
        name = torch.cuda.get_device_name(device)
        if name in KNOWN:
            return Rates(*KNOWN[name], f"known for {name.removeprefix('NVIDIA ')}")
    return measured_rates(device, dtype)


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure and return the device's rates: the best of a few large copies and of a few square products in `dtype`."""
    num_bytes = COPY_BYTES[device.type]
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    copy_s = _copy_seconds(num_bytes, device)
    size = PRODUCT_SIZE[device.type]
    a = torch.ones(size, size, dtype=dtype, device=device)
    b, product = torch.ones_like(a), torch.empty_like(a)
    product_s = _best_seconds(lambda: torch.mm(a, b, out=product), device)
    text = f"measured: a copy of {num_bytes >> 20} MiB, a product of {size} x {size} in {dtype}".replace("torch.", "")
    return Rates(2 * num_bytes / copy_s, 2 * size**3 / product_s, text)


def _copy_seconds(num_bytes: int, device: torch.device) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _best_seconds(lambda: target.copy_(source), device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of ATTEMPTS times of `work` in seconds, after an untimed first run."""
    times = []
    for _ in range(ATTEMPTS + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
