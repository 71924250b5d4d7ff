"""On a device without our kernels, the fused ops are written out as their plain-torch references.

Inductor's C++ backend then fuses them with their neighbours; the fused ops stand for Triton kernels, which it cannot
compile there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_engine.passes import residual_rms_norm, silu_mul
from compiled_engine.passes.matching import fake_mode_of

REFERENCES = {
    torch.ops.compiled_engine.residual_rms_norm.default: residual_rms_norm.reference,
    torch.ops.compiled_engine.silu_mul.default: silu_mul.reference,
}


def expand_references(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of an ATen graph in which every fused op is its reference; placeholders keep their sources."""
    module.recompile()
    placeholders = module.graph.find_nodes(op="placeholder")
    fakes = [node.meta["val"] for node in placeholders]
    references: dict[Any, Any] = dict(REFERENCES)
    with fake_mode_of(fakes):
        expanded = make_fx(module, decomposition_table=references)(*fakes)
    for new, old in zip(expanded.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        new.meta["source"] = old.meta["source"]
    expanded.graph.eliminate_dead_code()
    expanded.recompile()
    return expanded
