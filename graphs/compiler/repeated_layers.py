"""Of layers that are alike three are traced, and the graph repeats what was traced for the others.

A trace takes a fixed time for each op, so a model of 36 layers took ten times as long as one of three. A `LayerStack`
applies its layers one after another and in the same way, so layers whose modules are alike give the same ops. Of each
stretch of such layers the first, the second and the last are traced; copies of the second go between the last two. That
the second does what the first does, on what the first has left, is checked node by node. If it does not, all layers
have to be traced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from compiled_engine.models.textbook.layer_stack import LayerStack
from compiled_engine.passes.graph_inputs import Source, source_of

Segments = dict[int, list[fx.Node]]


@dataclass(frozen=True)
class TracedLayers:
    """`stack`, which lies at `path`, and the numbers of those of its layers that are traced.

    A stack of foreign code has no say in which layers are applied: those that are not hand on what they are given, `in
    a tuple` where its layers do so.
    """

    stack: nn.ModuleList
    path: str
    numbers: tuple[int, ...]
    in_tuple: bool = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within this context the stack applies no other layers."""
        if isinstance(self.stack, LayerStack):
            self.stack.only = self.numbers
            try:
                yield
            finally:
                self.stack.only = None
            return
        every = list(self.stack)
        for number in set(range(len(every))) - set(self.numbers):
            self.stack[number] = _HandsOn(self.in_tuple)
        try:
            yield
        finally:
            for number, layer in enumerate(every):
                self.stack[number] = layer

    def gaps(self) -> list[tuple[int, int, int]]:
        """Where layers are missing: the two that were traced before them, and the one behind."""
        numbers = self.numbers
        return [
            (before, last, after)
            for (before, last), after in zip(pairwise(numbers), numbers[2:], strict=False)
            if after > last + 1
        ]

    def layer_of(self, node: fx.Node) -> int | None:
        """The layer that a graph input belongs to; None for any other node."""
        if node.op != "placeholder" or source_of(node).kind == "size":
            return None
        found = self._numbered(source_of(node))
        return int(found["layer"]) if found else None

    def of_layer(self, source: Source, layer: int) -> Source:
        """The same input of another layer."""
        found = self._numbered(source)
        assert found is not None
        return replace(source, name=f"{found['owner']}.{layer}{found['rest']}")

    def _numbered(self, source: Source) -> re.Match[str] | None:
        return re.fullmatch(rf"(?P<owner>{re.escape(self.path)}|kv_caches)\.(?P<layer>\d+)(?P<rest>.*)", source.name)


class _HandsOn(nn.Module):
    """Stands for a layer of foreign code that is not traced."""

    def __init__(self, in_tuple: bool) -> None:
        super().__init__()
        self.in_tuple = in_tuple

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        return (hidden_states, None, None) if self.in_tuple else hidden_states


def traced_layers(model: nn.Module) -> TracedLayers | None:
    """Which layers to trace; None for a model whose layers all have to be.

    Foreign layers know their number. Whether they act on it shows in `layer_signatures`, which say what each has done
    when the model was observed (models/foreign/observation.py).
    """
    stacks: list[tuple[str, Any]] = [(path, m) for path, m in model.named_modules() if type(m) is LayerStack]
    foreign = str(getattr(model, "layers_path", ""))
    if foreign:
        stacks.append((foreign, model.get_submodule(foreign)))
    if len(stacks) != 1:
        return None
    path, stack = stacks[0]
    if _shares(stack):
        return None
    signatures: Any = model.layer_signatures if foreign else [0] * len(stack)
    beside = ("layer_idx",) if foreign else ()
    stretches: list[list[int]] = []
    for number, layer in enumerate(stack):
        first = stretches[-1][0] if stretches else number
        if first < number and signatures[first] == signatures[number] and _alike(stack[first], layer, beside):
            stretches[-1].append(number)
        else:
            stretches.append([number])
    numbers = [number for stretch in stretches for number in dict.fromkeys((*stretch[:2], stretch[-1]))]
    in_tuple = bool(foreign and model.layers_in_tuple)
    return TracedLayers(stack, path, tuple(numbers), in_tuple) if len(numbers) < len(stack) else None


def repeat_layers(graph: fx.Graph, layers: TracedLayers) -> bool:
    """Give the graph of the traced layers all the others. False, and no change, if layers do not repeat one another."""
    segments = _segments(graph, layers)
    if segments is None or not all(_repeats(segments, gap, layers) for gap in layers.gaps()):
        return False
    for gap in layers.gaps():
        _fill(graph, segments, gap, layers)
    graph.lint()
    return True


def _shares(stack: nn.ModuleList) -> bool:
    """Whether a module or a parameter is there twice, so that layers are more than their own."""
    modules, parameters = stack.named_modules, stack.named_parameters
    return any(len([*all_of(remove_duplicate=False)]) > len([*all_of()]) for all_of in (modules, parameters))


def _alike(first: nn.Module, second: nn.Module, beside: Sequence[str]) -> bool:
    """Whether two modules are of the same class, with equal settings beside those, equally shaped parameters, and alike
    children."""
    held = ("_parameters", "_buffers", "_modules", *beside)
    settings, other_settings = ({k: v for k, v in vars(m).items() if k not in held} for m in (first, second))
    children, other_children = (list(module.named_children()) for module in (first, second))
    return (
        type(first) is type(second)
        and settings.keys() == other_settings.keys()
        and all(_equal(value, other_settings[name]) for name, value in settings.items())
        and _tensors(first) == _tensors(second)
        and [name for name, _ in children] == [name for name, _ in other_children]
        and all(_alike(one, other, beside) for (_, one), (_, other) in zip(children, other_children, strict=True))
    )


def _equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    try:
        return type(first) is type(second) and bool(first == second)
    except Exception:  # tensors, for example, have no one answer
        return False


def _tensors(module: nn.Module) -> list[Any]:
    """What the trace sees of a module's own parameters and buffers."""
    own = module._parameters | module._buffers
    return [(name, t if t is None else (t.shape, t.stride(), t.dtype, t.device)) for name, t in own.items()]


def _segments(graph: fx.Graph, layers: TracedLayers) -> Segments | None:
    """The graph's ops in order, by layer; a layer begins where one of its inputs is first used.

    Ops before the first layer are in no segment. None if a layer's inputs are used after those of a later one, or
    those of a layer that was not to be traced.
    """
    segments: Segments = {number: [] for number in layers.numbers}
    current: int | None = None
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        for layer in map(layers.layer_of, node.all_input_nodes):
            if layer is not None:
                if layer not in segments or (current is not None and layer < current):
                    return None
                current = layer
        if current is not None:
            segments[current].append(node)
    return segments


def _repeats(segments: Segments, gap: tuple[int, int, int], layers: TracedLayers) -> bool:
    """Whether the last layer before a gap does to what the one before it left what that one does to what it found, and
    each hands on to the next one alone."""
    before, last, after = (segments[layer] for layer in gap)
    place_before = {node: i for i, node in enumerate(before)}
    place = {node: i for i, node in enumerate(last)}

    def same(first: Any, second: Any) -> bool:
        if isinstance(second, fx.Node):
            if not isinstance(first, fx.Node):
                return False
            if second in place:
                return place_before.get(first) == place[second]
            if second in place_before:  # what comes from one layer to the next
                return first not in place_before and first.op != "placeholder"
            if layers.layer_of(second) is None:
                return first is second
            return layers.layer_of(first) == gap[0] and source_of(first) == layers.of_layer(source_of(second), gap[0])
        if isinstance(second, list | tuple):
            return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
        if isinstance(second, dict):
            return first.keys() == second.keys() and all(same(first[key], second[key]) for key in second)
        return type(first) is type(second) and first == second

    def same_op(first: fx.Node, second: fx.Node) -> bool:
        same_target = first.op == second.op and first.target == second.target
        return same_target and same(first.args, second.args) and same(first.kwargs, second.kwargs)

    readers = ((before, {*before, *last}), (last, {*last, *after}))
    return (
        len(before) == len(last)
        and all(map(same_op, before, last))
        and all(user in allowed for nodes, allowed in readers for node in nodes for user in node.users)
    )


def _fill(graph: fx.Graph, segments: Segments, gap: tuple[int, int, int], layers: TracedLayers) -> None:
    """Put copies of the last layer before a gap into it."""
    before, last, after = (segments[layer] for layer in gap)
    inputs = [node for node in graph.find_nodes(op="placeholder") if layers.layer_of(node) == gap[1]]
    following = set(after)
    users = [[user for user in node.users if user in following] for node in last]
    last_input, newest = inputs[-1], last
    for layer in range(gap[1] + 1, gap[2]):
        copies = dict(zip(before, newest, strict=True))  # what the layer before left
        for node in inputs:
            with graph.inserting_after(last_input):
                last_input = copies[node] = graph.placeholder(f"{node.target}_layer_{layer}")
            source, fake = layers.of_layer(source_of(node), layer), _another(node.meta["val"])
            last_input.meta = node.meta | {"source": source, "val": fake}
        with graph.inserting_before(after[0]):
            for node in last:
                copies[node] = graph.node_copy(node, partial(_copied, copies))
        newest = [copies[node] for node in last]
    for node, newest_node, behind in zip(last, newest, users, strict=True):
        for user in behind:
            user.replace_input_with(node, newest_node)


def _copied(copies: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return copies.get(node, node)


def _another(fake: FakeTensor) -> torch.Tensor:
    """A fake tensor of its own for another graph input: tracers tell inputs apart by it."""
    with fake.fake_mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
