"""Compile a model, or find it compiled; then bind what came out to real parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.cache import Lookup, find_or_build
from compiled_engine.graphs.cache_key import cache_factors
from compiled_engine.graphs.compile_counts import CompileCounts
from compiled_engine.graphs.load_piece import Piece, load_piece
from compiled_engine.graphs.segments import OnAttention
from compiled_engine.graphs.stitch import Forward, stitch
from compiled_engine.graphs.version import Version, read_versions
from compiled_engine.parameter_layout import ParameterLayout
from compiled_engine.passes.graph_pass import CompileRange
from compiled_engine.passes.manager import require_contracts
from compiled_engine.progress import Progress
from compiled_engine.timeline import Timeline


@dataclass(frozen=True)
class Forwards:
    """The compiled forward for every batch, and versions for small ones.

    `hidden` returns hidden states [T, D]; those in `small` return the logits [T, V] of every token.
    """

    hidden: Forward
    small: tuple[tuple[CompileRange, Forward], ...] = ()

    def for_logits(self, num_tokens: int) -> Forward | None:
        """The version that returns logits for so many tokens, if there is one."""
        return next((forward for r, forward in self.small if r.low <= num_tokens <= r.high), None)


@dataclass(frozen=True)
class CompiledModel:
    """An entry of the cache, loaded: a version for each range, and the pieces that they share."""

    versions: tuple[Version, ...]
    pieces: dict[str, Piece]
    lookup: Lookup
    counts: CompileCounts

    @property
    def layout(self) -> ParameterLayout:
        """The packed parameters of all versions."""
        packed = {p.name: p for version in self.versions for p in version.plan.layout().packed}
        return ParameterLayout(tuple(packed.values()))

    def bind(self, parameters: Mapping[str, torch.Tensor], on_attention: OnAttention | None = None) -> Forwards:
        """The compiled versions on these parameters (stand-alone and packed ones, by name); see `stitch`."""
        bound = [(v.compile_range, stitch(v.plan, self.pieces, parameters, on_attention)) for v in self.versions]
        hidden = next(forward for compile_range, forward in bound if not compile_range.small)
        return Forwards(hidden, tuple(item for item in bound if item[0].small))


def compile_model(
    config: EngineConfig, make_model: Callable[[], nn.Module], progress: Progress, timeline: Timeline
) -> CompiledModel:
    """The compiled model for a config, from the cache if it holds it.

    `make_model` builds the model on the meta device; it is called only when there is something to trace. The timeline
    has it all under "compile", or under "load" if it was in the cache.

    Raises GuardError when the model's code depends on sizes, SplitError on an unknown mutating op, CompileError when
    Inductor fails, ContractError (strict) and VerificationError (verify) for a pass.
    """
    built: list[CompileCounts] = []

    def build(folder: Path) -> None:
        with timeline.span("import the compilers"):  # which a warm start does without
            from compiled_engine.graphs.build import build_entry
        with timeline.span("build"):
            built.append(build_entry(config, make_model, folder, progress, timeline))

    def load(folder: Path) -> tuple[tuple[Version, ...], dict[str, Piece]]:
        with timeline.span("load pieces"):
            versions = read_versions(folder)
            keys = dict.fromkeys(key for version in versions for key in version.plan.piece_keys())
            return versions, {key: load_piece(folder, key) for key in keys}

    with timeline.span("compile"):
        with timeline.span("cache key"):
            factors = cache_factors(config)
        # Rewrites that are to be verified have to be made.
        root = None if config.compile.verify else config.compile.cache_dir
        lookup = find_or_build(root, factors, build, load)
    if lookup.status == "hit":
        timeline.rename("compile", "load")
    versions, pieces = lookup.loaded
    if config.compile.strict:
        for version in versions:
            require_contracts(version.compile_range, version.passes)
    return CompiledModel(versions, pieces, lookup, built[0] if built else CompileCounts(0, 0))
