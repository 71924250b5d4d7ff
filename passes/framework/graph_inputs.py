"""Sources of a traced graph's inputs, shared by tracing, passes and stitching.

Each placeholder's `meta["source"]` is a `Source` or a `Parameter`; each node's `meta["val"]` is its fake value.
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
    """The source, at run time, of a graph input that is not a parameter."""

    kind: str  # "argument", "size" or, in a pipeline stage, "received"
    name: str  # the forward argument, see StepTensor, or the value received from the previous stage (received.0, ...)
    dim: int = 0  # for a size: the dimension of the argument whose length it is

    @property
    def element(self) -> int | None:
        """The index of a list element: 3 for kv_caches.3; None for any other source."""
        number = self.name.partition(".")[2]
        return int(number) if self.kind != "parameter" and number.isdecimal() else None

    @property
    def expression(self) -> str:
        """The source as a Python expression over the forward's arguments."""
        head, _, rest = self.name.partition(".")
        return self.name if self.element is None else f"{head}[{rest}]"


def source_of(placeholder: fx.Node) -> Source | Parameter:
    found: Source | Parameter = placeholder.meta["source"]
    return found


def is_parameter(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and source_of(node).kind == "parameter"


def parameter_of(placeholder: fx.Node) -> Parameter:
    """Return the description of a placeholder for which `is_parameter` holds."""
    found = source_of(placeholder)
    assert isinstance(found, Parameter)
    return found


def add_parameter(graph: fx.Graph, parameter: Parameter) -> fx.Node:
    """Add an input for a parameter, after the graph's other inputs, and return it."""
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1]):
        node = graph.placeholder(re.sub(r"\W", "_", parameter.name))
    like = next(p.meta["val"] for p in placeholders if is_parameter(p))
    with like.fake_mode:
        node.meta["val"] = torch.empty(parameter.shape, dtype=parameter.torch_dtype, device=like.device)
    node.meta["source"] = parameter
    return node


def describe_shards(graph: fx.Graph, shards: Mapping[str, Shard]) -> None:
    """Set the shard in the description of each of the graph's parameters. shards: by parameter name."""
    for node in graph.find_nodes(op="placeholder"):
        if is_parameter(node):
            node.meta["source"] = parameter_of(node).divided(shards)


def shards_in(graph: fx.Graph) -> dict[str, Shard]:
    """Return the shards that `describe_shards` has set, by parameter name."""
    parameters = [parameter_of(node) for node in graph.find_nodes(op="placeholder") if is_parameter(node)]
    return {leaf.name: leaf.shard for p in parameters for leaf in p.leaves() if leaf.shard is not None}


def argument(graph: fx.Graph, name: str) -> fx.Node:
    """Return the input of a forward argument, such as a pass's step tensor. Raises LookupError if there is none."""
    for node in graph.find_nodes(op="placeholder"):
        if source_of(node).kind == "argument" and source_of(node).name == name:
            return node
    raise LookupError(f"the graph has no argument {name}")
