"""Describes the inputs of a traced graph: whether each is a parameter, an argument of the forward, or a size.

A placeholder's `meta["source"]` is a `Source` or a `Parameter`; a node's `meta["val"]` is its fake value. Tracing sets
both. Passes read them, and so does the code that joins the compiled pieces (graphs/compiler/stitch.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from compiled_engine.parallel.shards import Shard
from compiled_engine.passes.framework.parameter import Parameter


@dataclass(frozen=True)
class Source:
    """The origin of a graph input that is not a parameter, such as an argument of the forward."""

    kind: str  # "argument", "size" or, in a pipeline stage, "received"
    name: str  # the forward argument, see StepTensor, or the value received from the previous stage (received.0, ...)
    dim: int = 0  # for a size: the dimension of the argument whose length it is

    @property
    def element(self) -> int | None:
        """The index within a list argument: 3 for kv_caches.3. None if the input is not an element of a list."""
        number = self.name.partition(".")[2]
        return int(number) if self.kind != "parameter" and number.isdecimal() else None

    @property
    def expression(self) -> str:
        """The argument as a Python expression, such as kv_caches[3]. For a size: the argument that has this size."""
        head, _, rest = self.name.partition(".")
        return self.name if self.element is None else f"{head}[{rest}]"


def source_of(placeholder: fx.Node) -> Source | Parameter:
    found: Source | Parameter = placeholder.meta["source"]
    return found


def is_parameter(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and source_of(node).kind == "parameter"


def parameter_of(placeholder: fx.Node) -> Parameter:
    """Return the Parameter that describes a placeholder. `is_parameter(placeholder)` must be true."""
    found = source_of(placeholder)
    assert isinstance(found, Parameter)
    return found


def add_parameter(graph: fx.Graph, parameter: Parameter) -> fx.Node:
    """Add a placeholder for a parameter after the graph's other placeholders, and return it.

    The graph must have another parameter, whose device and fake mode the new placeholder takes.
    """
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1]):
        node = graph.placeholder(re.sub(r"\W", "_", parameter.name))
    like = next(p.meta["val"] for p in placeholders if is_parameter(p))
    with like.fake_mode:
        node.meta["val"] = torch.empty(parameter.shape, dtype=parameter.torch_dtype, device=like.device)
    node.meta["source"] = parameter
    return node


def describe_shards(graph: fx.Graph, shards: Mapping[str, Shard]) -> None:
    """Record in each parameter placeholder which part of the undivided tensor this rank has.

    shards: parameter name -> part; a parameter without an entry is not sharded.
    """
    for node in graph.find_nodes(op="placeholder"):
        if is_parameter(node):
            node.meta["source"] = parameter_of(node).divided(shards)


def shards_in(graph: fx.Graph) -> dict[str, Shard]:
    """Return the shards that `describe_shards` has recorded, by parameter name, without parameters that have none."""
    parameters = [parameter_of(node) for node in graph.find_nodes(op="placeholder") if is_parameter(node)]
    return {leaf.name: leaf.shard for p in parameters for leaf in p.leaves() if leaf.shard is not None}


def argument(graph: fx.Graph, name: str) -> fx.Node:
    """Return the placeholder of the forward argument `name`, such as an input that a pass adds (step tensor).

    Raises LookupError if the graph has no such placeholder.
    """
    for node in graph.find_nodes(op="placeholder"):
        if source_of(node).kind == "argument" and source_of(node).name == name:
            return node
    raise LookupError(f"the graph has no argument {name}")
