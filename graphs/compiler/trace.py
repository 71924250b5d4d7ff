"""Trace a whole model once with Dynamo and lower it to ATen.

The token, request and block counts are unbacked symbols, so one trace serves every size in the declared range and
no guard can arise from the example. The trace is refused if one does.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._guards import CompileContext, CompileId, Guard
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

from compiled_engine.attention.inputs import (
    FORWARD_ARGUMENTS,
    SIZES,
    ForwardArguments,
    StepTensor,
    arguments_of,
    attention_inputs_of,
)
from compiled_engine.graphs.compiler import compat
from compiled_engine.graphs.compiler.functional import to_aten
from compiled_engine.graphs.compiler.guards import GuardRecord, describe_guards, dynamo_guards, proved_asserts
from compiled_engine.graphs.compiler.record import SymbolRecord, symbols
from compiled_engine.graphs.compiler.repeated_layers import repeat_layers
from compiled_engine.graphs.compiler.traced_layers import traced_layers
from compiled_engine.passes.graph_inputs import Source, source_of
from compiled_engine.passes.graph_pass import CompileRange
from compiled_engine.passes.lowering import is_foreign, lower
from compiled_engine.passes.manager import PassReport
from compiled_engine.passes.matching import arg, fake_mode_of
from compiled_engine.passes.parameter import BUFFER, WEIGHT, Parameter


@dataclass(frozen=True)
class ForwardInputs:
    """Inputs of a trace: the forward's declared arguments, an example of each by name, and the largest number of
    tokens. `asked`: the step tensors that passes declare, which the model does not read.
    """

    declared: tuple[StepTensor, ...]
    examples: Mapping[str, torch.Tensor]
    backend: str
    max_tokens: int
    asked: tuple[StepTensor, ...] = ()

    def arguments(self) -> ForwardArguments:
        """The examples as the model's forward takes them."""
        caches = [example for name, example in self.examples.items() if name.startswith("kv_caches.")]
        step = {name: example for name, example in self.examples.items() if not name.startswith("kv_caches.")}
        return arguments_of(step, attention_inputs_of(step, self.backend), caches)

    def open_sizes(self) -> dict[tuple[str, int], tuple[str, int, int]]:
        """(argument, dimension) -> (name of the size, least, most); equal names are equal sizes."""
        bounds = SIZES | {"tokens": (1, self.max_tokens)}
        return {
            (tensor.name, number): (dim, *bounds[dim])
            for tensor in self.declared
            for number, dim in enumerate(tensor.dims)
            if isinstance(dim, str)
        }


@dataclass(frozen=True)
class TracedGraph:
    """The ATen graph of a forward; each placeholder's meta holds its `source`, each node's its fake `val`.

    Its outputs are (hidden_TD, logits_TV) of every token; `for_range` keeps one of them. The rest is what the
    inspector shows: Dynamo's graph and the bytecode that it made of the entry, the declared sizes, the guards with what
    discharges each, and what the passes did that lower foreign code.
    """

    module: fx.GraphModule
    shape_env: ShapeEnv
    dynamo_graph: str
    bytecode: tuple[types.CodeType, types.CodeType] | None
    symbols: tuple[SymbolRecord, ...]
    guards: tuple[GuardRecord, ...]
    compile_id: CompileId | None
    lowering: tuple[PassReport, ...] = ()

    def for_range(self, compile_range: CompileRange) -> fx.GraphModule:
        """A copy of the graph with the output that a range needs, and only the parameters that this takes."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self.module.graph, copies)
        hidden, logits = arg(self.module.graph.output_node(), 0)
        graph.output((copies[logits if compile_range.small else hidden],))
        graph.eliminate_dead_code()
        for placeholder in graph.find_nodes(op="placeholder"):
            if not placeholder.users and placeholder.meta["source"].kind == "parameter":
                graph.erase_node(placeholder)
        return fx.GraphModule({}, graph)


class GuardError(RuntimeError):
    """The trace holds only for some sizes of the declared range."""


def trace(model: nn.Module, inputs: ForwardInputs, *, strict: bool = False, verify: bool = False) -> TracedGraph:
    """Trace `model` on example inputs. Nothing is executed, so its parameters may be without storage.

    strict, verify: of the passes that lower foreign code, see `run_passes`.
    Raises GuardError when the graph would not be valid for every size in the declared range.
    """
    traced = _trace_layers(model, inputs, strict=strict, verify=verify)
    if inputs.asked:
        _add_inputs(traced.module, inputs)
    return traced


def _trace_layers(model: nn.Module, inputs: ForwardInputs, *, strict: bool, verify: bool) -> TracedGraph:
    layers = traced_layers(model)
    if layers is not None:
        with layers.alone():
            traced = _trace(model, inputs, strict=strict, verify=verify)
        if repeat_layers(traced.module.graph, layers):
            traced.module.recompile()
            note = f"# Of {layers.path} the layers {list(layers.numbers)}; the others repeat them.\n"
            return replace(traced, dynamo_graph=note + traced.dynamo_graph)
    return _trace(model, inputs, strict=strict, verify=verify)


def _add_inputs(module: fx.GraphModule, inputs: ForwardInputs) -> None:
    """Give the graph an input for each step tensor that a pass declares, with the sizes of the traced inputs."""
    placeholders = module.graph.find_nodes(op="placeholder")
    by_name = {source_of(node).name: node.meta["val"] for node in placeholders if source_of(node).kind == "argument"}
    sizes = {
        size: by_name[name].shape[dim] for (name, dim), (size, *_) in inputs.open_sizes().items() if name in by_name
    }
    device = inputs.examples["input_ids_T"].device
    with fake_mode_of(list(by_name.values())), module.graph.inserting_before(placeholders[-1].next):
        for tensor in inputs.asked:
            node = module.graph.placeholder(tensor.name)
            node.meta["val"] = torch.empty(tensor.shape(sizes), dtype=tensor.dtype, device=device)
            node.meta["source"] = Source("argument", tensor.name)
            node.meta["step_tensor"] = tensor
    module.recompile()


def _trace(model: nn.Module, inputs: ForwardInputs, *, strict: bool, verify: bool) -> TracedGraph:
    declared = inputs.open_sizes()
    for (name, dim), size in declared.items():
        compat.mark_dynamic_size(inputs.examples[name], dim, *size)
    dynamo = _run_dynamo(model, inputs)
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
    for node, source in zip(module.graph.find_nodes(op="placeholder"), sources, strict=True):
        node.meta["source"] = source
    proved = _discharge_asserts(module)
    require_no_guards(shape_env)
    module.graph.eliminate_dead_code()
    lowering: tuple[PassReport, ...] = ()
    if is_foreign(module.graph):
        device = inputs.examples["input_ids_T"].device
        lowering = lower(module.graph, CompileRange(1, inputs.max_tokens), device, strict=strict, verify=verify)
    module.recompile()
    return TracedGraph(
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
    """Raise GuardError if a decision was taken on a size; called after the trace and again after Inductor."""
    if shape_env.guards:
        found = ", ".join(str(guard.expr) for guard in shape_env.guards)
        raise GuardError(f"the compiled model would hold only where {found}")


@dataclass(frozen=True)
class _DynamoResult:
    """Dynamo's result for a forward; `fakes` are the values of the graph's placeholders."""

    graph: fx.GraphModule
    fakes: list[Any]
    guards: tuple[Guard, ...]
    compile_id: CompileId | None
    bytecode: tuple[types.CodeType, types.CodeType] | None


def _run_dynamo(model: nn.Module, inputs: ForwardInputs) -> _DynamoResult:
    held: dict[str, Any] = {}

    def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        placeholders = graph.graph.find_nodes(op="placeholder")
        for node in placeholders:
            node.meta["source_name"] = compat.source_name(node)
        held.update(graph=graph, fakes=[node.meta["example_value"] for node in placeholders])
        held.update(guards=dynamo_guards(), compile_id=CompileContext.current_compile_id())
        output = arg(graph.graph.output_node(), 0)
        return lambda *args: tuple(torch.empty(0) for _ in output)

    entry = _fresh_entry(FORWARD_ARGUMENTS)
    with torch.no_grad(), compat.bytecode_of(entry) as bytecode:
        torch.compile(entry, backend=backend, fullgraph=True, dynamic=False)(model, *inputs.arguments())
    return _DynamoResult(bytecode=bytecode[0] if bytecode else None, **held)


def _fresh_entry(arguments: Sequence[str]) -> Callable[..., Any]:
    """The function that is traced. Dynamo keeps what it compiled, and a limit on it, per code object: a new one each
    time leaves no trace of us in the caller's process and never meets the limit."""
    names = ", ".join(arguments)
    source = f"""
def traced_forward(model, {names}):
    hidden_TD = model({names})
    return hidden_TD, model.logits(hidden_TD)
"""
    namespace: dict[str, Any] = {"__name__": __name__}
    # A file that exists: torch 2.11 wraps a function without one, and its arguments lose their names.
    exec(compile(source, __file__, "exec"), namespace)
    return namespace["traced_forward"]


def _sources(graph: fx.GraphModule, fakes: list[Any], model: nn.Module) -> list[Source | Parameter]:
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    sources: list[Source | Parameter | None] = []
    for node in graph.graph.find_nodes(op="placeholder"):
        name = node.meta["source_name"]
        is_tensor = isinstance(node.meta["example_value"], torch.Tensor)
        sources.append(_named_source(name, parameters) if is_tensor else None)
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


def _named_source(name: str, parameters: dict[str, torch.Tensor]) -> Source | Parameter:
    """Parse Dynamo's L['model']._modules['layers']._modules['0']._parameters['weight'] and similar names."""
    argument, rest = re.fullmatch(r"L\['(\w+)'\](.*)", name).groups()  # type: ignore[union-attr]
    steps = [step for step in re.findall(r"\w+", rest) if step not in ("_modules", "_parameters", "_buffers")]
    if argument != "model":
        return Source("argument", ".".join([argument, *steps]))
    path = ".".join(steps)
    if path not in parameters:
        raise RuntimeError(f"graph input {name} is not a parameter or buffer of the model")
    tensor = parameters[path]
    return Parameter.of(path, tensor, WEIGHT if isinstance(tensor, nn.Parameter) else BUFFER)


def _discharge_asserts(module: fx.GraphModule) -> tuple[str, ...]:
    """Drop run-time asserts that the declared sizes imply, and say which; any other one is an error."""
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
