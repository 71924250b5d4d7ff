"""Traces a callable of a model with Dynamo, and lowers the graph to ATen.

The numbers of tokens, requests and blocks are unbacked symbols, so one trace is valid for every size in the declared
ranges and cannot specialise on the example. If a trace needs a guard on a size, GuardError is raised.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._guards import CompileContext, CompileId, Guard
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

from compiled_engine.graphs.compiler import compat
from compiled_engine.graphs.compiler.functional import to_aten, write_out_constants
from compiled_engine.graphs.compiler.guards import GuardRecord, describe_guards, dynamo_guards, proved_asserts
from compiled_engine.graphs.compiler.layer_slices import slices_first
from compiled_engine.graphs.compiler.record import SymbolRecord, symbols
from compiled_engine.graphs.compiler.repeated_layers import repeat_layers
from compiled_engine.graphs.compiler.signature import Signature
from compiled_engine.graphs.compiler.traced_layers import traced_layers
from compiled_engine.models.checkpoint.parameters import states_of
from compiled_engine.passes.framework.graph_inputs import Source, is_parameter, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.manager import PassReport
from compiled_engine.passes.framework.matching import arg, fake_mode_of, is_call
from compiled_engine.passes.framework.parameter import BUFFER, KEPT, WEIGHT, Parameter
from compiled_engine.passes.layout.lowering import lower


@dataclass(frozen=True)
class TracedGraph:
    """The ATen graph of a callable, with facts about the trace.

    A placeholder's meta["source"] is its source, a node's meta["val"] its fake value. The graph returns all results of
    the signature; `for_range` makes a graph for the results of one range. The inspector shows dynamo_graph, bytecode,
    symbols, guards and lowering.
    """

    signature: Signature
    module: fx.GraphModule
    shape_env: ShapeEnv
    dynamo_graph: str
    bytecode: tuple[types.CodeType, types.CodeType] | None  # of the traced function before and after Dynamo
    symbols: tuple[SymbolRecord, ...]
    guards: tuple[GuardRecord, ...]
    compile_id: CompileId | None
    lowering: tuple[PassReport, ...] = ()  # reports of the passes that lower foreign code

    def for_range(self, compile_range: CompileRange) -> fx.GraphModule:
        """Return a copy of the graph that returns only the results of a range. Unused parameters are left out."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self.module.graph, copies)
        results = dict(zip(self.signature.results, arg(self.module.graph.output_node(), 0), strict=True))
        graph.output(tuple(copies[results[name]] for name in self.signature.returned(compile_range)))
        graph.eliminate_dead_code()
        for placeholder in graph.find_nodes(op="placeholder"):
            if not placeholder.users and placeholder.meta["source"].kind == "parameter":
                graph.erase_node(placeholder)
        return fx.GraphModule({}, graph)


class GuardError(RuntimeError):
    """Raised if a trace, or a compiled piece, would be valid only for some sizes in the declared range."""


def without_storage(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model's meta tensors to a device, in place, without allocating memory; return the model.

    Buffers that have values are copied. The model can be traced but not executed.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(_storageless(parameter, device), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _storageless(buffer, device) if buffer.is_meta else buffer.to(device))
    return model


def _storageless(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = torch.empty_like(like, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def trace(model: nn.Module, signature: Signature, *, strict: bool = False, verify: bool = False) -> TracedGraph:
    """Return the traced graph of the callable of `model` that `signature` declares.

    Nothing is executed, so parameters need no storage.

    strict, verify: see `run_passes`; they apply to the passes that lower transformers' code. Raises GuardError if the
    graph would not be valid for every size in the declared range.
    """
    traced = _trace_layers(model, signature, strict=strict, verify=verify)
    if signature.asked:
        _add_inputs(traced.module, signature, next(model.parameters()).device)
    return traced


def _trace_layers(model: nn.Module, signature: Signature, *, strict: bool, verify: bool) -> TracedGraph:
    with ExitStack() as alone:
        found = traced_layers(model)
        for layers in found:
            alone.enter_context(layers.alone())
        traced = _trace(model, signature, strict=strict, verify=verify)
    graph = traced.module.graph
    used = [layers for layers in found if any(layers.layer_of(node) is not None for node in graph.nodes)]
    if not used:
        return traced
    if all(repeat_layers(graph, layers) for layers in used):
        traced.module.recompile()
        notes = [f"# Of {layers.path} the layers {list(layers.numbers)}; the others repeat them.\n" for layers in used]
        return replace(traced, dynamo_graph="".join(notes) + traced.dynamo_graph)
    return _trace(model, signature, strict=strict, verify=verify)


def _add_inputs(module: fx.GraphModule, signature: Signature, device: torch.device) -> None:
    """Add a placeholder for each input that passes add to the forward, with the symbolic sizes of the other inputs."""
    placeholders = module.graph.find_nodes(op="placeholder")
    by_name = {source_of(node).name: node.meta["val"] for node in placeholders if source_of(node).kind == "argument"}
    sizes = {
        size: by_name[name].shape[dim] for (name, dim), (size, *_) in signature.open_sizes().items() if name in by_name
    }
    with fake_mode_of(list(by_name.values())), module.graph.inserting_before(placeholders[-1].next):
        for tensor in signature.asked:
            node = module.graph.placeholder(tensor.name)
            node.meta["val"] = torch.empty(tensor.shape(sizes), dtype=tensor.dtype, device=device)
            node.meta["source"] = Source("argument", tensor.name)
            node.meta["step_tensor"] = tensor
    module.recompile()


def _trace(model: nn.Module, signature: Signature, *, strict: bool, verify: bool) -> TracedGraph:
    device = next(model.parameters()).device
    declared, examples = signature.open_sizes(), signature.examples(device)
    for (name, dim), size in declared.items():
        compat.mark_dynamic_size(examples[name], dim, *size)
    dynamo = _run_dynamo(model, signature, examples)
    graph, fakes = dynamo.graph, dynamo.fakes
    fake_mode = fake_mode_of(fakes)
    shape_env = fake_mode.shape_env
    assert shape_env is not None
    sources = _sources(graph, fakes, model)
    for source, fake in zip(sources, fakes, strict=True):
        if isinstance(source, Source) and source.kind == "size":
            _, low, high = declared[source.name, source.dim]
            compat.declare_range(shape_env, fake.node.expr, low, high)
    with fake_mode:
        module = to_aten(graph, fakes)
    write_out_constants(module)
    for node, source in zip(module.graph.find_nodes(op="placeholder"), sources, strict=True):
        node.meta["source"] = source
    _drop_assigned(module.graph, len(signature.results))
    proved = _discharge_asserts(module)
    require_no_guards(shape_env)
    module.graph.eliminate_dead_code()
    lowering: tuple[PassReport, ...] = ()
    if hasattr(model, "layers_path"):  # foreign code
        every_batch = CompileRange(1, signature.most_tokens)
        lowering = lower(module.graph, every_batch, device, strict=strict, verify=verify)
        slices_first(module.graph)
    module.recompile()
    return TracedGraph(
        signature=signature,
        module=module,
        shape_env=shape_env,
        dynamo_graph=graph.print_readable(print_output=False),
        bytecode=dynamo.bytecode,
        symbols=symbols(module.graph, declared),
        guards=(*describe_guards(dynamo.guards), *proved_asserts(proved)),
        compile_id=dynamo.compile_id,
        lowering=lowering,
    )


def require_no_guards(shape_env: ShapeEnv) -> None:
    """Raise GuardError if the shape environment has a guard on a size. Called after the trace and after Inductor."""
    if shape_env.guards:
        found = ", ".join(str(guard.expr) for guard in shape_env.guards)
        raise GuardError(f"the compiled model would hold only where {found}")


@dataclass(frozen=True)
class _DynamoResult:
    """The result of tracing a callable with Dynamo: the graph, the fake values of its inputs, and the guards."""

    graph: fx.GraphModule
    fakes: list[Any]  # values of the graph's placeholders
    guards: tuple[Guard, ...]
    compile_id: CompileId | None
    bytecode: tuple[types.CodeType, types.CodeType] | None


def _run_dynamo(model: nn.Module, signature: Signature, examples: dict[str, torch.Tensor]) -> _DynamoResult:
    held: dict[str, Any] = {}

    def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        placeholders = graph.graph.find_nodes(op="placeholder")
        for node in placeholders:
            node.meta["source_name"] = compat.source_name(node)
        held.update(graph=graph, fakes=[node.meta["example_value"] for node in placeholders])
        held.update(guards=dynamo_guards(), compile_id=CompileContext.current_compile_id())
        output = arg(graph.graph.output_node(), 0)
        return lambda *args: tuple(torch.empty(0) for _ in output)

    entry = _fresh_entry(signature)
    with torch.no_grad(), compat.bytecode_of(entry) as bytecode:
        torch.compile(entry, backend=backend, fullgraph=True, dynamic=False)(model, *signature.passed(examples))
    return _DynamoResult(bytecode=bytecode[0] if bytecode else None, **held)


def _fresh_entry(signature: Signature) -> Callable[..., Any]:
    """Return a new function that computes the signature's results, for Dynamo to trace.

    Dynamo caches compilations per code object, and limits their number. A function with a new code object cannot reach
    the limit, and its compilations are dropped with it.
    """
    lines = [f"def traced({', '.join(('model', *signature.arguments))}):"]
    lines += [f"    {name} = {expression}" for name, expression in signature.results.items()]
    lines.append(f"    return ({', '.join(signature.results)},)")
    namespace: dict[str, Any] = {"__name__": __name__}
    # The file must exist: torch 2.11 wraps functions without one, and their arguments lose their names.
    exec(compile("\n".join(lines) + "\n", __file__, "exec"), namespace)
    return namespace["traced"]


def _sources(graph: fx.GraphModule, fakes: list[Any], model: nn.Module) -> list[Source | Parameter]:
    parameters, states = dict(model.named_parameters()) | dict(model.named_buffers()), states_of(model)
    sources: list[Source | Parameter | None] = []
    for node in graph.graph.find_nodes(op="placeholder"):
        name = node.meta["source_name"]
        is_tensor = isinstance(node.meta["example_value"], torch.Tensor)
        sources.append(_named_source(name, parameters, states) if is_tensor else None)
    sized = [
        (source.name, dim, fake.shape[dim].node.expr)
        for source, fake in zip(sources, fakes, strict=True)
        if source is not None and source.kind == "argument"
        for dim in range(fake.dim())
        if isinstance(fake.shape[dim], torch.SymInt)
    ]
    for index, fake in enumerate(fakes):
        if sources[index] is None:
            name, dim = next((name, dim) for name, dim, expr in sized if expr == fake.node.expr)
            sources[index] = Source("size", name, dim)
    return [source for source in sources if source is not None]


def _named_source(name: str, parameters: dict[str, torch.Tensor], states: Collection[str]) -> Source | Parameter:
    """Return the source that Dynamo's name of a graph input stands for.

    name: such as L['model']._modules['layers']._parameters['weight']. parameters: the model's parameters and buffers by
    path. states: the paths of recurrences' states. Raises RuntimeError for a tensor of the model that is not in
    `parameters`.
    """
    argument, rest = re.fullmatch(r"L\['(\w+)'\](.*)", name).groups()  # type: ignore[union-attr]
    steps = [step for step in re.findall(r"\w+", rest) if step not in ("_modules", "_parameters", "_buffers")]
    if argument != "model":
        return Source("argument", ".".join([argument, *steps]))
    path = ".".join(steps)
    if path not in parameters:
        raise RuntimeError(f"graph input {name} is not a parameter or buffer of the model")
    tensor = parameters[path]
    role = KEPT if path in states else WEIGHT if isinstance(tensor, nn.Parameter) else BUFFER
    return Parameter.of(path, tensor, role)


def _drop_assigned(graph: fx.Graph, num_results: int) -> None:
    """Remove the graph's outputs after the first `num_results`: tensors that the code assigns to module attributes.

    Parameters, buffers and casts of these are dropped, since each run assigns them anew. Raises ValueError for any
    other tensor, since later runs might read it.
    """
    output = graph.output_node()
    values = arg(output, 0)
    for value in values[num_results:]:
        made_of = arg(value, 0) if is_call(value, torch.ops.aten._to_copy.default) else value
        if not is_parameter(made_of):
            raise ValueError("the model's code assigns tensors to attributes while it runs, which a graph cannot do")
    output.args = (tuple(values[:num_results]),)


def _discharge_asserts(module: fx.GraphModule) -> tuple[str, ...]:
    """Remove the run-time asserts from the graph, and return their messages.

    Raises GuardError for an assert that does not follow from the declared ranges of sizes.
    """
    proved = []
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        condition = node.args[0]
        value = condition.meta.get("val") if isinstance(condition, fx.Node) else condition
        if isinstance(value, torch.SymBool):
            value = statically_known_true(value)
        if value is not True:
            raise GuardError(f"the trace needs a run-time check that cannot be proved: {node.args[1]}")
        proved.append(str(node.args[1]))
        module.graph.erase_node(node)
    return tuple(proved)
