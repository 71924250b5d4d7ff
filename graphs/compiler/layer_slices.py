"""Moves slices of a tensor in front of all layers, if each layer takes one of them.

Before its layers, a model may compute a tensor with a part for each layer, such as the embeddings of Gemma 4's small
models. A layer that slices the tensor contains its own number, so equal layers would differ, and each would be a piece
of its own. With all slices in front, every layer reads its slice as an input, as it reads its parameters.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import fx

from compiled_engine.passes.framework.matching import arg, aten, attention_calls, emit

# Key in the meta of a node that `insert_slice` made. The value is the node's Slice.
_SLICE = "layer_slice"


class Slice(NamedTuple):
    """The slice of a tensor at index `place` of dimension `dim`. tensor: the tensor's node in the graph."""

    tensor: fx.Node
    dim: int
    place: int

    @property
    def places(self) -> int:
        """The number of slices that the tensor has in this dimension: the dimension's size."""
        return int(self.tensor.meta["val"].shape[self.dim])


def slice_of(node: fx.Node) -> Slice | None:
    """Return the slice that a node computes if `insert_slice` made the node; otherwise None."""
    found: Slice | None = node.meta.get(_SLICE)
    return found


def insert_slice(graph: fx.Graph, found: Slice, behind: fx.Node) -> fx.Node:
    """Insert a node that computes the slice `found` directly after the node `behind`, and return the new node."""
    with graph.inserting_after(behind):
        node = emit(graph, aten.select.int, *found)
    node.meta[_SLICE] = found
    return node


def slices_first(graph: fx.Graph) -> None:
    """Move the slices that layers take of a tensor directly after the tensor, in place.

    The tensor must have a row for each token, and be computed before the graph's first attention. Slices of rows are
    not moved. The slices of any other dimension are moved if one of them follows the first attention, unless two of
    them are equal: layers then share slices.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    first = min((order[node] for node in attention_calls(graph)), default=len(order))
    slices: dict[tuple[fx.Node, int], list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten.select.int):
        tensor = arg(node, 0)
        if order[tensor] < first and tensor.op != "placeholder" and _slices_columns(node):
            slices[tensor, arg(node, 1) % tensor.meta["val"].dim()].append(node)
    for (tensor, dim), nodes in slices.items():
        is_repeated = len({arg(node, 2) for node in nodes}) < len(nodes)
        if is_repeated or all(order[node] < first for node in nodes):
            continue
        behind = tensor
        for node in nodes:
            behind = insert_slice(graph, Slice(tensor, dim, arg(node, 2)), behind)
            node.replace_all_uses_with(behind)
            graph.erase_node(node)


def _slices_columns(select: fx.Node) -> bool:
    tensor, dim, place = (arg(select, number) for number in range(3))
    shape = tensor.meta["val"].shape
    return isinstance(shape[0], torch.SymInt) and isinstance(shape[dim], int) and dim % len(shape) > 0 and place >= 0
