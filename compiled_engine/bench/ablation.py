"""Measure the gain of each part of the engine: run one workload on variants of the engine, each in fresh processes.

Everything is checked before the first process starts. Each variant with something to compile is started once,
unmeasured, to fill the compile cache. The repeats are then interleaved, so that drift (clocks, other users) affects all
variants alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch

from compiled_engine.bench.bounds import ModelSizes, device_rates, model_sizes
from compiled_engine.bench.processes import ProcessError, run_worker
from compiled_engine.bench.results import conditions, plain_options
from compiled_engine.bench.text_workload import TextWorkload, compare_on_text, most_windows
from compiled_engine.bench.variants import (
    GRAPHS_NEED_CUDA,
    NGRAM_DRAFTS,
    QUANTISED_NOTE,
    Variant,
    check_options,
    chosen,
    drafting_variants,
    image_variants,
    parallel_variants,
    quantised_variants,
    variants,
    whole_engine,
)
from compiled_engine.bench.worker_workloads import AblationWorkload
from compiled_engine.bench.workloads import summary
from compiled_engine.config import EngineConfig, GraphMode, ImagesConfig
from compiled_engine.engine.cache_memory import block_bytes
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.other_engines.translate import make_options
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.process.cores import usable_cores
from compiled_engine.process.progress import Progress
from compiled_engine.resolve.engine import resolve

MAX_MODEL_LEN = 4096
# Pixels on a side of the image in a prompt. Processors make smaller images larger.
IMAGE_SIDE, SMALL_IMAGE_SIDE = 1024, 256
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
NO_LOSS_NOTE = "random weights, or a model without a tokenizer, have no loss: nothing is compared on a text"
# The passes that a quick run disables in turn, unless variants are given.
QUICK_PASSES = ("merge_linears",)


@dataclass(frozen=True)
class Asked:
    """The user's choices for an ablation. None stands for the default of the device, or of a quick run."""

    batch_sizes: tuple[int, ...] | None = None
    prompt_len: int | None = None
    output_len: int | None = None
    # Names. Variants with quantised linears, an 8-bit cache, or n-gram drafts that the options lack are measured only
    # if named.
    variants: tuple[str, ...] = ()
    alone: bool = False  # also measure variants with no pass and with each pass alone
    quick: bool = False
    text: str | None = None  # Text for the loss of quantised variants; None for the bundled model's held-out text.


@dataclass(frozen=True)
class Plan:
    """Plan of an ablation: the variants, the workload, and everything derived from the options."""

    config: EngineConfig
    given: Mapping[str, Any]  # the user's engine options
    shared: Mapping[str, Any]  # complete engine options shared by all variants
    shape: str | None
    workload: AblationWorkload
    variants: tuple[Variant, ...]
    # The text on which quantised variants are compared with the whole engine; None without such variants.
    text: TextWorkload | None
    sizes: ModelSizes
    notes: tuple[str, ...]


def make_plan(options: Mapping[str, Any], shape: str | None, asked: Asked) -> Plan:
    """Return the plan of an ablation. options: the user's engine options. shape: name of a known shape, for the result.

    Raises ValueError, TypeError or OSError if something that is asked for cannot be measured.
    """
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
        known += [*parallel_variants(config), *image_variants(config)]
    drafting = drafting_variants(config, options)
    if config.speculation.num_tokens:
        known += drafting
    if asked.variants:
        known += quantised_variants(config)
        known += () if config.speculation.num_tokens else drafting
    found = chosen(known, asked.variants)
    for variant in found:
        _resolve_variant(variant, shared)
    rounds = any(variant.rounds for variant in found)
    if asked.text is not None and not rounds:
        names = [variant.name for variant in quantised_variants(config)]
        raise ValueError(f"text is given, but no variant rounds; allowed: with one of {', '.join(names)}")
    has_loss = rounds and config.model.load_format != "dummy" and not options.get("skip_tokenizer_init")
    return Plan(
        config=config,
        given=options,
        shared=plain_options(shared),
        shape=shape,
        workload=workload,
        variants=tuple(found),
        text=_text_workload(config, asked) if has_loss else None,
        sizes=model_sizes(local_model(config)),  # those of one rank
        notes=(
            *((QUICK_NOTE,) if asked.quick else ()),
            *((QUANTISED_NOTE,) if rounds else ()),
            *((NO_LOSS_NOTE,) if rounds and not has_loss else ()),
        ),
    )


def _text_workload(config: EngineConfig, asked: Asked) -> TextWorkload:
    text = asked.text if asked.text is not None else (BUNDLED_MODEL_PATH / "held_out.txt").read_text(encoding="utf-8")
    return TextWorkload(text, 1 if asked.quick else most_windows(config.model.vocab_size))


def run(plan: Plan, repeats: int, progress: Progress) -> dict[str, Any]:
    """Run the plan and return the result as JSON, with these keys:

    benchmark: "ablation".
    variants: the records of `measure`, with the `text` of `compare_on_text`.
    bound: see `AblationWorkload.bound`.
    rates: the device's rates that the bound assumes.
    workload, repeats, notes: of the plan and this call.
    Also the keys of `results.conditions`.
    """
    rates = device_rates(plan.config.device, plan.config.model.dtype)
    preparation = prepare_with(plan.config, plan.sizes)
    records = measure(plan.variants, plan.shared, plan.workload, repeats, preparation, progress)
    if plan.text is not None and not any(record.get("error", "").startswith(INTERRUPTED) for record in records):
        _add_losses(records, plan, plan.text, progress)
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


def _add_losses(records: list[dict[str, Any]], plan: Plan, text: TextWorkload, progress: Progress) -> None:
    """Add the figures of `compare_on_text` to the records of quantised variants and of the variant with all parts.

    The variant with all parts runs for the comparison even if it is not among the chosen variants.
    """
    whole = whole_engine(plan.config.device.type)
    failed = {record["name"] for record in records if "error" in record}
    others = [variant for variant in plan.variants if variant.rounds and variant.name not in failed]
    figures, errors = compare_on_text(whole, others, plan.shared, text, progress)
    for record in records:
        name = record["name"]
        if name in figures:
            record["text"] = figures[name]
        elif name in errors:
            record["error"] = errors[name]
    if whole.name in errors:
        for record in records:
            if any(variant.name == record["name"] for variant in others):
                record["error"] = f"has nothing to be compared with: {whole.name} {errors[whole.name]}"


def _workload(config: EngineConfig, options: Mapping[str, Any], asked: Asked) -> AblationWorkload:
    """Return the default workload, with the user's choices in place of defaults.

    The length of prefills is cut to the context length.
    """
    workload = QUICK if asked.quick else AblationWorkload(seed=config.model.seed)
    if config.device.type != "cuda" and not asked.quick:
        workload = replace(workload, batch_sizes=CPU_BATCH_SIZES)
    asked_for: dict[str, Any] = {
        "batch_sizes": asked.batch_sizes,
        "prompt_len": asked.prompt_len,
        "output_len": asked.output_len,
    }
    workload = replace(workload, **{name: value for name, value in asked_for.items() if value is not None})
    drafting = any(name.endswith("with drafts of n-grams") for name in asked.variants)
    max_new_tokens_per_step = max(config.max_new_tokens_per_step, 1 + NGRAM_DRAFTS if drafting else 1)
    workload = replace(workload, max_new_tokens_per_step=max_new_tokens_per_step)
    if config.images is not None and config.image_input is not None:
        side = IMAGE_SIDE if config.device.type == "cuda" and not asked.quick else SMALL_IMAGE_SIDE
        workload = replace(workload, image_side=side, image_len=_most_tokens(config.images, side))
    longest = min(config.model.max_model_len, options.get("max_model_len", MAX_MODEL_LEN))
    return replace(workload, prefill_len=max(1, min(workload.prefill_len, longest - 1)))


def _most_tokens(images: ImagesConfig, side: int) -> int:
    """Return the largest number of tokens that an image with `side` pixels on each side may have."""
    vision = images.vision
    if vision.tile_size or vision.stated_positions:  # the size follows from the processor
        return images.most_embeddings
    on_a_side = -(-side // (vision.patch_size * vision.merge_size))
    return min(images.most_embeddings, on_a_side**2)


def _resolve_variant(variant: Variant, shared: Mapping[str, Any]) -> None:
    try:
        resolve(make_options(variant.engine_options(shared)))
    except (TypeError, ValueError) as error:
        raise type(error)(f"variant {variant.name!r} cannot be measured: {error}; --variant chooses others") from error


def _resolve(options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration for these options. Raises ValueError if they rule out compilation."""
    config = resolve(make_options(options))
    if not config.compile.enabled:
        raise ValueError(f"mode cannot be 'compiled' here: {config.reasons['compile.enabled']}")
    return config


# Cores per compiling process. From this number on, a process has compile workers.
CORES_OF_A_START = 4
# Memory of a process beyond weights and KV cache: activations, graphs, the CUDA context.
EXTRA_BYTES = 4 << 30


@dataclass(frozen=True)
class Preparation:
    """The way to fill the compile cache before the measurement: processes that each start one variant."""

    at_a_time: int  # concurrent processes
    num_blocks: int  # size of each KV cache
    eager: bool  # Also start eager variants, whose kernels are compiled by a GPU's first start.


INTERRUPTED = "was interrupted"
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
    """Measure the variants and return a record for each, in order.

    A record has name, options, and either figures or an error; both if a repeat failed. Ctrl-C ends the measurement,
    and records then have the figures of the completed repeats; KeyboardInterrupt is raised only if there are none.
    shared: engine options common to all variants, as JSON. run: starts a worker.

    Figures are {"median", "spread": [min, max]} over the repeats, or None if not measured: tpot_ms and step_ms (by
    batch size), mixed_step_ms, prefill_tokens_per_s, image_ms (first token of a prompt with an image), start_up_s
    (process start to first token, measured from outside), kernels (of a decode step at batch 1), memory_bytes
    (without_kv_cache, kv_cache, graphs_predicted, graphs_used). start_up_stages_s has medians by stage. The counts of
    compilations after the start, captures, batches without a graph, and preemptions (COUNTS) are maxima over the
    repeats.
    """
    errors = _prepare(chosen, shared, preparation, progress, run)
    results: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in chosen}
    try:
        for repeat in range(1, repeats + 1):
            for variant in chosen:
                if variant.name in errors:
                    continue
                with progress.stage(f"repeat {repeat} of {repeats}: {variant.name}", total=1) as advance:
                    try:
                        results[variant.name].append(run(variant.engine_options(shared), workload.task()))
                    except ProcessError as error:
                        errors[variant.name] = str(error)
                    advance(1)
    except KeyboardInterrupt:
        if not any(results.values()):
            raise
        for name, found in results.items():
            if len(found) < repeats:
                errors.setdefault(name, f"{INTERRUPTED} after {len(found)} of {repeats} repeats")
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
    """Start each variant that has something to compile once, and return the errors of failed starts by variant name."""
    compiled = [variant for variant in chosen if variant.compiles or preparation.eager]
    errors: dict[str, str] = {}

    def start(variant: Variant) -> None:
        try:
            run(variant.engine_options(shared) | {"num_blocks": preparation.num_blocks}, None)
        except ProcessError as error:
            errors[variant.name] = str(error)

    with (
        progress.stage("prepare: compile each variant once", total=len(compiled)) as advance,
        ThreadPoolExecutor(preparation.at_a_time) as pool,
    ):
        for _ in pool.map(start, compiled):
            advance(1)
    return errors


def figures(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a variant's figures, see `measure`, from the results of its repeats."""

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
        "image_ms": column(lambda result: result["image_ms"]),
        "start_up_s": column(lambda result: result["wall_s"]),
        "start_up_stages_s": {stage: summary([_seconds(r, stage) for r in results])["median"] for stage in stages},
        "kernels": column(lambda result: result["kernels"]),
        "memory_bytes": columns("memory_bytes"),
        **{name: max(result[name] for result in results) for name in COUNTS},
    }


def _seconds(result: Mapping[str, Any], stage: str) -> float:
    return sum(span["seconds"] for span in result["start_up"] if span["name"] == stage)


def prepare_with(config: EngineConfig, sizes: ModelSizes) -> Preparation:
    """Return a preparation with as many concurrent processes as the cores and half of the device's memory allow.

    There is at least one. Each process's KV cache has room for one request of the full context length.
    """
    cores = usable_cores()
    if config.device.type == "cuda":
        memory = torch.cuda.get_device_properties(config.device).total_memory
    else:
        memory = psutil.virtual_memory().total
    # On a small machine, each process compiles by itself: one per core.
    by_cores = cores if cores < CORES_OF_A_START else cores // CORES_OF_A_START
    num_blocks = -(-config.model.max_model_len // config.cache.block_size)
    by_memory = memory // 2 // (2 * sizes.weight_bytes + num_blocks * block_bytes(config) + EXTRA_BYTES)
    return Preparation(max(1, min(by_cores, by_memory)), num_blocks, eager=config.device.type == "cuda")
