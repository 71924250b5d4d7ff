"""The passes that make a graph of foreign code one like the textbook's, before any other; none can be switched off."""

from __future__ import annotations

import torch
from torch import fx

from compiled_engine.passes.fold_parameters import FoldParameters
from compiled_engine.passes.foreign_attention import ForeignAttention
from compiled_engine.passes.graph_pass import CompileRange, GraphPass
from compiled_engine.passes.manager import PassReport, run_passes
from compiled_engine.passes.normalise_layout import NormaliseLayout

# The placeholder of attention in a trace cannot be executed, so it cannot be compared.
_FIRST: tuple[GraphPass, ...] = (ForeignAttention(),)
_THEN: tuple[GraphPass, ...] = (NormaliseLayout(), FoldParameters())


def lower(
    graph: fx.Graph, compile_range: CompileRange, device: torch.device, *, strict: bool = False, verify: bool = False
) -> tuple[PassReport, ...]:
    """Rewrite a graph of foreign code in place. Raises what `run_passes` raises."""
    reports: tuple[PassReport, ...] = ()
    for passes, verified in ((_FIRST, False), (_THEN, verify)):
        names = [graph_pass.name for graph_pass in passes]
        reports += run_passes(graph, passes, names, compile_range, device, strict=strict, verify=verified)
    return reports
