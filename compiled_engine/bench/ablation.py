"""What each part of the engine is worth: the same workload on variants of it, each in fresh processes.

First every variant with something to compile starts once, unmeasured, so that the compile cache is warm. Then the
repeats are interleaved: every variant once, then every variant again; what drifts (clocks, other users) meets all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from compiled_engine.bench.ablation_workload import AblationWorkload
from compiled_engine.bench.bounds import ModelSizes
from compiled_engine.bench.fresh_process import WorkerError, run_worker
from compiled_engine.bench.variants import Variant
from compiled_engine.bench.workloads import summary
from compiled_engine.config import EngineConfig
from compiled_engine.process.progress import Progress
from compiled_engine.runner.kv_cache import block_bytes

# Cores for a process that compiles, with processes of its own from this many on.
CORES_OF_A_START = 4
# Memory of a start beyond weights and KV cache: activations, graphs, the CUDA context.
EXTRA_BYTES = 4 << 30


@dataclass(frozen=True)
class Preparation:
    """How variants are started to fill the cache: `at_a_time` processes, each with a KV cache of `num_blocks`.

    eager: also variants that do not compile the model, whose kernels a GPU's first start compiles all the same.
    """

    at_a_time: int
    num_blocks: int
    eager: bool


COUNTS = ("compiles_after_start", "captures", "graph_fallbacks", "preemptions")

Run = Callable[[Mapping[str, Any], Mapping[str, Any] | None], dict[str, Any]]


def measure(
    chosen: Sequence[Variant],
    shared: Mapping[str, Any],
    workload: AblationWorkload,
    repeats: int,
    preparation: Preparation,
    progress: Progress,
    run: Run = run_worker,
) -> list[dict[str, Any]]:
    """A record for each variant, in order: name, options, and figures, or error, or both where a later repeat failed.

    shared: engine options of all variants, as JSON. run: starts a worker.

    Figures are {"median", "spread": [least, most]} over the repeats, or None where there is no such figure:
    tpot_ms and step_ms (objects, by batch size), mixed_step_ms, prefill_tokens_per_s, start_up_s (process start to
    first token, seen from outside), kernels (of a decode step at batch 1), memory_bytes (an object:
    without_kv_cache, kv_cache, graphs_predicted, graphs_used); start_up_stages_s has medians by stage; COUNTS are
    the most of a repeat.
    """
    errors = _prepare(chosen, shared, preparation, progress, run)
    results: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in chosen}
    for repeat in range(1, repeats + 1):
        for variant in chosen:
            if variant.name in errors:
                continue
            with progress.stage(f"repeat {repeat} of {repeats}: {variant.name}", total=1) as advance:
                try:
                    results[variant.name].append(run(variant.engine_options(shared), workload.as_record()))
                except WorkerError as error:
                    errors[variant.name] = str(error)
                advance(1)
    records = []
    for variant in chosen:
        record: dict[str, Any] = {"name": variant.name, "options": dict(variant.options)}
        if results[variant.name]:
            record |= figures(results[variant.name])
        if variant.name in errors:
            record["error"] = errors[variant.name]
        records.append(record)
    return records


def _prepare(
    chosen: Sequence[Variant], shared: Mapping[str, Any], preparation: Preparation, progress: Progress, run: Run
) -> dict[str, str]:
    """Start every variant with something to compile, once; what failed, by name."""
    compiled = [variant for variant in chosen if variant.compiles or preparation.eager]
    errors: dict[str, str] = {}

    def start(variant: Variant) -> None:
        try:
            run(variant.engine_options(shared) | {"num_blocks": preparation.num_blocks}, None)
        except WorkerError as error:
            errors[variant.name] = str(error)

    with (
        progress.stage("prepare: compile each variant once", total=len(compiled)) as advance,
        ThreadPoolExecutor(preparation.at_a_time) as pool,
    ):
        for _ in pool.map(start, compiled):
            advance(1)
    return errors


def figures(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians and spreads of a variant's repeats."""

    def column(read: Callable[[Mapping[str, Any]], float | None]) -> dict[str, Any] | None:
        values = [value for value in map(read, results) if value is not None]
        return summary(values) if values else None

    def columns(name: str) -> dict[str, Any] | None:
        first = results[0][name]
        return first and {key: summary([result[name][key] for result in results]) for key in first}

    stages = [span["name"] for span in results[0]["start_up"] if span["parent"] is None]
    return {
        "repeats": len(results),
        "tpot_ms": columns("tpot_ms"),
        "step_ms": {
            batch: summary([value for result in results for value in result["step_ms"][batch]])
            for batch in results[0]["step_ms"]
        },
        "mixed_step_ms": column(lambda result: result["mixed_step_ms"]),
        "prefill_tokens_per_s": column(lambda result: result["prefill_tokens_per_s"]),
        "start_up_s": column(lambda result: result["wall_s"]),
        "start_up_stages_s": {stage: summary([_seconds(r, stage) for r in results])["median"] for stage in stages},
        "kernels": column(lambda result: result["kernels"]),
        "memory_bytes": columns("memory_bytes"),
        **{name: max(result[name] for result in results) for name in COUNTS},
    }


def _seconds(result: Mapping[str, Any], stage: str) -> float:
    return sum(span["seconds"] for span in result["start_up"] if span["name"] == stage)


def prepare_with(config: EngineConfig, sizes: ModelSizes) -> Preparation:
    """As many processes as there are cores for, and memory: half of the device's. The cache holds one request."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if config.device.type == "cuda":
        memory = torch.cuda.get_device_properties(config.device).total_memory
    else:
        memory = psutil.virtual_memory().total
    # A small machine compiles in the starting process itself: one on each core.
    by_cores = cores if cores < CORES_OF_A_START else cores // CORES_OF_A_START
    num_blocks = -(-config.model.max_model_len // config.cache.block_size)
    by_memory = memory // 2 // (2 * sizes.weight_bytes + num_blocks * block_bytes(config) + EXTRA_BYTES)
    return Preparation(max(1, min(by_cores, by_memory)), num_blocks, eager=config.device.type == "cuda")
