"""Compile a model: trace, passes, split, Inductor, cache; then bind what came out to real parameters."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._inductor import CompiledArtifact

from compiled_engine.config import EngineConfig
from compiled_engine.graphs import compat
from compiled_engine.graphs.cache import Lookup, find_or_build
from compiled_engine.graphs.cache_key import cache_factors
from compiled_engine.graphs.example_inputs import example_inputs, without_storage
from compiled_engine.graphs.plan import Plan, make_plan
from compiled_engine.graphs.split import describe_piece, split
from compiled_engine.graphs.stitch import Forward, forward_source, stitch
from compiled_engine.graphs.trace import require_no_guards, trace
from compiled_engine.parameter_layout import ParameterLayout
from compiled_engine.passes.expand_references import expand_references
from compiled_engine.passes.graph_pass import CompileRange
from compiled_engine.passes.manager import PassReport, run_passes
from compiled_engine.progress import Progress

log = logging.getLogger("compiled_engine")

# On a CPU the number of threads is chosen for each step (runner/cpu_threads.py), not when a piece is compiled.
INDUCTOR_OPTIONS: dict[str, Any] = {"cpp.dynamic_threads": True}


@dataclass(frozen=True)
class CompileCounts:
    """What this process had to do: zero traces and zero compiles on a warm start."""

    traces: int
    compiles: int


@dataclass(frozen=True)
class CompiledModel:
    """An entry of the cache, loaded: its plan, its pieces, and what the passes did when it was built."""

    plan: Plan
    pieces: dict[str, CompiledArtifact]
    passes: tuple[PassReport, ...]
    lookup: Lookup
    counts: CompileCounts
    seconds: dict[str, float]

    @property
    def layout(self) -> ParameterLayout:
        return self.plan.layout()

    def bind(self, parameters: dict[str, torch.Tensor]) -> Forward:
        """The compiled forward on these parameters (stand-alone and packed ones, by name)."""
        return stitch(self.plan, self.pieces, parameters)


def compile_model(config: EngineConfig, make_model: Callable[[], nn.Module], progress: Progress) -> CompiledModel:
    """The compiled model for a config, from the cache if it holds it.

    `make_model` builds the model on the meta device; it is called only when there is something to trace.

    Raises GuardError when the model's code depends on sizes, SplitError on an unknown mutating op.
    """
    seconds: dict[str, float] = {}
    built: list[CompileCounts] = []
    start = time.perf_counter()
    lookup = find_or_build(
        config.compile.cache_dir,
        cache_factors(config),
        lambda folder: built.append(_build(config, make_model, folder, progress, seconds)),
        lambda folder: _load(folder, seconds),
    )
    plan, pieces, reports = lookup.loaded
    seconds["compile_total"] = time.perf_counter() - start
    counts = built[0] if built else CompileCounts(0, 0)
    return CompiledModel(plan, pieces, reports, lookup, counts, seconds)


def _load(folder: Path, seconds: dict[str, float]) -> tuple[Plan, dict[str, CompiledArtifact], tuple[PassReport, ...]]:
    plan = Plan.from_json((folder / "plan.json").read_text())
    reports = json.loads((folder / "passes.json").read_text())
    with _timed(seconds, "load_pieces"), _compiler_folders(folder):
        pieces = {key: CompiledArtifact.load(path=str(_piece_path(folder, key))) for key in plan.piece_keys()}
    return (
        plan,
        pieces,
        tuple(PassReport(**report | {"near_misses": tuple(report["near_misses"])}) for report in reports),
    )


def _build(
    config: EngineConfig,
    make_model: Callable[[], nn.Module],
    folder: Path,
    progress: Progress,
    seconds: dict[str, float],
) -> CompileCounts:
    """Trace and compile into `folder`: plan.json, passes.json, forward.py, pieces/, inductor/, triton/."""
    (folder / "pieces").mkdir()
    with _compiler_folders(folder):
        with progress.stage("trace"), _timed(seconds, "trace"):
            traced = trace(without_storage(make_model(), config.device), example_inputs(config))
        with _timed(seconds, "passes"):
            module, reports = _run_passes(config, traced.module)
        with _timed(seconds, "split"):
            plan, unique = make_plan(module.graph, split(module.graph))
        with progress.stage("compile", total=len(unique)) as advance, _timed(seconds, "compile"):
            for key, step in unique.items():
                assert step.piece is not None
                (folder / "pieces" / f"{key}.txt").write_text(describe_piece(step.piece) + "\n")
                fake_inputs = [node.meta["val"] for node in step.inputs]
                compat.compile_piece(step.piece, fake_inputs, INDUCTOR_OPTIONS).save(path=str(_piece_path(folder, key)))
                advance(1)
    require_no_guards(traced.shape_env)
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "forward.py").write_text(forward_source(plan))
    (folder / "passes.json").write_text(json.dumps([asdict(report) for report in reports], indent=1))
    return CompileCounts(traces=1, compiles=len(unique))


def _run_passes(config: EngineConfig, module: fx.GraphModule) -> tuple[fx.GraphModule, tuple[PassReport, ...]]:
    compile_range = CompileRange(1, config.scheduler.max_num_batched_tokens)
    reports = run_passes(
        module.graph, config.compile.passes, compile_range, config.device.type, config.model.num_layers
    )
    for report in reports:
        if report.matches < report.contract:
            missed = "; ".join(report.near_misses) or "no near miss"
            log.warning("pass %s matched %d times of %d: %s", report.name, report.matches, report.contract, missed)
    return (module if config.device.type == "cuda" else expand_references(module)), reports


def _piece_path(folder: Path, key: str) -> Path:
    return folder / "pieces" / f"{key}.bin"


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


@contextmanager
def _compiler_folders(folder: Path) -> Iterator[None]:
    """Point Inductor and Triton at the entry's own folders while we compile or load; the caller's are put back."""
    wanted = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        # A precompiled header would tie the entry to this folder, and building it costs more than it saves.
        with inductor_config.patch(cpp_cache_precompile_headers=False):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
