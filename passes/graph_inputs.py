"""What a traced graph's placeholders stand for: the convention that trace, passes and the stitcher share.

Each placeholder's `meta["source"]` is a `Source`; each node's `meta["val"]` is its fake value.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Source:
    """Where a graph input comes from at run time.

    kind "parameter": the parameter or buffer `name`, which is a packed tensor if it has `members`;
    "argument": the forward argument `name` (attention_inputs.seq_lens_R, kv_caches.3, ...);
    "size": the length of dimension `dim` of that argument.
    """

    kind: str
    name: str
    dim: int = 0
    members: tuple[str, ...] = ()


def source_of(placeholder: fx.Node) -> Source:
    return placeholder.meta["source"]


def is_parameter(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and source_of(node).kind == "parameter"
