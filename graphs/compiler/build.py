"""Build a cache entry: trace the model, run the passes for each range, split, and compile the unique pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import fx, nn

from compiled_engine.collectives.group import StandIn, in_group
from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.graphs.compiler.compile_pool import compile_pool
from compiled_engine.graphs.compiler.compiled_range import CompiledRange, write_compiled_range
from compiled_engine.graphs.compiler.direct_piece import direct_source, is_direct
from compiled_engine.graphs.compiler.example_inputs import example_inputs, without_storage
from compiled_engine.graphs.compiler.logits_head_writer import write_logits_head
from compiled_engine.graphs.compiler.record import PieceRecord, Record, module_tree, phases_since, write_trace
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.stitch import forward_source
from compiled_engine.graphs.compiler.structured_trace import emit_entry
from compiled_engine.graphs.compiler.trace import TracedGraph, trace
from compiled_engine.models.checkpoint.rank_shards import shards_of
from compiled_engine.passes import small_batch_linear_cpu
from compiled_engine.passes.expand_references import expand_references
from compiled_engine.passes.graph_inputs import describe_shards, shards_in
from compiled_engine.passes.graph_pass import CompileRange, GraphPass
from compiled_engine.passes.graph_text import graph_text
from compiled_engine.passes.manager import PassReport, run_passes
from compiled_engine.passes.profile import profile_of
from compiled_engine.passes.quantise import Quantise
from compiled_engine.passes.registry import op_modules, registered_passes
from compiled_engine.passes.tensor_parallel import TensorParallel
from compiled_engine.passes.verifier import copy_of
from compiled_engine.process.garbage_collection import collection_paused
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline


def compile_ranges(config: EngineConfig) -> tuple[CompileRange, ...]:
    """The compile ranges for small batches, ascending, then the dynamic one, which serves every batch."""
    small = [CompileRange(low, high, small=True) for low, high in config.compile.ranges]
    return (*small, CompileRange(1, config.scheduler.max_num_batched_tokens))


def build_entry(
    config: EngineConfig,
    make_model: Callable[[ModelConfig], nn.Module],
    folder: Path,
    progress: Progress,
    timeline: Timeline,
) -> int:
    """Trace and compile into `folder`, whose layout docs/caching.md describes; returns the number of unique pieces."""
    start_s = timeline.now()
    (folder / "pieces").mkdir()
    pieces: dict[str, str] = {}
    # A trace makes many objects, and they stay: looking through them took a fifth of the time.
    with collection_paused():
        with progress.stage("trace"), timeline.span("trace"):
            model = make_model(config.local_model)
            traced = trace_rank(config, model)
            whole = trace_whole(config, make_model)
        for compile_range in compile_ranges(config):
            with timeline.span(f"passes {compile_range.name}"):
                module, reports = apply_passes(config, traced, compile_range, whole)
            with timeline.span(f"split {compile_range.name}"):
                plan, unique = make_plan(module.graph, split(module.graph))
                pieces |= unique
                compiled = CompiledRange(compile_range, plan, reports)
                write_compiled_range(folder, compiled, forward_source(plan), graph_text(module.graph))
    with timeline.span("compile pieces"):
        records = compile_pieces(folder, pieces, config.compile.workers, progress, timeline)
    with timeline.span("record"):
        logits, with_code = logits_graph(config, traced.module.graph)
        write_logits_head(folder, logits, with_code=with_code)
        write_trace(folder, traced.bytecode, traced.dynamo_graph, graph_text(traced.module.graph))
        phases = phases_since(timeline.spans, start_s)
        Record(phases, module_tree(model), traced.symbols, traced.guards, records).write(folder)
        emit_entry(folder, traced.compile_id)
    return len(pieces)


def compile_pieces(
    folder: Path, pieces: Mapping[str, str], workers: int, progress: Progress, timeline: Timeline
) -> tuple[PieceRecord, ...]:
    """Make each piece (key -> JSON) ready to load: by Inductor, or as Python where nothing is left to fuse."""
    records = []
    for_inductor = []
    for key, text in pieces.items():
        (folder / "pieces" / f"{key}.json").write_text(text, encoding="utf-8")
        if is_direct(text):
            (folder / "pieces" / f"{key}.py").write_text(direct_source(text), encoding="utf-8")
            records.append(PieceRecord(key, 0.0, None))
        else:
            for_inductor.append(key)
    if not for_inductor:
        return tuple(records)
    with (
        progress.stage("compile", total=len(for_inductor)) as advance,
        compile_pool(folder, min(workers, len(for_inductor)), op_modules()) as compile_all,
    ):
        for piece in compile_all(for_inductor):
            timeline.add(f"piece {piece.key}", timeline.now() - piece.seconds, piece.seconds, "compile pieces")
            records.append(piece)
            advance(1)
    return tuple(records)


def trace_rank(config: EngineConfig, model: nn.Module) -> TracedGraph:
    """Trace a rank's model, which is on the meta device, and say which part of the undivided one its parameters are."""
    model = without_storage(model, config.device)
    traced = trace(model, example_inputs(config), strict=config.compile.strict, verify=config.compile.verify)
    describe_shards(traced.module.graph, shards_of(config))
    return traced


def trace_whole(config: EngineConfig, make_model: Callable[[ModelConfig], nn.Module]) -> TracedGraph | None:
    """The undivided model, where a rank's share is to be compared with it."""
    if config.parallel.tensor_parallel_size == 1 or not config.compile.verify:
        return None
    undivided = replace(config, parallel=replace(config.parallel, tensor_parallel_size=1))
    return trace(without_storage(make_model(config.model), config.device), example_inputs(undivided))


def apply_passes(
    config: EngineConfig, traced: TracedGraph, compile_range: CompileRange, whole: TracedGraph | None = None
) -> tuple[fx.GraphModule, tuple[PassReport, ...]]:
    """The graph of one range after its passes, as it is split.

    On a CPU fused ops are written out, except where C++ kernels serve the whole range. whole: what `trace_whole`
    returns.
    """
    module = traced.for_range(compile_range)
    structure = structure_passes(config, module.graph, compile_range, whole)
    with in_group(StandIn(config.parallel.tensor_parallel_size)):  # the other ranks do not verify with this one
        reports = run_passes(
            module.graph,
            (*structure, *registered_passes()),
            (*(graph_pass.name for graph_pass in structure), *config.compile.passes),
            compile_range,
            config.device,
            profile=profile_of(config.device),
            strict=config.compile.strict,
            verify=config.compile.verify,
        )
    reports = (*traced.lowering, *reports)
    facts = config.model, config.parallel.tensor_parallel_size, compile_range.high
    on_cpu = config.device.type == "cpu"
    if on_cpu and (not compile_range.small or small_batch_linear_cpu.obstacle(*facts) is not None):
        module = expand_references(module)
    return module, reports


def logits_graph(config: EngineConfig, graph: fx.Graph) -> tuple[fx.Graph, bool]:
    """The graph from which the logits' code is taken, and whether it is: of other code than the model has itself."""
    quantisation = config.model.quantisation
    if quantisation is None:
        return graph, config.model.transformers is not None
    copy = copy_of(graph)
    matches = Quantise(quantisation).run(copy).matches
    return copy, config.model.transformers is not None or matches > 0


def structure_passes(
    config: EngineConfig, graph: fx.Graph, compile_range: CompileRange, whole: TracedGraph | None
) -> tuple[GraphPass, ...]:
    """Passes that come before all others and cannot be switched off: they say what a graph means to its device.

    graph: of the range, of what `trace_rank` returns.
    """
    num_ranks, shards = config.parallel.tensor_parallel_size, shards_in(graph)
    found: list[GraphPass] = []
    if num_ranks > 1:
        assert shards, "a graph of several ranks that does not say which part of its parameters they have"
        undivided = None if whole is None else whole.for_range(compile_range).graph
        found.append(TensorParallel(shards, num_ranks, undivided))
    if config.model.quantisation is not None:
        before = copy_of(graph) if config.compile.verify else None
        found.append(Quantise(config.model.quantisation, num_ranks, before))
    return tuple(found)
