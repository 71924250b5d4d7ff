"""What a traced graph's placeholders stand for: the convention that trace, passes and the stitcher share.

Each placeholder's `meta["source"]` is a `Source` or a `Parameter`; each node's `meta["val"]` is its fake value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from compiled_engine.parallel.shards import Shard
from compiled_engine.passes.parameter import Parameter


@dataclass(frozen=True)
class Source:
    """Where a graph input that is no parameter comes from at run time.

    kind "argument": the forward argument `name` (attention_inputs.seq_lens_R, kv_caches.3, ...);
    "size": the length of dimension `dim` of that argument;
    "received", in a stage alone: value `name` (received.0, ...) of those that the stage before hands on.
    """

    kind: str
    name: str
    dim: int = 0


def source_of(placeholder: fx.Node) -> Source | Parameter:
    found: Source | Parameter = placeholder.meta["source"]
    return found


def is_parameter(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and source_of(node).kind == "parameter"


def parameter_of(placeholder: fx.Node) -> Parameter:
    """The description of a placeholder for which `is_parameter` holds."""
    found = source_of(placeholder)
    assert isinstance(found, Parameter)
    return found


def describe_shards(graph: fx.Graph, shards: Mapping[str, Shard]) -> None:
    """Put the shards, by name, into the descriptions of the graph's parameters."""
    for node in graph.find_nodes(op="placeholder"):
        if is_parameter(node):
            node.meta["source"] = parameter_of(node).divided(shards)


def shards_in(graph: fx.Graph) -> dict[str, Shard]:
    """Return the shards that `describe_shards` has put there, by name."""
    parameters = [parameter_of(node) for node in graph.find_nodes(op="placeholder") if is_parameter(node)]
    return {leaf.name: leaf.shard for p in parameters for leaf in p.leaves() if leaf.shard is not None}
