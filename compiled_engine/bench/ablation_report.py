"""An ablation from the user's options to its result: everything is checked before the first process starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from compiled_engine.bench.ablation import measure, prepare_with
from compiled_engine.bench.ablation_workload import AblationWorkload
from compiled_engine.bench.bounds import ModelSizes, model_sizes
from compiled_engine.bench.device_rates import device_rates
from compiled_engine.bench.machine import conditions, plain_options
from compiled_engine.bench.variants import (
    GRAPHS_NEED_CUDA,
    Variant,
    check_options,
    chosen,
    parallel_variants,
    variants,
)
from compiled_engine.config import EngineConfig, GraphMode
from compiled_engine.other_engines.translate import make_options
from compiled_engine.process.progress import Progress
from compiled_engine.resolve.engine import resolve

MAX_MODEL_LEN = 4096
CPU_BATCH_SIZES = (1, 8)
QUICK = AblationWorkload(
    batch_sizes=(1, 8),
    prompt_len=16,
    output_len=17,
    mixed_decodes=4,
    mixed_prompt_len=32,
    num_steps=8,
    prefill_prompts=2,
    prefill_len=200,
)
QUICK_NOTE = "a quick run: it shows that everything works; its figures are of few tokens, and noisy"
# The passes that a quick run leaves out in turn, unless it is asked for other variants.
QUICK_PASSES = ("merge_linears",)


@dataclass(frozen=True)
class Asked:
    """What the user asked for; None leaves the default of the device, or of a quick run.

    alone: also the variants with no pass, and with each alone.
    """

    batch_sizes: tuple[int, ...] | None = None
    prompt_len: int | None = None
    output_len: int | None = None
    variants: tuple[str, ...] = ()
    alone: bool = False
    quick: bool = False


@dataclass(frozen=True)
class Plan:
    """What will be measured. `given`: the user's engine options; `shared`: those of all variants, complete."""

    config: EngineConfig
    given: Mapping[str, Any]
    shared: Mapping[str, Any]
    shape: str | None
    workload: AblationWorkload
    variants: tuple[Variant, ...]
    sizes: ModelSizes
    notes: tuple[str, ...]


def make_plan(options: Mapping[str, Any], shape: str | None, asked: Asked) -> Plan:
    """Raises ValueError, TypeError or OSError for what cannot be measured."""
    check_options(options)
    if options.get("compile_cache") is False:
        raise ValueError("compile_cache is False; allowed: True, since variants start with a warm cache")
    if len(set(asked.batch_sizes or ())) < len(asked.batch_sizes or ()):
        raise ValueError(f"batch is {list(asked.batch_sizes or ())}; allowed: each size once")
    config = _resolve(options)
    workload = _workload(config, options, asked)
    max_model_len = options.get("max_model_len", min(config.model.max_model_len, MAX_MODEL_LEN))
    defaults = {
        "max_model_len": max(workload.longest(), 256) if asked.quick else max_model_len,
        "max_num_seqs": workload.requests_at_once(),
        "num_blocks": workload.num_blocks(config.cache.block_size),
    }
    shared = defaults | dict(options)
    config = _resolve(shared)
    workload.check(config)
    passes = config.compile.passes
    left_out = QUICK_PASSES if asked.quick and not asked.variants else passes
    records = config.graph.mode is GraphMode.RECORDED
    known = variants(config.device.type, passes, left_out, asked.alone, records)
    if not asked.quick or asked.variants:
        known += parallel_variants(config)
    found = chosen(known, asked.variants)
    for variant in found:
        _resolve_variant(variant, shared)
    return Plan(
        config=config,
        given=options,
        shared=plain_options(shared),
        shape=shape,
        workload=workload,
        variants=tuple(found),
        sizes=model_sizes(config.local_model),  # of a rank
        notes=(QUICK_NOTE,) if asked.quick else (),
    )


def run(plan: Plan, repeats: int, progress: Progress) -> dict[str, Any]:
    """The result, as JSON: benchmark ("ablation"), variants (see `ablation.measure`), bound (see
    `AblationWorkload.bound`), rates, which it assumes, workload, repeats, notes, and what `machine.conditions` gives.
    """
    rates = device_rates(plan.config.device, plan.config.model.dtype)
    preparation = prepare_with(plan.config, plan.sizes)
    records = measure(plan.variants, plan.shared, plan.workload, repeats, preparation, progress)
    return {
        "benchmark": "ablation",
        "variants": records,
        "bound": plan.workload.bound(plan.sizes, rates),
        "workload": plan.workload.as_record(),
        "repeats": repeats,
        "notes": [*plan.notes, *([] if plan.config.device.type == "cuda" else [GRAPHS_NEED_CUDA])],
        "rates": asdict(rates),
        **conditions(plan.config, plan.given, plan.shape),
    }


def _workload(config: EngineConfig, options: Mapping[str, Any], asked: Asked) -> AblationWorkload:
    """The default workload, with what was asked for; its prompts fit into the model's length."""
    workload = QUICK if asked.quick else AblationWorkload(seed=config.model.seed)
    if config.device.type != "cuda" and not asked.quick:
        workload = replace(workload, batch_sizes=CPU_BATCH_SIZES)
    asked_for: dict[str, Any] = {
        "batch_sizes": asked.batch_sizes,
        "prompt_len": asked.prompt_len,
        "output_len": asked.output_len,
    }
    workload = replace(workload, **{name: value for name, value in asked_for.items() if value is not None})
    longest = min(config.model.max_model_len, options.get("max_model_len", MAX_MODEL_LEN))
    return replace(workload, prefill_len=max(1, min(workload.prefill_len, longest - 1)))


def _resolve_variant(variant: Variant, shared: Mapping[str, Any]) -> None:
    try:
        resolve(make_options(variant.engine_options(shared)))
    except (TypeError, ValueError) as error:
        raise type(error)(f"variant {variant.name!r} cannot be measured: {error}; --variant chooses others") from error


def _resolve(options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of the whole engine: what the variants lack is taken from it."""
    config = resolve(make_options(options))
    if not config.compile.enabled:
        raise ValueError(f"mode cannot be 'compiled' here: {config.reasons['compile.enabled']}")
    return config
