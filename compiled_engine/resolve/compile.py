"""Resolve the compiler's options into its configuration, or raise an error with the allowed values."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import torch

from compiled_engine.config import CompileConfig, ModelConfig, SchedulerConfig
from compiled_engine.kernels.cpp_library import compiler_command
from compiled_engine.options import EngineOptions
from compiled_engine.passes.linear import small_batch_linear_cpu
from compiled_engine.passes.parallel.sequence_parallel import SequenceParallel
from compiled_engine.passes.parallel.tensor_parallel import TensorParallel
from compiled_engine.passes.registry import load_plugins, passes_of_quantised, passes_of_ranks, registered_passes
from compiled_engine.process.cores import usable_cores
from compiled_engine.resolve.folders import resolve_cache_dir
from compiled_engine.schema import require_defaults

COMPILE_OPTIONS = (
    "passes",
    "disable_passes",
    "strict_passes",
    "verify_passes",
    "sequence_parallel",
    "compile_ranges",
    "compile_workers",
    "cache_dir",
)
# Passes that the option `sequence_parallel` requires; the first is the pass of that name.
SEQUENCE_PARALLEL_PASSES = (SequenceParallel.name, *sorted({*SequenceParallel.requires} - {TensorParallel.name}))
# Default end of the compile range for small batches, in tokens.
DEFAULT_RANGE_END = 64
MIN_CORES_FOR_WORKERS = 4
# More workers would have little to do: a compile range has three graph pieces, and a cold start some 45 kernels.
MAX_WORKERS = 8


def compiler_obstacle(device: torch.device) -> str | None:
    """Return why nothing can be compiled on this machine, and how to change that; None if compiling is possible."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "TORCH_COMPILE_DISABLE is '1', which switches torch.compile off; allowed for it: unset, 0"
    compiler, *arguments = compiler_command()
    if device.type == "cpu" and arguments:
        return f"Inductor takes a C++ compiler without arguments, and CXX is {os.environ['CXX']!r}"
    if device.type == "cpu" and shutil.which(compiler) is None:
        named = ", which CXX names," if "CXX" in os.environ else ""
        return f"compiling on a CPU needs a C++ compiler, and {compiler}{named} was not found"
    return None


def resolve_compile(
    options: EngineOptions,
    enabled: bool,
    model: ModelConfig,
    scheduler: SchedulerConfig,
    device: torch.device,
    reasons: dict[str, str],
) -> CompileConfig:
    """Return the compiler's configuration. enabled: False in eager mode.

    Imports the modules of the option `plugins`, and adds the reasons for chosen values to `reasons`. Raises ValueError
    or TypeError, which names the field.
    """
    load_plugins(options.plugins)
    if not enabled:
        require_defaults(options, "the mode is eager: nothing is compiled", *COMPILE_OPTIONS)
        return CompileConfig(False, (), (), False, False, 0, resolve_cache_dir(options))
    known = tuple(graph_pass.name for graph_pass in registered_passes())
    for field in ("passes", "disable_passes"):
        for name in getattr(options, field) or ():
            if name not in known:
                raise ValueError(f"{field} is {name!r}; allowed: {', '.join(known)}")
    for names, reason in _idle(model, options.tensor_parallel_size):
        if asked := sorted(names.intersection(options.passes or ())):
            raise ValueError(f"passes has {asked[0]!r}, but {reason}; allowed: without it")
    if options.tensor_parallel_size == 1:
        require_defaults(options, "tensor_parallel_size is 1", "sequence_parallel")
    known = _with_work(model, options.tensor_parallel_size)
    wanted = default_passes(model, options.tensor_parallel_size) if options.passes is None else options.passes
    if options.sequence_parallel:
        wanted = (*wanted, SequenceParallel.name)
        _check_sequence_parallel(wanted, options.disable_passes)
    return CompileConfig(
        enabled=True,
        passes=tuple(name for name in known if name in wanted and name not in options.disable_passes),
        ranges=_ranges(options, model, scheduler, device, reasons),
        strict=options.strict_passes,
        verify=options.verify_passes,
        workers=_workers(options, reasons),
        cache_dir=resolve_cache_dir(options),
        plugins=options.plugins,
    )


def default_passes(model: ModelConfig, num_ranks: int) -> tuple[str, ...]:
    """Return the names of the passes that run by default for this model and number of ranks."""
    return tuple(name for name in _with_work(model, num_ranks) if name != SequenceParallel.name)


def _with_work(model: ModelConfig, num_ranks: int) -> tuple[str, ...]:
    """Return the names of all passes that have something to do for the model and number of ranks."""
    idle = {name for names, _ in _idle(model, num_ranks) for name in names}
    return tuple(graph_pass.name for graph_pass in registered_passes() if graph_pass.name not in idle)


def _idle(model: ModelConfig, num_ranks: int) -> Iterator[tuple[frozenset[str], str]]:
    """Yield (names of passes, reason) for each reason why passes have nothing to do for this model."""
    if num_ranks == 1:
        yield passes_of_ranks(), "tensor_parallel_size is 1: there is nothing to sum"
    if model.quantisation is None:
        yield passes_of_quantised(), "no linear is quantised"


def _check_sequence_parallel(wanted: tuple[str, ...], disabled: tuple[str, ...]) -> None:
    """Raise ValueError if one of the passes that sequence parallelism requires is disabled or not wanted.

    wanted: names of the passes, with that of sequence parallelism as the last. disabled: the option disable_passes.
    """
    for name in SEQUENCE_PARALLEL_PASSES:
        if name in disabled:
            raise ValueError(f"disable_passes has {name!r}, but sequence_parallel is True; allowed: others")
        if name not in wanted:
            raise ValueError(
                f"passes is {list(wanted[:-1])}, but sequence_parallel is True; allowed: with {name!r}, or None"
            )


def _ranges(
    options: EngineOptions,
    model: ModelConfig,
    scheduler: SchedulerConfig,
    device: torch.device,
    reasons: dict[str, str],
) -> tuple[tuple[int, int], ...]:
    most, num_ranks = scheduler.max_num_batched_tokens, options.tensor_parallel_size
    ends = options.compile_ranges
    if options.batch_invariant:
        ends, reasons["compile.ranges"] = (), "batch_invariant is True: one version serves all sizes"
    if ends is None:
        end = min(DEFAULT_RANGE_END, most - 1)
        ends = (end,) if end > 0 else ()
        reasons["compile.ranges"] = f"default on {device.type}: where small-batch kernels were measured to be faster"
        obstacle = None if device.type == "cuda" else small_batch_linear_cpu.obstacle(model, num_ranks, end)
        if obstacle is not None:  # another range would compile to the same code
            ends, reasons["compile.ranges"] = (), f"small-batch kernels do not serve all of the model: {obstacle}"
    for end in ends:
        if end >= most:
            raise ValueError(f"compile_ranges has {end}; allowed: less than max_num_batched_tokens ({most})")
    ends = tuple(sorted(set(ends)))
    return tuple(zip((1, *(end + 1 for end in ends)), ends, strict=False))


def _workers(options: EngineOptions, reasons: dict[str, str]) -> int:
    if options.compile_workers is not None:
        return options.compile_workers
    cores = usable_cores()
    reasons["compile.workers"] = f"{cores} cores; separate processes are worthwhile from {MIN_CORES_FOR_WORKERS} on"
    return min(cores // 2, MAX_WORKERS) if cores >= MIN_CORES_FOR_WORKERS else 0
