"""Compiles a model or loads it from the compile cache, and binds the compiled callables to parameter tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compiled_engine.attention.op import OnAttention
from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.graphs.cache.key import cache_factors
from compiled_engine.graphs.cache.lookup import Lookup, find_or_build
from compiled_engine.graphs.compiler.compiled_range import CompiledRange, read_compiled_ranges
from compiled_engine.graphs.compiler.cpp_piece import load_cpp_piece, piece_folder
from compiled_engine.graphs.compiler.direct_piece import load_direct
from compiled_engine.graphs.compiler.plan import distinct_calls
from compiled_engine.graphs.compiler.signature import FORWARD, VARIANTS
from compiled_engine.graphs.compiler.stitch import Forward, stitch
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.manager import require_contracts
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.process.in_background import import_apart
from compiled_engine.process.memory import collection_paused
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline

Piece = Callable[..., Any]


@dataclass(frozen=True)
class CompileCounts:
    """Counts how often this process compiled the model (`traces`), and the unique pieces that it compiled (`compiles`).

    Both are 0 after a cache hit.
    """

    traces: int
    compiles: int


@dataclass(frozen=True)
class BoundRange:
    """A compiled callable of the model for one range of token counts, bound to its parameter tensors."""

    compile_range: CompileRange
    call: Forward
    ends_at_logits: bool = False  # a forward that returns the logits of all tokens; others return hidden states
    received_row_bytes: int = 0  # bytes per token that the callable reads from `CompiledModel.received`


@dataclass(frozen=True)
class CompiledModel:
    """A compiled model loaded from its cache entry: the plans of its callables, and the pieces that the plans call."""

    ranges: tuple[CompiledRange, ...]
    pieces: dict[str, Piece]
    direct: frozenset[str]  # pieces that Inductor did not compile
    lookup: Lookup
    counts: CompileCounts
    # Only for a part of the model that runs separately, such as a pipeline stage. wrap: completes a bound range.
    # received: the tensor (uint8) from which bound ranges read values of another part; None: they read none.
    wrap: Callable[[CompiledRange, BoundRange], BoundRange] | None = None
    received: torch.Tensor | None = None

    def of(self, name: str) -> tuple[CompiledRange, ...]:
        return tuple(r for r in self.ranges if r.callable == name)

    @property
    def ends(self) -> tuple[str, ...]:
        """The names of the callables that are neither the forward nor a variant of it, such as the logits.

        Each of them has a single compile range.
        """
        return tuple(r.callable for r in self.ranges if r.callable not in (FORWARD, *VARIANTS))

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the compiled variants of the forward, such as the variant for steps with adapters."""
        return tuple(name for name in VARIANTS if self.of(name))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The descriptions of the parameters of all callables that this process runs, without duplicates."""
        return tuple(dict.fromkeys(parameter for r in self.ranges for parameter in r.bound_plan.parameters))

    def is_direct(self, compile_range: CompileRange) -> bool:
        """Return whether Inductor compiled no piece of this range's forward, so that generated Python calls all ops."""
        keys = (r.bound_plan.piece_keys() for r in self.of(FORWARD) if r.compile_range == compile_range)
        return self.direct.issuperset(*keys)

    def bind(
        self,
        name: str,
        parameters: Mapping[str, torch.Tensor],
        on_attention: OnAttention | None = None,
        *,
        distinct: bool = False,
    ) -> tuple[BoundRange, ...]:
        """Return the compiled ranges of the callable `name`, bound to parameter tensors.

        Ranges for small batches come first; the last one serves every batch. parameters: tensors by name, including
        packed ones. on_attention: called in place of each attention op, see `stitch`. distinct: bind shorter plans for
        warming up, see `distinct_calls`.
        """
        bound, ranges = [], self.of(name)
        for r in ranges:
            plan = distinct_calls(r.bound_plan) if distinct else r.bound_plan
            ends_at_logits = r.returns[0] != ranges[-1].returns[0]  # the last one ends at hidden states
            each = BoundRange(r.compile_range, stitch(plan, self.pieces, parameters, on_attention), ends_at_logits)
            bound.append(each if self.wrap is None else self.wrap(r, each))
        return tuple(bound)


def compile_model(
    config: EngineConfig, make_model: Callable[[ModelConfig], nn.Module], progress: Progress, timeline: Timeline
) -> CompiledModel:
    """Return the compiled model for a config: loaded from the cache if it has an entry, otherwise compiled.

    With compile.verify, the model is always compiled, and not stored. make_model: builds the model on the meta device;
    called only for a trace. timeline: gets a span "compile", or "load" after a cache hit, and spans for its parts.

    Raises GuardError if the model's code depends on sizes, SplitError for an unknown op that mutates its inputs, and
    CompileError if Inductor fails. With compile.strict, raises ContractError for a pass that matches less often than
    its contract; with compile.verify, VerificationError for a rewrite with a different result.
    """
    compiles: list[int] = []
    device_type = config.device.type

    def build(folder: Path) -> None:
        # Imported here, as a warm start does not need the compilers.
        with collection_paused(), timeline.span("import the compilers"):
            build_entry = import_apart("compiled_engine.graphs.compiler.build").build_entry
        with timeline.span("build"):
            compiles.append(build_entry(config, make_model, folder, progress, timeline))

    def load(folder: Path) -> tuple[tuple[CompiledRange, ...], dict[str, Piece], frozenset[str]]:
        with timeline.span("load pieces"):
            ranges = read_compiled_ranges(folder)
            keys = dict.fromkeys(key for compiled_range in ranges for key in compiled_range.plan.piece_keys())
            pieces = {key: load_piece(folder, key, device_type) for key in keys}
            return ranges, pieces, frozenset(key for key in keys if _is_direct(folder, key))

    with timeline.span("compile"):
        with timeline.span("cache key"):
            factors = cache_factors(config)
        # Verification needs the rewrites, so nothing is taken from the cache.
        root = None if config.compile.verify else config.compile.cache_dir
        lookup = find_or_build(root, factors, build, load)
    if lookup.status == "hit":
        timeline.rename("compile", "load")
    ranges, pieces, direct = lookup.loaded
    if config.compile.strict:
        for compiled_range in ranges:
            require_contracts(compiled_range.compile_range, compiled_range.passes)
    counts = CompileCounts(traces=len(compiles), compiles=sum(compiles))
    return CompiledModel(ranges, pieces, direct, lookup, counts)


def load_piece(entry: Path, key: str, device_type: str) -> Piece:
    """Load a compiled piece of the model's graph from a cache entry, and return the function that runs it.

    A piece is stored as C++ kernels (see `load_cpp_piece`), as Inductor's artifact, or as generated Python (see
    `load_direct`).
    """
    if piece_folder(entry, key).exists():
        return load_cpp_piece(piece_folder(entry, key))
    if _artifact(entry, key).exists():
        compile_piece = import_apart("compiled_engine.graphs.compiler.compile_piece")  # Inductor, which takes seconds
        return compile_piece.load_artifact(entry, key)
    return load_direct((entry / "pieces" / f"{key}.py").read_text(), device_type)


def _is_direct(entry: Path, key: str) -> bool:
    return not piece_folder(entry, key).exists() and not _artifact(entry, key).exists()


def _artifact(entry: Path, key: str) -> Path:
    return entry / "pieces" / f"{key}.bin"
