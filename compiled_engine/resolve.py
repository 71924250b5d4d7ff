"""Turn what a user asked for into the frozen configuration, with the reason for everything that was chosen.

A request that cannot be honoured is an error that says why; nothing is changed silently, here or later.
"""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from typing import Any

import torch

from compiled_engine.attention.backend import AttentionCase
from compiled_engine.attention.registry import resolve_backend
from compiled_engine.config import (
    POLICIES,
    CacheConfig,
    CompileConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from compiled_engine.models.registry import read_model_config
from compiled_engine.options import EngineOptions
from compiled_engine.passes.registry import registered_passes
from compiled_engine.progress import Progress, SilentProgress
from compiled_engine.resolve_folders import (
    check_folders,
    resolve_cache_dir,
    resolve_model_folder,
    resolve_tokenizer_folder,
)
from compiled_engine.resolve_graphs import resolve_graphs
from compiled_engine.resolve_logits_processors import resolve_logits_processors

MODES = ("auto", "eager", "compiled", "graphed")
DEFAULT_LIMITS = {"cuda": (256, 8192), "cpu": (64, 2048)}
COMPILE_OPTIONS = (
    "passes",
    "disable_passes",
    "strict_passes",
    "verify_passes",
    "compile_ranges",
    "compile_workers",
    "cache_dir",
)
# Sizes beyond these are mistakes; a grid of CUDA has room for 65,535 requests, a block table's entry 31 bits.
MOST = {"max_model_len": 1 << 24, "max_num_seqs": 65535, "max_num_batched_tokens": 1 << 20, "num_blocks": 2**31 - 1}
# Up to how many tokens a version of its own is compiled by default.
DEFAULT_COMPILE_RANGES = {"cuda": (64,), "cpu": ()}
MIN_CORES_FOR_WORKERS = 4
# A range has three pieces, a cold start some 45 kernels.
MAX_WORKERS = 8


def resolve(options: EngineOptions, progress: Progress | None = None) -> EngineConfig:
    """The configuration; of a model from the hub, what is missing but the weights is downloaded.

    Raises ValueError, TypeError or OSError naming the field, the value and what is allowed.
    """
    progress = progress or SilentProgress()
    _check_types(options)
    reasons: dict[str, str] = {}
    device = resolve_device(options.device, reasons)
    folder = resolve_model_folder(options, reasons, progress)
    model, model_reasons = read_model_config(
        folder.path,
        hub_name=folder.hub_name,
        revision=folder.revision,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        load_format=options.load_format,
        seed=options.seed,
        device_type=device.type,
    )
    reasons |= model_reasons
    compiled, graphed = _mode(options, device, reasons)
    scheduler = _scheduler(options, model, device, reasons)
    backend, block_size = _attention(options, model, device, reasons)
    return EngineConfig(
        model=model,
        tokenizer=resolve_tokenizer_folder(options, reasons, progress),
        cache=CacheConfig(
            block_size, options.num_blocks, options.gpu_memory_utilization, options.enable_prefix_caching
        ),
        scheduler=scheduler,
        compile=_compile(options, compiled, scheduler, device, reasons),
        graph=resolve_graphs(
            options,
            compiled=compiled,
            graphed=graphed,
            backend=backend,
            scheduler=scheduler,
            num_layers=model.num_layers,
            device=device,
            reasons=reasons,
        ),
        device=device,
        attention_backend=backend,
        reasons=reasons,
    )


def _check_types(options: EngineOptions) -> None:
    for name, most in MOST.items():
        _require_positive(name, getattr(options, name), optional=True, most=most)
    if isinstance(options.seed, bool) or not isinstance(options.seed, int):
        raise TypeError(f"seed is {options.seed!r}; allowed: an integer")
    for name in ("enable_prefix_caching", "compile_cache", "strict_passes", "verify_passes", "background_capture"):
        if not isinstance(getattr(options, name), bool):
            raise TypeError(f"{name} is {getattr(options, name)!r}; allowed: True or False")
    share = options.gpu_memory_utilization
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise TypeError(f"gpu_memory_utilization is {share!r}; allowed: a number above 0 and at most 1")
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization is {share!r}; allowed: above 0 and at most 1")
    _require_one_of("mode", options.mode, MODES)
    _require_one_of("scheduling_policy", options.scheduling_policy, POLICIES)
    _require_one_of("generation_config", options.generation_config, ("auto", "none"))
    lists = ("passes", "disable_passes", "compile_ranges", "capture_sizes", "capture_token_sizes", "logits_processors")
    for name in lists:
        value = getattr(options, name)
        if not isinstance(value, tuple) and (value is not None or name == "disable_passes"):
            raise TypeError(f"{name} is {value!r}; allowed: a list")
    resolve_logits_processors(options.logits_processors)  # objects, which are no part of the configuration
    check_folders(options)


def _require_positive(name: str, value: Any, optional: bool = False, most: int | None = None) -> None:
    if value is None and optional:
        return
    allowed = "an integer of at least 1" if most is None else f"an integer from 1 to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; allowed: {allowed}")
    if value < 1 or (most is not None and value > most):
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")


def _require_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


def resolve_device(asked: str, reasons: dict[str, str]) -> torch.device:
    """The device for "auto", "cpu", "cuda" or "cuda:N". Raises ValueError for anything else, and what is not there."""
    if asked == "auto":
        if torch.cuda.is_available():
            reasons["device"] = "an NVIDIA GPU is there"
            return torch.device("cuda", torch.cuda.current_device())
        reasons["device"] = "no NVIDIA GPU was found"
        return torch.device("cpu")
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {asked!r}; allowed: auto, cpu, cuda, cuda:N") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ValueError(f"device is {asked!r}; allowed: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {asked!r}, but torch finds no CUDA GPU here; allowed: auto, cpu")
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"device is {asked!r}; allowed: cuda:0 to cuda:{torch.cuda.device_count() - 1}")
        device = torch.device("cuda", index)
    return device


def _mode(options: EngineOptions, device: torch.device, reasons: dict[str, str]) -> tuple[bool, bool]:
    """(compile?, CUDA graphs?)"""
    mode = options.mode
    obstacle = _compiler_obstacle(device)
    if mode == "auto" and obstacle is not None:
        mode = "eager"
        reasons["compile.enabled"] = f"mode is eager: {obstacle}"
    elif mode == "auto" and options.graph_mode == "breakable":
        mode = "eager"
        reasons["compile.enabled"] = "graph_mode is breakable, which captures eager code"
    elif mode == "auto" and options.graph_mode == "none":
        mode = "compiled"
        reasons["compile.enabled"] = "graph_mode is none, so mode is compiled"
    elif mode == "auto":
        mode = "graphed" if device.type == "cuda" else "compiled"
        reasons["compile.enabled"] = f"mode is {mode} by default on {device.type}"
    if mode == "graphed" and device.type != "cuda":
        raise ValueError(
            "mode is 'graphed', which replays CUDA graphs and needs a CUDA GPU; allowed on cpu: eager, compiled"
        )
    if obstacle is not None and mode != "eager":
        raise ValueError(f"mode is {mode!r}, but {obstacle}; allowed: eager")
    return mode != "eager", mode == "graphed"


def _compiler_obstacle(device: torch.device) -> str | None:
    """Why nothing can be compiled here, and what would change that."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "TORCH_COMPILE_DISABLE is '1', which switches torch.compile off; allowed for it: unset, 0"
    if device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        return "compiling on a CPU needs a C++ compiler, and g++ was not found"
    return None


def _scheduler(
    options: EngineOptions, model: ModelConfig, device: torch.device, reasons: dict[str, str]
) -> SchedulerConfig:
    default_seqs, default_tokens = DEFAULT_LIMITS[device.type]
    max_num_seqs = options.max_num_seqs
    if max_num_seqs is None:
        max_num_seqs = default_seqs
        if options.max_num_batched_tokens is not None:
            max_num_seqs = min(max_num_seqs, options.max_num_batched_tokens)
        reasons["scheduler.max_num_seqs"] = f"default on {device.type}"
    max_num_batched_tokens = options.max_num_batched_tokens
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(default_tokens, max_num_seqs)
        reasons["scheduler.max_num_batched_tokens"] = f"default on {device.type}"
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens is {max_num_batched_tokens}; allowed: at least max_num_seqs ({max_num_seqs}), "
            "so that every running request can decode in a step"
        )
    ahead = options.async_scheduling
    if ahead is None:
        ahead = device.type == "cuda"
        reasons["scheduler.async_scheduling"] = f"default on {device.type}"
    elif not isinstance(ahead, bool):
        raise TypeError(f"async_scheduling is {ahead!r}; allowed: True, False or None")
    return SchedulerConfig(max_num_seqs, max_num_batched_tokens, model.max_model_len, options.scheduling_policy, ahead)


def _attention(
    options: EngineOptions, model: ModelConfig, device: torch.device, reasons: dict[str, str]
) -> tuple[str, int]:
    windows = [window for window in model.sliding_windows if window is not None]
    case = AttentionCase(
        device.type,
        model.dtype,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        0,
        min(windows, default=None),
    )
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        backend, block_size, attention_reasons = resolve_backend(options.attention_backend, options.block_size, case)
    reasons |= attention_reasons
    return backend, block_size


def _compile(
    options: EngineOptions, enabled: bool, scheduler: SchedulerConfig, device: torch.device, reasons: dict[str, str]
) -> CompileConfig:
    defaults = EngineOptions()
    if not enabled:
        for name in COMPILE_OPTIONS:
            if getattr(options, name) != getattr(defaults, name):
                raise ValueError(f"{name} is {getattr(options, name)!r}, but the mode is eager: nothing is compiled")
        return CompileConfig(False, (), (), False, False, 0, resolve_cache_dir(options))
    known = tuple(graph_pass.name for graph_pass in registered_passes())
    for field in ("passes", "disable_passes"):
        for name in getattr(options, field) or ():
            _require_one_of(field, name, known)
    wanted = known if options.passes is None else options.passes
    return CompileConfig(
        enabled=True,
        passes=tuple(name for name in known if name in wanted and name not in options.disable_passes),
        small_ranges=_small_ranges(options, scheduler, device, reasons),
        strict=options.strict_passes,
        verify=options.verify_passes,
        workers=_workers(options, reasons),
        cache_dir=resolve_cache_dir(options),
    )


def _small_ranges(
    options: EngineOptions, scheduler: SchedulerConfig, device: torch.device, reasons: dict[str, str]
) -> tuple[tuple[int, int], ...]:
    most = scheduler.max_num_batched_tokens
    ends = options.compile_ranges
    if ends is None:
        ends = tuple(min(end, most - 1) for end in DEFAULT_COMPILE_RANGES[device.type] if most > 1)
        reasons["compile.small_ranges"] = f"default on {device.type}: where small-batch kernels were measured to pay"
    for end in ends:
        _require_positive("compile_ranges", end)
        if end >= most:
            raise ValueError(f"compile_ranges has {end}; allowed: less than max_num_batched_tokens ({most})")
    ends = tuple(sorted(set(ends)))
    return tuple(zip((1, *(end + 1 for end in ends)), ends, strict=False))


def _workers(options: EngineOptions, reasons: dict[str, str]) -> int:
    if options.compile_workers is not None:
        if isinstance(options.compile_workers, bool) or not isinstance(options.compile_workers, int):
            raise TypeError(f"compile_workers is {options.compile_workers!r}; allowed: an integer from 0 on")
        if options.compile_workers < 0:
            raise ValueError(f"compile_workers is {options.compile_workers!r}; allowed: an integer from 0 on")
        return options.compile_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    reasons["compile.workers"] = f"{cores} cores; a process of its own pays from {MIN_CORES_FOR_WORKERS} on"
    return min(cores // 2, MAX_WORKERS) if cores >= MIN_CORES_FOR_WORKERS else 0
