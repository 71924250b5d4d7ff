"""Measure the gain of each pass on a device: a step with all passes is compared with a step without that pass.

The model is traced once. A variant is the model with a set of passes. The compiled parts of all variants' graphs are
kept in one folder, so that equal parts compile once. All variants share their weights. On a GPU a step is one
CUDA graph: forward, logits of the sampled rows, greedy sampling.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compiled_engine.attention.inputs import ForwardArguments, arguments_of, attention_inputs_of, step_of
from compiled_engine.config import EngineConfig
from compiled_engine.engine.cache_memory import allocate
from compiled_engine.graphs.compiled_model import load_piece
from compiled_engine.graphs.compiler.build import apply_passes, compile_pieces
from compiled_engine.graphs.compiler.plan import Plan
from compiled_engine.graphs.compiler.signature import compile_ranges, extra_step_tensors, forward_signature
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.stitch import stitch
from compiled_engine.graphs.compiler.trace import trace, without_storage
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize, parameters_of
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.sampling.sampler import sampling_operations

CONTEXT = 200
ALL = "all"


@dataclass(frozen=True)
class Variant:
    """A set of passes whose steps are timed, with a name for the results."""

    name: str
    passes: tuple[str, ...]


@dataclass(frozen=True)
class Gain:
    """The time that a pass saves in a step of `tokens` tokens."""

    tokens: int
    gain_us: float  # microseconds that the step takes longer without the pass
    noise_us: float  # range of the repeats with the pass


def variants(passes: Sequence[str]) -> list[Variant]:
    """Return the variant with all passes, then for each pass a variant without it."""
    without = (Variant(f"without {name}", tuple(p for p in passes if p != name)) for name in passes)
    return [Variant(ALL, tuple(passes)), *without]


def differing(chosen: Sequence[Variant], plans: Mapping[Variant, Plan]) -> list[Variant]:
    """Return the first variant, and the variants whose compiled graph (plan) differs from the first variant's."""
    whole = plans[chosen[0]]
    return [variant for variant in chosen if variant is chosen[0] or plans[variant] != whole]


@torch.inference_mode()
def measure(
    config: EngineConfig, token_counts: Sequence[int], repeats: int, progress: Progress
) -> dict[str, list[Gain]]:
    """Measure the gains of each pass and return them by the pass's name.

    There is one gain per token count at which the pass changes the compiled graph. It is the difference of the median
    times of a step without and with the pass; the `repeats` measurements of all sets of passes are interleaved. A step
    of n tokens is n decodes with CONTEXT tokens of context each in compile ranges for small batches, otherwise a prompt
    of n tokens.
    """
    model = build_model(config.model)
    chosen = variants(config.compile.passes)
    found: dict[str, list[Gain]] = {name: [] for name in config.compile.passes}
    with tempfile.TemporaryDirectory(prefix="compiled_engine_ablation_") as temporary:
        entry = Path(temporary)
        plans = _compile_all(config, chosen, entry, progress)
        of_plans = dict.fromkeys(parameter for plan in plans.values() for parameter in plan.parameters)
        weights = materialize(model, (*parameters_of(model), *of_plans), config.device)
        load_weights(weights, model, replace(config.model, load_format="dummy"), progress)
        keys = {key for plan in plans.values() for key in plan.piece_keys()}
        pieces = {key: load_piece(entry, key, config.device.type) for key in keys}
        for num_tokens in token_counts:
            compile_range = next(r for r in compile_ranges(config) if num_tokens in r)
            inputs = make_step_inputs(config, num_tokens, CONTEXT, decodes=compile_range.small)
            steps = {
                variant.name: _step(
                    stitch(plans[variant, compile_range], pieces, weights.tensors), model, compile_range, inputs
                )
                for variant in differing(chosen, {variant: plans[variant, compile_range] for variant in chosen})
            }
            samples = _measure_steps(steps, num_tokens, repeats, config.device, progress)
            for name, gain in gains(samples, num_tokens).items():
                found[name].append(gain)
    return found


def _compile_all(
    config: EngineConfig, chosen: Sequence[Variant], entry: Path, progress: Progress
) -> dict[tuple[Variant, CompileRange], Plan]:
    (entry / "pieces").mkdir()
    plans = {}
    pieces: dict[str, str] = {}
    traced = trace(without_storage(build_model(config.model), config.device), forward_signature(config))
    ranges = compile_ranges(config)
    with progress.stage("passes", total=len(chosen) * len(ranges)) as advance:
        for variant in chosen:
            own = replace(config, compile=replace(config.compile, passes=variant.passes, strict=False))
            for compile_range in ranges:
                module, _ = apply_passes(own, traced, compile_range)
                plans[variant, compile_range], unique = make_plan(module.graph, split(module.graph))
                pieces |= unique
                advance(1)
    compile_pieces(entry, pieces, config.compile.workers, progress, Timeline())
    return plans


def _step(
    forward: Callable[..., torch.Tensor], model: nn.Module, compile_range: CompileRange, inputs: StepInputs
) -> Callable[[], torch.Tensor]:
    """Return a function that runs one step as the engine does: forward, logits of the sampled rows, greedy sampling.

    The function returns the sampled token ids, [R].
    """

    def step() -> torch.Tensor:
        result = forward(*inputs.arguments)
        logits_RV = result if compile_range.small else model.logits(result[inputs.logits_rows_R])  # type: ignore[operator]
        return greedy(logits_RV, inputs)

    return step


def greedy(logits_RV: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
    """Run the engine's sampler at temperature 0 on the logits [R, V]. Return the sampled token ids, [R]."""
    on_gpu = logits_RV.device.type == "cuda"
    token_ids_R = torch.empty_like(inputs.seeds_R)
    sampling_operations(on_gpu).choose(
        logits_RV if on_gpu else logits_RV.float(),
        inputs.row_index_R,
        inputs.seeds_R,
        inputs.zeros_R,
        inputs.seeds_R,
        None,
        token_ids_R,
    )
    return token_ids_R


def _measure_steps(
    steps: dict[str, Callable[[], torch.Tensor]],
    num_tokens: int,
    repeats: int,
    device: torch.device,
    progress: Progress,
) -> dict[str, list[float]]:
    """Return microseconds per step by the name of the set of passes, one number per repeat. Repeats are interleaved."""
    with progress.stage(f"measure {num_tokens} tokens", total=len(steps)) as advance:
        timed = {}
        for name, step in steps.items():
            timed[name] = time_step(step, device)
            advance(1)
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(repeats):
            for name, microseconds in timed.items():
                samples[name].append(microseconds())
    return samples


def gains(samples: dict[str, list[float]], num_tokens: int) -> dict[str, Gain]:
    """Return the gain of each pass by its name. Its noise is the range of the samples with all passes.

    samples: microseconds per step by the variant's name, see `variants`.
    """
    whole = samples[ALL]
    return {
        name.removeprefix("without "): Gain(
            num_tokens, statistics.median(values) - statistics.median(whole), max(whole) - min(whole)
        )
        for name, values in samples.items()
        if name != ALL
    }


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step's forward, and of the sampler after it."""

    arguments: ForwardArguments  # of a forward
    logits_rows_R: torch.Tensor  # int64: the sampled tokens
    zeros_R: torch.Tensor  # inputs of the sampler, all [R]
    seeds_R: torch.Tensor
    row_index_R: torch.Tensor


def make_step_inputs(config: EngineConfig, num_tokens: int, context: int, decodes: bool) -> StepInputs:
    """Return random inputs of a step.

    decodes: the step has num_tokens requests, each of which decodes token number `context`. Otherwise it has one prompt
    of num_tokens tokens.
    """
    device, block_size = config.device, config.cache.block_size
    num_requests = num_tokens if decodes else 1
    seq_len = context if decodes else num_tokens
    blocks_per_request = -(-seq_len // block_size)
    generator = torch.Generator(device="cpu").manual_seed(0)
    table_RB = torch.randperm(num_requests * blocks_per_request, generator=generator)
    table_RB = table_RB.view(num_requests, blocks_per_request)
    ids_T = torch.randint(config.model.vocab_size, (num_tokens,), generator=generator).tolist()
    spans = [range(context - 1, context)] * num_tokens if decodes else [range(num_tokens)]
    step = step_of(ids_T, spans, table_RB.tolist(), block_size, device, extra_step_tensors(config))
    step["attention_inputs.host_3"][2] = config.model.max_model_len
    kv_caches = allocate(config, num_requests * blocks_per_request)
    for cache in kv_caches:
        cache.normal_()
    return StepInputs(
        arguments=arguments_of(step, attention_inputs_of(step, config.attention_backend), kv_caches),
        logits_rows_R=step["attention_inputs.query_start_loc_R1"][1:].long() - 1,
        zeros_R=torch.zeros(num_requests, device=device),
        seeds_R=torch.zeros(num_requests, dtype=torch.int64, device=device),
        row_index_R=torch.arange(num_requests, dtype=torch.int32, device=device),
    )


REPLAYS = 20


def time_step(step: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """Warm up a step and, on a GPU, capture it as a CUDA graph.

    Returns a function that times REPLAYS consecutive steps and returns the mean microseconds of a step.
    """
    if device.type != "cuda":
        step()
        return lambda: _host_microseconds(step)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return lambda: _device_microseconds(graph)


def _device_microseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / REPLAYS


def _host_microseconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(REPLAYS):
        step()
    return (time.perf_counter() - start) * 1e6 / REPLAYS
