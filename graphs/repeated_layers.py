"""Layers that are alike are traced two or three times, and the graph repeats what was traced for the others.

A trace takes a fixed time for each op, so a model of 36 layers took ten times as long as one of three. A `LayerStack`
applies its layers one after another and in the same way, so layers whose modules are alike give the same ops. Of each
stretch of such layers the first, the second and the last are traced; copies of the second go between the last two. That
the second does what the first does, on what the first has left, is checked node by node. If it does not, all layers
have to be traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from compiled_engine.models.layer_stack import LayerStack
from compiled_engine.passes.graph_inputs import Source, source_of

# Of a stretch of alike layers; at least one more pays for the comparison.
TRACED = 3


@dataclass(frozen=True)
class TracedLayers:
    """`stack`, which lies at `path`, and the numbers of those of its layers that are traced."""

    stack: LayerStack
    path: str
    numbers: tuple[int, ...]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within this context the stack has no other layers, and these are numbered from 0."""
        layers = list(self.stack)
        _replace_layers(self.stack, [layers[number] for number in self.numbers])
        try:
            yield
        finally:
            _replace_layers(self.stack, layers)

    def layer_of(self, source: Source) -> int | None:
        """To which of the traced layers a graph input belongs."""
        for prefix in (f"{self.path}.", "kv_caches."):
            if source.kind != "size" and source.name.startswith(prefix):
                return int(source.name.removeprefix(prefix).split(".")[0])
        return None

    def renumbered(self, source: Source, layer: int, number: int) -> Source:
        """The same input of another layer."""
        for prefix in (f"{self.path}.", "kv_caches."):
            if source.name == f"{prefix}{layer}" or source.name.startswith(f"{prefix}{layer}."):
                return replace(source, name=f"{prefix}{number}{source.name.removeprefix(f'{prefix}{layer}')}")
        return source


def traced_layers(model: nn.Module) -> TracedLayers | None:
    """Which layers to trace; None for a model whose layers all have to be."""
    stacks = [(path, module) for path, module in model.named_modules() if type(module) is LayerStack]
    if len(stacks) != 1:
        return None
    path, stack = stacks[0]
    stretches: list[list[int]] = []
    for number, layer in enumerate(stack):
        if stretches and _alike(stack[stretches[-1][0]], layer):
            stretches[-1].append(number)
        else:
            stretches.append([number])
    numbers: list[int] = []
    for stretch in stretches:
        numbers += stretch if len(stretch) <= TRACED else [*stretch[: TRACED - 1], stretch[-1]]
    return TracedLayers(stack, path, tuple(numbers)) if len(numbers) < len(stack) else None


def repeat_layers(graph: fx.Graph, layers: TracedLayers) -> bool:
    """Give the graph of the traced layers all the others. False, and no change, if layers do not repeat one another."""
    segments = _segments(graph, layers)
    if segments is None:
        return False
    gaps = [k for k, (number, following) in enumerate(pairwise(layers.numbers)) if following > number + 1]
    if not all(_repeats(segments, k, layers) for k in gaps):
        return False
    placeholders: list[list[fx.Node]] = [[] for _ in layers.numbers]
    for node in graph.find_nodes(op="placeholder"):
        layer = layers.layer_of(source_of(node))
        if layer is not None:
            placeholders[layer].append(node)
    for k in gaps:
        _fill(graph, segments, placeholders[k], k, layers)
    for node in [node for nodes in placeholders for node in nodes]:
        layer = layers.layer_of(source_of(node))
        assert layer is not None
        node.meta["source"] = layers.renumbered(source_of(node), layer, layers.numbers[layer])
    graph.lint()
    return True


def _replace_layers(stack: LayerStack, layers: Sequence[nn.Module]) -> None:
    del stack[:]
    stack.extend(layers)


def _alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether two modules are of the same class, with equal settings, equally shaped parameters, and alike children."""
    held = ("_parameters", "_buffers", "_modules")
    settings = [{k: v for k, v in vars(module).items() if k not in held} for module in (first, second)]
    tensors = [
        [
            (name, None if t is None else (t.shape, t.dtype, t.device))
            for name, t in (module._parameters | module._buffers).items()
        ]
        for module in (first, second)
    ]
    children = [list(module.named_children()) for module in (first, second)]
    return (
        type(first) is type(second)
        and settings[0] == settings[1]
        and tensors[0] == tensors[1]
        and [name for name, _ in children[0]] == [name for name, _ in children[1]]
        and all(_alike(one, other) for (_, one), (_, other) in zip(*children, strict=True))
    )


def _segments(graph: fx.Graph, layers: TracedLayers) -> list[list[fx.Node]] | None:
    """The graph's ops in order, in one list for each traced layer, which begins where one of its inputs is first used.

    None if a layer's inputs are used after those of a later one. Ops before the first layer are in no list.
    """
    segments: list[list[fx.Node]] = [[] for _ in layers.numbers]
    current = -1
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        used = [_layer(argument, layers) for argument in node.all_input_nodes]
        for layer in [layer for layer in used if layer is not None]:
            if layer < current:
                return None
            current = layer
        if current >= 0:
            segments[current].append(node)
    return segments


def _layer(node: fx.Node, layers: TracedLayers) -> int | None:
    return layers.layer_of(source_of(node)) if node.op == "placeholder" else None


def _repeats(segments: list[list[fx.Node]], k: int, layers: TracedLayers) -> bool:
    """Whether segment k does to the one before it what that does to the one before that, and nothing after k looks
    behind it."""
    if k == 0:
        return False
    before, segment = segments[k - 1], segments[k]
    place_before = {node: i for i, node in enumerate(before)}
    place = {node: i for i, node in enumerate(segment)}

    def same(first: Any, second: Any) -> bool:
        if isinstance(second, fx.Node):
            if not isinstance(first, fx.Node):
                return False
            if second in place:
                return place_before.get(first) == place[second]
            if second in place_before:  # what comes from one layer to the next
                return first not in place_before and first.op != "placeholder"
            layer = _layer(second, layers)
            if layer is None:
                return first is second
            return _layer(first, layers) == k - 1 and _is_renumbered(first, second, k, layers)
        if isinstance(second, list | tuple):
            return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
        if isinstance(second, dict):
            return first.keys() == second.keys() and all(same(first[key], second[key]) for key in second)
        return type(first) is type(second) and first == second

    if len(before) != len(segment):
        return False
    if not all(
        one.op == other.op
        and one.target == other.target
        and same(one.args, other.args)
        and same(one.kwargs, other.kwargs)
        for one, other in zip(before, segment, strict=True)
    ):
        return False
    inside = {*before, *segment}
    return all(user in inside for node in before for user in node.users)


def _is_renumbered(first: fx.Node, second: fx.Node, k: int, layers: TracedLayers) -> bool:
    return layers.renumbered(source_of(second), k, k - 1) == source_of(first)


def _fill(
    graph: fx.Graph, segments: list[list[fx.Node]], placeholders: list[fx.Node], k: int, layers: TracedLayers
) -> None:
    """Put copies of segment k behind it, for the layers up to the next one that was traced."""
    before, segment, following = segments[k - 1], segments[k], segments[k + 1][0]
    inside = set(segment)
    users = [[user for user in node.users if user not in inside] for node in segment]
    last_input, newest = placeholders[-1], segment
    for number in range(layers.numbers[k] + 1, layers.numbers[k + 1]):
        copies = dict(zip(before, newest, strict=True))  # what the layer before left
        for node in placeholders:
            with graph.inserting_after(last_input):
                last_input = copies[node] = graph.placeholder(f"{node.target}_layer_{number}")
            last_input.meta = node.meta | {
                "source": layers.renumbered(source_of(node), k, number),
                "val": _another(node.meta["val"]),
            }
        with graph.inserting_before(following):
            for node in segment:
                copies[node] = graph.node_copy(node, partial(_copied, copies))
        newest = [copies[node] for node in segment]
    for node, last, behind in zip(segment, newest, users, strict=True):
        for user in behind:
            user.replace_input_with(node, last)


def _copied(copies: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return copies.get(node, node)


def _another(fake: FakeTensor) -> torch.Tensor:
    """A fake tensor of its own for another graph input: tracers tell inputs apart by it."""
    with fake.fake_mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
