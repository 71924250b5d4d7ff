"""What a traced graph's placeholders stand for: the convention that trace, passes and the stitcher share.

Each placeholder's `meta["source"]` is a `Source`; each node's `meta["val"]` is its fake value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

# What is computed of a parameter, in order: ("add", 1.0), ("mul", 2.0), ("to", "float32").
Derivation = tuple[tuple[str, float | str], ...]


@dataclass(frozen=True)
class Source:
    """Where a graph input comes from at run time.

    kind "parameter": the parameter or buffer `name`, which is a packed tensor if it has `members`;
    or what `derivation` makes of it;
    "argument": the forward argument `name`, see StepTensor;
    "size": the length of dimension `dim` of that argument;
    "received", in a stage alone: value `name` (received.0, ...) of those that the stage before hands on.
    """

    kind: str
    name: str
    dim: int = 0
    members: tuple[str, ...] = ()
    derivation: Derivation = ()

    @property
    def element(self) -> int | None:
        """Which element of a list the source is: 3 for kv_caches.3; None for any other source."""
        number = self.name.partition(".")[2]
        return int(number) if self.kind != "parameter" and number.isdecimal() else None

    @property
    def expression(self) -> str:
        """The source in Python, where the forward's arguments have their names."""
        head, _, rest = self.name.partition(".")
        return self.name if self.element is None else f"{head}[{rest}]"


def source_of(placeholder: fx.Node) -> Source:
    return placeholder.meta["source"]


def derived(tensor: torch.Tensor, derivation: Sequence[Sequence[float | str]]) -> torch.Tensor:
    """What a derivation makes of a parameter's value."""
    for step, operand in derivation:
        if step == "to":
            tensor = tensor.to(getattr(torch, str(operand)))
        else:
            constant = float(operand)
            tensor = tensor + constant if step == "add" else tensor * constant
    return tensor


def is_parameter(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and source_of(node).kind == "parameter"


def argument(graph: fx.Graph, name: str) -> fx.Node:
    """The input that stands for a forward argument, such as a step tensor that a pass has asked for. Raises LookupError
    if the graph has none of this name."""
    for node in graph.find_nodes(op="placeholder"):
        if source_of(node).kind == "argument" and source_of(node).name == name:
            return node
    raise LookupError(f"the graph has no argument {name}")
