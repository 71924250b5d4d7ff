"""Resolve the options of CUDA graphs into a graph mode and batch sizes, or raise an error with the allowed values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compiled_engine.attention.backend import AttentionChoice, captured_always
from compiled_engine.attention.case import GraphSupport, no_short_contexts
from compiled_engine.config import (
    CompileConfig,
    GraphConfig,
    GraphMode,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from compiled_engine.graphs.cuda_graphs.dispatcher import few_sizes
from compiled_engine.options import EngineOptions
from compiled_engine.passes.linear import small_batch_linear_cpu
from compiled_engine.passes.rope.rope_attend import RopeAttend
from compiled_engine.schema import require_defaults

# Modes that are possible without compiled pieces.
EAGER_GRAPH_MODES = (GraphMode.NONE, GraphMode.FULL, GraphMode.FULL_DECODE_ONLY, GraphMode.BREAKABLE)
# Modes with graphs of parts of the forward, which do not fix the number of requests.
_IN_PARTS = (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE, GraphMode.BREAKABLE)
_RECURRENCES = "the model has recurrences, which only full graphs capture"
CAPTURE_OPTIONS = ("capture_sizes", "capture_token_sizes")
# Largest mixed batch, in tokens, that is captured in the pieces around attention. For larger batches the device's work
# takes longer than the launches, so that graphs save nothing.
MAX_TOKENS_AROUND_ATTENTION = 512


def resolve_graphs(
    options: EngineOptions,
    *,
    compiled: bool,
    graphed: bool,
    attention: AttentionChoice,
    short_contexts: Callable[[int], tuple[int, ...]],
    recording_obstacle: str | None,
    model: ModelConfig,
    scheduler: SchedulerConfig,
    device: torch.device,
    reasons: dict[str, str],
    decodes: bool = True,
) -> GraphConfig:
    """Return the configuration of CUDA graphs, and add the reasons for chosen values to `reasons`.

    compiled: whether the resolved option `mode` compiles. graphed: whether it is "graphed". short_contexts: returns the
    limits of short contexts for a number of requests, see `reached_short_contexts`. recording_obstacle: why decodes
    cannot be recorded on a CPU; None if they can. decodes: False for an encoder, which has no decodes.

    Raises ValueError or TypeError, which names the field.
    """
    mode = _mode(options, compiled, graphed, attention, recording_obstacle, model, device, reasons)
    if mode in (GraphMode.NONE, GraphMode.RECORDED):
        require_defaults(options, "the mode captures no CUDA graphs", *CAPTURE_OPTIONS)
        return GraphConfig(mode)
    decode_sizes, token_sizes = _sizes(options, mode, scheduler, reasons, decodes)
    if not decode_sizes and not token_sizes:
        asked = {name: getattr(options, name) for name in CAPTURE_OPTIONS}
        given = ", ".join(f"{name} {value!r}" for name, value in asked.items() if value is not None)
        raise ValueError(
            f"graph_mode {mode.value!r} would capture nothing with {given}; allowed: sizes or batches of 1 to "
            f"max_num_seqs ({scheduler.max_num_seqs}) decodes or max_num_batched_tokens "
            f"({scheduler.max_num_batched_tokens}) tokens, or graph_mode none"
        )
    short_decodes = _short_decodes(decode_sizes, short_contexts, scheduler)
    of_drafts = attention.support.contexts_of_drafts
    short_verified = _short_decodes(decode_sizes, lambda size: of_drafts(size, short_contexts(size)), scheduler)
    return GraphConfig(mode, decode_sizes, token_sizes, short_decodes, short_verified)


def graphs_of_draft_model(
    sizes: tuple[int, ...], compiled: CompileConfig, attention: AttentionChoice, scheduler: SchedulerConfig
) -> GraphConfig:
    """Return the configuration of CUDA graphs for a draft model's forwards.

    sizes: the numbers of requests with a graph each. There are also graphs for short contexts. In a step, the first
    forward has two tokens per request; the following forwards are decodes.
    """
    short = _short_decodes(sizes, reached_short_contexts(compiled, attention), scheduler)
    return GraphConfig(GraphMode.FULL_DECODE_ONLY, sizes, short_decodes=short, short_verified=short)


def graphs_of_head(sizes: tuple[int, ...]) -> GraphConfig:
    """Return the configuration of CUDA graphs for a draft head's forwards, with only a few of `sizes`.

    sizes: numbers of requests. A head is one layer and logits. Padding costs little as long as reading the weights
    takes longer than multiplying by them, and kernels for short contexts would save little.
    """
    return GraphConfig(GraphMode.FULL_DECODE_ONLY, few_sizes(sizes))


def reached_short_contexts(compiled: CompileConfig, attention: AttentionChoice) -> Callable[[int], tuple[int, ...]]:
    """Return a function: number of requests -> limits of short contexts, in tokens, that have a graph each.

    The function is the backend's Support.short_contexts if the pass that uses kernels for short contexts is enabled.
    Otherwise it is one that returns ().
    """
    return attention.support.short_contexts if RopeAttend.name in compiled.passes else no_short_contexts


def _short_decodes(
    sizes: tuple[int, ...], short_contexts: Callable[[int], tuple[int, ...]], scheduler: SchedulerConfig
) -> tuple[tuple[int, int], ...]:
    shapes = ((size, context) for size in sizes for context in short_contexts(size))
    return tuple(shape for shape in shapes if shape[1] < scheduler.max_model_len)


def _mode(
    options: EngineOptions,
    compiled: bool,
    graphed: bool,
    attention: AttentionChoice,
    recording_obstacle: str | None,
    model: ModelConfig,
    device: torch.device,
    reasons: dict[str, str],
) -> GraphMode:
    backend, support = attention.backend, attention.support.graphs
    if options.graph_mode == "auto":
        if not graphed:
            reasons["graph.mode"] = "graphs come with mode graphed"
            return GraphMode.NONE
        if device.type != "cuda":
            if recording_obstacle is None:
                reasons["graph.mode"] = "default on a CPU: calls of C++ kernels can be recorded"
                return GraphMode.RECORDED
            if options.mode == "graphed":
                raise ValueError(f"mode is 'graphed', but {recording_obstacle}; allowed: auto, eager, compiled")
            reasons["graph.mode"] = f"decodes cannot be recorded: {recording_obstacle}"
            return GraphMode.NONE
        if support is GraphSupport.NEVER and model.recurrences is not None:
            reasons["graph.mode"] = f"{_RECURRENCES}, and attention backend {backend} cannot be captured"
            return GraphMode.NONE
        if support is GraphSupport.NEVER:
            reasons["graph.mode"] = f"attention backend {backend} cannot be captured, so it runs between the graphs"
            return GraphMode.PIECEWISE
        if support is GraphSupport.ALWAYS:
            reasons["graph.mode"] = f"default: attention backend {backend} can be captured for every batch"
            return GraphMode.FULL
        if model.recurrences is not None:
            reasons["graph.mode"] = f"{_RECURRENCES}, and attention backend {backend} can be captured only for decodes"
            return GraphMode.FULL_DECODE_ONLY
        reasons["graph.mode"] = (
            f"attention backend {backend} can be captured only for {support.value}, "
            "so it runs between the graphs of other batches"
        )
        return GraphMode.FULL_AND_PIECEWISE
    mode = GraphMode(options.graph_mode)
    facts = options, compiled, attention, recording_obstacle, model, device
    obstacle = _obstacle(mode, *facts)
    if obstacle is not None:
        allowed = [m.value for m in GraphMode if _obstacle(m, *facts) is None]
        if mode is GraphMode.FULL and device.type == "cuda":
            able = captured_always(attention.cases)
            allowed += [f"attention_backend {', '.join(able)}"] if able else []
        raise ValueError(f"graph_mode is {mode.value!r}, {obstacle}; allowed: {', '.join(allowed) or 'another mode'}")
    return mode


def _obstacle(
    mode: GraphMode,
    options: EngineOptions,
    compiled: bool,
    attention: AttentionChoice,
    recording_obstacle: str | None,
    model: ModelConfig,
    device: torch.device,
) -> str | None:
    if mode is GraphMode.NONE:
        return "but mode is 'graphed'" if options.mode == "graphed" else None
    if mode is GraphMode.RECORDED:
        return None if recording_obstacle is None else f"but {recording_obstacle}"
    if device.type != "cuda":
        return "which replays CUDA graphs and needs a CUDA GPU"
    if not compiled and mode not in EAGER_GRAPH_MODES:
        return "which captures compiled pieces, but mode is 'eager'"
    if compiled and mode is GraphMode.BREAKABLE:
        return f"which captures eager code, but mode is {options.mode!r}"
    if model.recurrences is not None and mode in _IN_PARTS:
        return f"but {_RECURRENCES}"
    backend, support = attention.backend, attention.support.graphs
    if mode.captures_decodes and support is GraphSupport.NEVER:
        return f"but attention_backend {backend!r} cannot be captured"
    if mode is GraphMode.FULL and support is not GraphSupport.ALWAYS:
        return f"but attention_backend {backend!r} can be captured only for {support.value}"
    return None


def recording_obstacle(
    compile_config: CompileConfig,
    parallel: ParallelConfig,
    model: ModelConfig,
    attention: AttentionChoice,
    device: torch.device,
) -> str | None:
    """Return why decodes cannot be recorded as calls of C++ kernels (graph mode "recorded"); None if they can."""
    if device.type != "cpu":
        return "calls are recorded only on a CPU"
    if not compile_config.enabled:
        return "nothing is compiled"
    if parallel.devices_per_replica > 1:
        return "calls are recorded only in a single process"
    if model.pooling is not None:
        return "only decodes are recorded, and a model that pools has none"
    if not attention.support.records_decodes:
        return f"attention backend {attention.backend} cannot be recorded"
    if not compile_config.ranges:
        return "no compile range is for small batches"
    reasons = (small_batch_linear_cpu.obstacle(model, 1, high) for _, high in compile_config.ranges)
    return next((f"C++ kernels do not serve all of the model: {reason}" for reason in reasons if reason), None)


def default_capture_sizes(limit: int) -> tuple[int, ...]:
    """Return the sizes 1, 2, 4, from 8 to 128 in steps of 8, then in steps of 32, up to and including `limit`.

    Above 128 rows, padding to the next multiple of 32 hardly makes a matrix product slower, while each further size
    costs a capture at start-up.
    """
    sizes = [1, 2, 4, *range(8, 129, 8), *range(160, limit + 1, 32)]
    return tuple(sorted({size for size in sizes if size <= limit} | {limit}))


def default_token_sizes(limit: int) -> tuple[int, ...]:
    """Return default_capture_sizes up to 512, then steps of 128 up to 2048, then steps of 1/8 of each power of two.

    The last size is `limit`.
    """
    sizes = [*default_capture_sizes(min(limit, 512)), *range(640, 2049, 128)]
    power = 2048
    while power < limit:
        sizes += range(power + power // 8, 2 * power + 1, power // 8)
        power *= 2
    return tuple(sorted({size for size in sizes if size <= limit} | {limit}))


def _sizes(
    options: EngineOptions, mode: GraphMode, scheduler: SchedulerConfig, reasons: dict[str, str], decodes: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (decode_sizes, token_sizes) of GraphConfig, from the options or by the default rules.

    decodes: False for an encoder. Raises ValueError for sizes that are too large, or that the mode does not use.
    """
    captures_decodes = mode.captures_decodes and decodes
    # Decodes without graphs of their own use those of mixed batches.
    most_decodes = 0 if captures_decodes or not decodes else scheduler.max_num_seqs
    most_tokens = scheduler.max_num_batched_tokens
    if mode is not GraphMode.FULL:
        most_tokens = min(max(MAX_TOKENS_AROUND_ATTENTION, most_decodes), most_tokens)
    families = (
        ("capture_sizes", "decode_sizes", captures_decodes, scheduler.max_num_seqs, "max_num_seqs"),
        (
            "capture_token_sizes",
            "token_sizes",
            mode.captures_mixed,
            scheduler.max_num_batched_tokens,
            "max_num_batched_tokens",
        ),
    )
    defaults = (default_capture_sizes(scheduler.max_num_seqs), default_token_sizes(most_tokens))
    sizes: list[tuple[int, ...]] = []
    for (option, field, captured, most, limit), default in zip(families, defaults, strict=True):
        given = getattr(options, option)
        if not captured:
            require_defaults(options, f"graph mode {mode.value!r} captures no such batches", option)
            sizes.append(())
        elif given is None:
            sizes.append(default)
            reasons[f"graph.{field}"] = "default rule: 1, 2, 4, 8 to 128 in steps of 8, then in wider ones"
        else:
            sizes.append(_explicit(option, given, most, limit))
    return sizes[0], sizes[1]


def _explicit(option: str, sizes: tuple[int, ...], most: int, limit: str) -> tuple[int, ...]:
    for size in sizes:
        if size > most:
            raise ValueError(f"{option} has {size}; allowed: at most {limit} ({most})")
    return tuple(sorted(set(sizes)))
