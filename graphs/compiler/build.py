"""Builds an entry of the compile cache.

Each callable of the model is traced. For each compile range, the passes rewrite a copy of the graph, which is then
split into pieces. Each unique piece is compiled once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import fx, nn
from torch._guards import CompileId
from torch._logging import trace_structured

from compiled_engine.config import EngineConfig, ImagesConfig, ModelConfig
from compiled_engine.graphs.compiler.compile_pool import compile_pool
from compiled_engine.graphs.compiler.compiled_range import CompiledRange, folder_of, write_compiled_range
from compiled_engine.graphs.compiler.cpp_piece import piece_folder
from compiled_engine.graphs.compiler.direct_piece import direct_source, is_direct
from compiled_engine.graphs.compiler.record import PieceRecord, Record, module_tree, phases_since, write_trace
from compiled_engine.graphs.compiler.signature import FORWARD, Signature, callables_of
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.trace import TracedGraph, trace, without_storage
from compiled_engine.kv_format import FP8
from compiled_engine.models.checkpoint.build_model import shards_of
from compiled_engine.parallel.group import FakeGroup, in_group
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.passes.framework.graph_inputs import describe_shards, shards_in
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass
from compiled_engine.passes.framework.graph_text import graph_text
from compiled_engine.passes.framework.manager import PassReport, run_passes
from compiled_engine.passes.framework.profile import profile_of
from compiled_engine.passes.framework.verifier import copy_of
from compiled_engine.passes.images.steps import image_passes
from compiled_engine.passes.invariance.batch_invariance import BatchInvariance, prepare_invariant
from compiled_engine.passes.layout.aux_hidden_states import AuxHiddenStates
from compiled_engine.passes.linear import small_batch_linear_cpu
from compiled_engine.passes.linear.adapters import Adapters
from compiled_engine.passes.linear.gated_linear import GatedLinear
from compiled_engine.passes.linear.merge_linears import MergeLinears
from compiled_engine.passes.parallel.all_reduce_residual_rms_norm import AllReduceResidualRMSNorm
from compiled_engine.passes.parallel.tensor_parallel import TensorParallel
from compiled_engine.passes.quantised.kv_scales import KVScales
from compiled_engine.passes.quantised.quantise import Quantise
from compiled_engine.passes.quantised.quantise_activations import QuantiseActivations
from compiled_engine.passes.quantised.quantise_experts import QuantiseExperts, is_experts
from compiled_engine.passes.registry import op_modules, registered_passes
from compiled_engine.passes.rope.expand_references import expand_references
from compiled_engine.passes.rope.rope_angles import RopeAngles
from compiled_engine.passes.speech.hoist_encoder import KINDS, HoistEncoder
from compiled_engine.process.memory import collection_paused
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline

# Files of an entry that go into torch's structured trace (TORCH_TRACE=folder), where tlparse shows them beside Dynamo's
# and Inductor's: the lowered graph and each pass's diff; each range's graph, plan and forward; output code.
_STAGES = ("trace/aten_graph.txt", "passes/*.diff", "graph.txt", "plan.json", "forward.py", "pieces/*.py")


def emit_entry(entry: Path, compile_id: CompileId | None) -> None:
    """Add files of the entry, such as graphs and plans, to torch's structured trace. Does nothing without such a trace.

    _STAGES lists the files. Each file becomes an artifact named compiled_engine.<its path, with underscores>.
    compile_id: Dynamo's id of the compilation to which the artifacts belong.
    """
    for path in (path for pattern in _STAGES for path in sorted(entry.rglob(pattern))):
        name = "_".join(path.relative_to(entry).with_suffix("").parts)
        trace_structured(
            "artifact",
            metadata_fn=partial(dict, name=f"compiled_engine.{name}", encoding="string"),
            payload_fn=path.read_text,
            compile_id=compile_id,
            expect_trace_id=False,
        )


class EntryBuilder:
    """Compiles the callables of a model, and writes the results to `folder` (layout: docs/caching.md).

    Call `compile_callable` for each callable, then `finish`, which compiles each unique piece once.
    """

    def __init__(self, config: EngineConfig, folder: Path, progress: Progress, timeline: Timeline):
        self._config, self._folder, self._progress, self._timeline = config, folder, progress, timeline
        self._start_s = timeline.now()
        self._pieces: dict[str, str] = {}
        self._direct: set[str] = set()
        self._traced: dict[str, TracedGraph] = {}
        (folder / "pieces").mkdir()

    def compile_callable(
        self, name: str, module: nn.Module, signature: Signature, whole: TracedGraph | None = None
    ) -> None:
        """Trace a callable of the model; for each of its ranges run the passes, split the graph, and write the plan.

        The pieces are collected for `finish`. module: the model with one rank's shapes, from `without_storage`. whole:
        the trace of the undivided model, from `trace_whole`.
        """
        place, timeline = folder_of(name), self._timeline
        with self._progress.stage(f"trace {name}"), timeline.span(f"{place}trace"):
            traced = self._traced[name] = trace_rank(self._config, module, signature)
        for compile_range in signature.ranges:
            with timeline.span(f"passes {place}{compile_range.name}"):
                graph, reports = apply_passes(self._config, traced, compile_range, whole)
            with timeline.span(f"split {place}{compile_range.name}"):
                plan, unique = make_plan(graph.graph, split(graph.graph), signature.called_with)
                returns = (
                    *(self._hoisted() if signature.hoists else signature.returned(compile_range)),
                    *(f"input of layer {layer}" for layer in signature.aux_layers),
                )
                compiled = CompiledRange(name, compile_range, plan, returns, reports)
                write_compiled_range(self._folder, compiled, graph_text(graph.graph))
            self._pieces |= unique
            if signature.direct:
                self._direct.update(unique)

    def _hoisted(self) -> list[str]:
        return [f"{kind} of layer {layer}" for layer in range(self._config.model.num_layers) for kind in KINDS]

    def finish(self, model: nn.Module) -> int:
        """Compile the collected pieces, write the remaining files of the entry, and return the number of unique pieces.

        model: as passed to `compile_callable`; its module tree is recorded.
        """
        folder, timeline, workers = self._folder, self._timeline, self._config.compile.workers
        with timeline.span("compile pieces"):
            records = compile_pieces(folder, self._pieces, workers, self._progress, timeline, self._direct)
        with timeline.span("record"):
            for name, traced in self._traced.items():
                aten_graph = graph_text(traced.module.graph)
                write_trace(folder / folder_of(name) / "trace", traced.bytecode, traced.dynamo_graph, aten_graph)
            phases = phases_since(timeline.spans, self._start_s)
            symbols = tuple(symbol for traced in self._traced.values() for symbol in traced.symbols)
            guards = tuple(guard for traced in self._traced.values() for guard in traced.guards)
            Record(phases, module_tree(model), symbols, guards, records).write(folder)
            emit_entry(folder, next(iter(self._traced.values())).compile_id)
        return len(self._pieces)


def build_entry(
    config: EngineConfig,
    make_model: Callable[[ModelConfig], nn.Module],
    folder: Path,
    progress: Progress,
    timeline: Timeline,
) -> int:
    """Compile all callables of a model, and write the results to `folder`. Returns the number of unique pieces.

    make_model: builds the model on the meta device.
    """
    # Traces make many long-lived objects; garbage collection would scan them again and again.
    with collection_paused():
        builder = EntryBuilder(config, folder, progress, timeline)
        with timeline.span("build the model"):
            model = without_storage(make_model(local_model(config)), config.device)
        for name, signature in callables_of(config).items():
            builder.compile_callable(name, model, signature, trace_whole(config, make_model, name))
    return builder.finish(model)


def compile_pieces(
    folder: Path,
    pieces: Mapping[str, str],
    workers: int,
    progress: Progress,
    timeline: Timeline,
    direct: Collection[str] = (),
) -> tuple[PieceRecord, ...]:
    """Write each piece to the entry `folder` in a form that can be loaded, and return a record of each.

    Pieces with nothing to fuse, and those whose keys are in `direct`, become generated Python. Inductor compiles all
    others, in `workers` processes, or in this process in the cases that `compile_pool` names. pieces: key -> JSON.
    """
    records = []
    for_inductor = []
    for key, text in pieces.items():
        (folder / "pieces" / f"{key}.json").write_text(text, encoding="utf-8")
        if key in direct or is_direct(text):
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
    for key in for_inductor:  # not earlier, as pieces share kernels
        if piece_folder(folder, key).is_dir():
            shutil.rmtree(folder / "inductor" / key)
    return tuple(records)


def trace_rank(config: EngineConfig, model: nn.Module, signature: Signature) -> TracedGraph:
    """Return the traced graph of a callable with one rank's shapes, and record in it how parameters are sharded.

    model: the model with one rank's shapes. signature: declares the callable.
    """
    traced = trace(model, signature, strict=config.compile.strict, verify=config.compile.verify)
    describe_shards(traced.module.graph, shards_of(config))
    return traced


def trace_whole(
    config: EngineConfig, make_model: Callable[[ModelConfig], nn.Module], name: str = FORWARD
) -> TracedGraph | None:
    """Trace a callable of the undivided model, against which the ranks' graph is verified.

    Returns None without tensor parallelism, or if nothing is verified.
    """
    if config.parallel.tensor_parallel_size == 1 or not config.compile.verify:
        return None
    undivided = replace(config, parallel=replace(config.parallel, tensor_parallel_size=1))
    whole = trace(without_storage(make_model(config.model), config.device), callables_of(undivided)[name])
    if config.batch_invariant:
        prepare_invariant(whole.module.graph)
    return whole


def apply_passes(
    config: EngineConfig, traced: TracedGraph, compile_range: CompileRange, whole: TracedGraph | None = None
) -> tuple[fx.GraphModule, tuple[PassReport, ...]]:
    """Run the passes on a copy of the traced graph for one range, and return the graph, ready to be split, and reports.

    On a CPU, fused ops are then decomposed, so that Inductor can compile them. They stay whole in callables that run op
    by op (Signature.direct), in small ranges that C++ kernels serve, and in batch-invariant engines. whole: result of
    `trace_whole`.
    """
    module, reports = fuse(config, traced, compile_range, whole)
    facts = config.model, config.parallel.tensor_parallel_size, compile_range.high
    expands = config.device.type == "cpu" and not traced.signature.direct and not config.batch_invariant
    if expands and (not compile_range.small or small_batch_linear_cpu.obstacle(*facts) is not None):
        module = expand_references(module)
    return module, reports


def fuse(
    config: EngineConfig, traced: TracedGraph, compile_range: CompileRange, whole: TracedGraph | None = None
) -> tuple[fx.GraphModule, tuple[PassReport, ...]]:
    """Run the passes on a copy of the traced graph for one range, and return the graph and reports; decompose no op.

    In callables that run op by op (Signature.direct), no pass fuses ops. whole: result of `trace_whole`.
    """
    module = traced.for_range(compile_range)
    if config.batch_invariant:
        prepare_invariant(module.graph)
    own = traced.signature
    cut: tuple[PassReport, ...] = ()
    if own.hoisted:  # first, since the contracts of other passes are those of the part that is left
        assert config.speech is not None
        assert config.model.speech is not None
        hoist = HoistEncoder(config.speech.num_slots * config.model.speech.length, hoists=own.hoists)
        cut = run_passes(
            module.graph, (hoist,), (hoist.name,), compile_range, config.device, verify=config.compile.verify
        )
    structure = structure_passes(config, module.graph, compile_range, whole, own.aux_layers, own.images)
    others, enabled = fusion_passes(config, traced.signature)
    with in_group(FakeGroup(config.parallel.tensor_parallel_size)):  # other ranks take no part in the verification
        reports = run_passes(
            module.graph,
            (*structure, *others),
            (*(graph_pass.name for graph_pass in structure), *enabled),
            compile_range,
            config.device,
            profile=profile_of(config.device),
            strict=config.compile.strict,
            verify=config.compile.verify,
        )
    return module, (*traced.lowering, *cut, *reports)


def fusion_passes(config: EngineConfig, signature: Signature) -> tuple[tuple[GraphPass, ...], tuple[str, ...]]:
    """Return the passes that run after `structure_passes`, in order, and the names of the enabled ones.

    These are the registered passes, or none in direct callables, which run op by op. Exceptions, by the passes' names:
    - In callables with adapters, the pass for adapters follows merge_linears and is always enabled. gated_linear is
      disabled, since adapters come between a linear and its activation.
    - rope_angles is disabled if positions have three dimensions, as with images.
    - quantise_activations gets the model's quantisation rules.
    - In batch-invariant engines, batch_invariance comes last, also in direct callables, and takes the place of
      gated_linear, quantise_activations, whose roundings it emits, and all_reduce_residual_rms_norm.
    """
    adapters = () if config.adapters is None or not signature.adapted else (Adapters(config.adapters),)
    enabled = (*config.compile.passes, *(each.name for each in adapters))
    if config.batch_invariant:
        last = BatchInvariance()
        left_out = GatedLinear.name, QuantiseActivations.name, AllReduceResidualRMSNorm.name
        enabled = (*(name for name in enabled if name not in left_out), last.name)
        return ((last,) if signature.direct else (*registered_passes(), last)), enabled
    if signature.direct:
        return adapters, enabled
    rounding = QuantiseActivations(config.model.quantisation)
    passes = tuple(rounding if each.name == rounding.name else each for each in registered_passes())
    if signature.images is not None and signature.images.sections:
        enabled = tuple(name for name in enabled if name != RopeAngles.name)
    if not adapters:
        return passes, enabled
    place = next(index for index, each in enumerate(passes, 1) if each.name == MergeLinears.name)
    names = tuple(name for name in enabled if name != GatedLinear.name)
    return (*passes[:place], *adapters, *passes[place:]), names


def structure_passes(
    config: EngineConfig,
    graph: fx.Graph,
    compile_range: CompileRange,
    whole: TracedGraph | None,
    aux_layers: tuple[int, ...] = (),
    images: ImagesConfig | None = None,
) -> tuple[GraphPass, ...]:
    """Return the passes that run first and cannot be disabled: without them the graph would compute something else.

    Examples are tensor parallelism and quantisation. graph: the range's graph, from `trace_rank`. whole: result of
    `trace_whole`. aux_layers, images: see Signature.
    """
    num_ranks, shards = config.parallel.tensor_parallel_size, shards_in(graph)
    found: list[GraphPass] = []
    if num_ranks > 1:
        undivided = None if whole is None else whole.for_range(compile_range).graph
        found.append(TensorParallel(shards, num_ranks, undivided))
    if config.model.quantisation is not None:
        before = copy_of(graph) if config.compile.verify else None
        found.append(Quantise(config.model.quantisation, num_ranks, before))
        if any(map(is_experts, graph.find_nodes(op="placeholder"))):
            found.append(QuantiseExperts(config.model.quantisation, config.device, num_ranks, before))
    if config.cache.kv_dtype == FP8:
        found.append(KVScales())
    if images is not None:
        found += image_passes(images)
    if aux_layers:
        found.append(AuxHiddenStates(aux_layers))
    return tuple(found)
