"""What each pass gains on a device: one step with all passes, and without each.

The model is traced once. Every variant's pieces go into one folder and equal pieces compile once; every variant runs
on the same weights. On a GPU a step is one CUDA graph: forward, logits of the rows that sample, greedy sampling.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from compiled_engine.bench.step_inputs import StepInputs, make_step_inputs
from compiled_engine.bench.step_timing import time_step
from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiled_model import load_piece
from compiled_engine.graphs.compiler.build import apply_passes, compile_pieces
from compiled_engine.graphs.compiler.plan import Plan
from compiled_engine.graphs.compiler.signature import compile_ranges, forward_signature
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.stitch import stitch
from compiled_engine.graphs.compiler.trace import trace, without_storage
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize, parameters_of
from compiled_engine.passes.graph_pass import CompileRange
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.sampling.operations import sampling_operations

CONTEXT = 200
ALL = "all"


@dataclass(frozen=True)
class Variant:
    """A set of passes under test."""

    name: str
    passes: tuple[str, ...]


@dataclass(frozen=True)
class Gain:
    """Microseconds of a step of so many tokens that leaving a pass out costs, and what repeats differ by."""

    tokens: int
    gain_us: float
    noise_us: float


def variants(passes: Sequence[str]) -> list[Variant]:
    """All passes, then all but each."""
    without = (Variant(f"without {name}", tuple(p for p in passes if p != name)) for name in passes)
    return [Variant(ALL, tuple(passes)), *without]


@torch.inference_mode()
def measure(
    config: EngineConfig, token_counts: Sequence[int], repeats: int, progress: Progress
) -> dict[str, list[Gain]]:
    """What leaving each pass out costs at each token count, as medians of interleaved repeats.

    In compile ranges for small batches a step is that many decodes with CONTEXT tokens of context; beyond, one prompt.
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
                for variant in chosen
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
    """A step as the engine runs it: logits of the rows that sample, and their most likely tokens."""

    def step() -> torch.Tensor:
        result = forward(*inputs.arguments)
        logits_RV = result if compile_range.small else model.logits(result[inputs.logits_rows_R])  # type: ignore[operator]
        return greedy(logits_RV, inputs)

    return step


def greedy(logits_RV: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
    """The engine's sampler at temperature 0: token ids [R]."""
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
    """Variant -> microseconds of a step, one figure a repeat."""
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
    """The gain of each pass, from the samples of all variants; the noise is the spread of the whole."""
    whole = samples[ALL]
    return {
        name.removeprefix("without "): Gain(
            num_tokens, statistics.median(values) - statistics.median(whole), max(whole) - min(whole)
        )
        for name, values in samples.items()
        if name != ALL
    }
