"""Adds the layers that were not traced (see traced_layers.py) to a graph, as copies of traced layers.

Layers with equal modules are of the same kind; layers of the same kind whose next layers are of the same kind, too, are
of the same class (LayerClass). A layer's ops are copied from a traced layer of its class. Before, the traced layers are
compared node by node: those of the same kind must read corresponding values of the previous layer, and those of the
same class must compute the same function of these values. Otherwise nothing is copied, and all layers are traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from compiled_engine.graphs.compiler.layer_slices import Slice, insert_slice, slice_of
from compiled_engine.graphs.compiler.traced_layers import LayerClass, TracedLayers
from compiled_engine.passes.framework.graph_inputs import source_of

Segments = dict[int, list[fx.Node]]
# Layer -> its inputs from the previous traced layer, in order of first use.
Taken = dict[int, list[fx.Node]]


def repeat_layers(graph: fx.Graph, layers: TracedLayers) -> bool:
    """Add the layers that were not traced to the graph, in place, and return True.

    Returns False, and leaves the graph unchanged, if the traced layers cannot serve as templates, for instance because
    layers that should be equal are not.
    """
    segments = _segments(graph, layers)
    missing = {layers.classes[n] for before, behind in layers.gaps() for n in range(before + 1, behind)}
    if segments is None or not _hands_on_to_the_next_alone(segments, missing, layers):
        return False
    taken = _taken(segments)
    given = _given(segments, taken, layers)
    if given is None or not all(_equal_in_class(layer_class, segments, taken, layers) for layer_class in missing):
        return False
    for before, behind in layers.gaps():
        _fill(graph, before, behind, segments, taken, given, layers)
    graph.lint()
    return True


def _segments(graph: fx.Graph, layers: TracedLayers) -> Segments | None:
    """Return the ops of each traced layer, in order, by the layer's number.

    A layer begins at the first use of one of its inputs: parameters, KV cache and slices, see `layer_of`. Ops before
    the first layer belong to no layer, and neither do sizes that follow from the arguments alone. Returns None if a
    layer's inputs are used after a later layer has begun, if inputs of a layer that was not to be traced are used, or
    if a layer has no ops.
    """
    segments: Segments = {number: [] for number in layers.numbers}
    current: int | None = None
    inside: set[fx.Node] = set()
    for node in graph.nodes:
        is_size = isinstance(node.meta.get("val"), torch.SymInt) and inside.isdisjoint(node.all_input_nodes)
        if node.op in ("placeholder", "output") or is_size:
            continue
        for layer in map(layers.layer_of, node.all_input_nodes):
            if layer is not None:
                if layer not in segments or (current is not None and layer < current):
                    return None
                current = layer
        if current is not None:
            segments[current].append(node)
            inside.add(node)
    return segments if all(segments.values()) else None


def _hands_on_to_the_next_alone(segments: Segments, missing: set[LayerClass], layers: TracedLayers) -> bool:
    """Return whether the results of each layer are read only by the layer itself and by the next layer.

    Layers whose classes are not in `missing` may read any results of each other: a vision tower's result contains the
    results of some of its layers. missing: the classes of the layers that were not traced.
    """
    single = {node for number, own in segments.items() if layers.classes[number] not in missing for node in own}
    return all(
        user in allowed or (node in single and user in single)
        for own, following in pairwise(segments.values())
        for allowed in [{*own, *following}]
        for node in own
        for user in node.users
    )


def _taken(segments: Segments) -> Taken:
    taken: Taken = {}
    for (_, nodes), (number, own) in pairwise(segments.items()):
        before = set(nodes)
        taken[number] = [*dict.fromkeys(value for node in own for value in node.all_input_nodes if value in before)]
    return taken


def _given(segments: Segments, taken: Taken, layers: TracedLayers) -> dict[LayerClass, list[int]] | None:
    """Return, for each class, which of a layer's ops have results that the next layer reads.

    An op is given by its index among the layer's ops. The indices are in the order in which the next layer first reads
    the results. Returns None if traced layers of a class differ in these indices, or if traced layers of a kind first
    read the previous layer's results in different ops. taken: for each layer, the results that it reads, see Taken.
    """
    given: dict[LayerClass, list[int]] = {}
    first_uses: dict[int, list[int]] = {}
    for before, number in pairwise(segments):
        places = [segments[before].index(node) for node in taken[number]]
        uses = [
            next(place for place, node in enumerate(segments[number]) if value in node.all_input_nodes)
            for value in taken[number]
        ]
        if given.setdefault(layers.classes[before], places) != places:
            return None
        if first_uses.setdefault(layers.classes[number].kind, uses) != uses:
            return None
    return given


def _template(layer_class: LayerClass, taken: Taken, layers: TracedLayers) -> int:
    """Return the number of the traced layer that is copied for a class.

    It is never the first layer, which reads no results of another layer. taken: has all traced layers but the first.
    """
    return next(number for number in layers.traced_in_class(layer_class) if number in taken)


def _equal_in_class(layer_class: LayerClass, segments: Segments, taken: Taken, layers: TracedLayers) -> bool:
    template = _template(layer_class, taken, layers)
    others = [number for number in layers.traced_in_class(layer_class) if number != template]
    return bool(others) and all(_equal(number, template, segments, taken, layers) for number in others)


def _equal(number: int, template: int, segments: Segments, taken: Taken, layers: TracedLayers) -> bool:
    """Return whether the traced layers `number` and `template` compute the same function of their inputs."""
    own = {node: place for place, node in enumerate(segments[number])}
    of_template = {node: place for place, node in enumerate(segments[template])}
    # The first layer's inputs are computed before all layers; their first use identifies them.
    stands_for: dict[fx.Node, Any] = dict(zip(taken[template], taken[number], strict=True)) if number in taken else {}
    from_before = set(taken[template])

    def same(value: Any, expected: Any) -> bool:
        if isinstance(expected, fx.Node):
            if not isinstance(value, fx.Node):
                return False
            if expected in of_template:
                return own.get(value) == of_template[expected]
            if expected in from_before:
                is_given = value not in own and value.op != "placeholder"
                return is_given and stands_for.setdefault(expected, value) is value
            if layers.layer_of(expected) is None:
                return value is expected
            if layers.layer_of(value) != number:
                return False
            if (sliced := slice_of(expected)) is not None:
                return slice_of(value) == sliced._replace(place=number)
            return slice_of(value) is None and source_of(value) == layers.of_layer(source_of(expected), number)
        if isinstance(expected, list | tuple):
            return type(value) is type(expected) and len(value) == len(expected) and all(map(same, value, expected))
        if isinstance(expected, dict):
            return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in expected)
        return type(value) is type(expected) and value == expected

    def same_op(node: fx.Node, expected: fx.Node) -> bool:
        same_target = node.op == expected.op and node.target == expected.target
        return same_target and same(node.args, expected.args) and same(node.kwargs, expected.kwargs)

    return (
        len(own) == len(of_template)
        and all(map(same_op, own, of_template))
        and len(set(stands_for.values())) == len(stands_for)
    )


def _fill(
    graph: fx.Graph,
    before: int,
    behind: int,
    segments: Segments,
    taken: Taken,
    given: dict[LayerClass, list[int]],
    layers: TracedLayers,
) -> None:
    """Insert copies for the missing layers between the traced layers `before` and `behind`, in place.

    Layer `behind` then reads the results of the last copy, and its entry in `taken` (see Taken) is changed accordingly.
    segments: the traced layers' ops, see `_segments`. given: see `_given`.
    """
    inputs = graph.find_nodes(op="placeholder")
    slices = {found: node for node in graph.nodes if (found := slice_of(node)) is not None}
    last_input = [node for node in inputs if layers.layer_of(node) == before][-1]
    newest = taken[behind]
    for number in range(before + 1, behind):
        layer_class = layers.classes[number]
        template = _template(layer_class, taken, layers)
        copies = dict(zip(taken[template], newest, strict=True))  # the previous layer's values
        for node in [node for node in inputs if layers.layer_of(node) == template]:
            with graph.inserting_after(last_input):
                last_input = copies[node] = graph.placeholder(f"{node.target}_layer_{number}")
            source, fake = layers.of_layer(source_of(node), number), _another(node.meta["val"])
            last_input.meta = node.meta | {"source": source, "val": fake}
        for found, node in list(slices.items()):
            if layers.layer_of(node) == template:
                own = found._replace(place=number)
                copies[node] = slices[own] = insert_slice(graph, own, behind=_before(slices, own))
        with graph.inserting_before(segments[behind][0]):
            for node in segments[template]:
                copies[node] = graph.node_copy(node, partial(_copied, copies))
        newest = [copies[segments[template][place]] for place in given[layer_class]]
    for value, newer in zip(taken[behind], newest, strict=True):
        for node in segments[behind]:
            node.replace_input_with(value, newer)
    taken[behind] = newest


def _before(slices: Mapping[Slice, fx.Node], own: Slice) -> fx.Node:
    """Return the node of the slice before `own` in the same tensor, or the tensor's node if there is none."""
    earlier = [found for found in slices if found[:2] == own[:2] and found.place < own.place]
    return slices[max(earlier, key=lambda found: found.place)] if earlier else own.tensor


def _copied(copies: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return copies.get(node, node)


def _another(fake: FakeTensor) -> torch.Tensor:
    """Return a new fake tensor like the given one, for a new graph input: tracers tell inputs apart by identity."""
    with fake.fake_mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
