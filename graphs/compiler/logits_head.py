"""What a model does between hidden states and logits, as generated Python: for models whose code a later start lacks.

The textbook's models have a method for it, and so has foreign code, but a start that finds its model compiled imports
none. It is taken from the trace, and its ops are called one by one, as eager code does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import fx

from compiled_engine.graphs.compiler.direct_piece import direct_source, load_direct
from compiled_engine.graphs.compiler.piece import piece_to_json
from compiled_engine.graphs.compiler.plan import read_source
from compiled_engine.passes.graph_inputs import derived, source_of
from compiled_engine.passes.matching import arg

_INPUTS, _CODE = "logits.json", "logits.py"
Logits = Callable[[torch.Tensor], torch.Tensor]


def write_logits_head(folder: Path, graph: fx.Graph) -> None:
    """graph: a lowered trace, which returns the hidden states and the logits of every token."""
    hidden, logits = arg(graph.output_node(), 0)
    needed: set[fx.Node] = set()
    pending = [logits]
    while pending:
        node = pending.pop()
        if node not in needed and node is not hidden:
            needed.add(node)
            pending += node.all_input_nodes
    piece = fx.Graph()
    copies = {hidden: piece.placeholder("hidden_RD")}
    copies[hidden].meta = dict(hidden.meta)
    sources: list[dict[str, Any] | None] = [None]
    for node in graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            sources.append(asdict(source_of(node)))
            copies[node] = piece.placeholder(node.name)
        else:
            copies[node] = piece.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    piece.output((copies[logits],))
    (folder / _INPUTS).write_text(json.dumps(sources))
    (folder / _CODE).write_text(direct_source(piece_to_json(fx.GraphModule({}, piece))))


def read_logits_head(folder: Path) -> Callable[[Mapping[str, torch.Tensor]], Logits] | None:
    """What binds the code to parameters, by name; None where an entry has none."""
    if not (folder / _CODE).is_file():
        return None
    code = load_direct((folder / _CODE).read_text())
    sources = [read_source(item) for item in json.loads((folder / _INPUTS).read_text())[1:]]

    def bind(parameters: Mapping[str, torch.Tensor]) -> Logits:
        values = [derived(parameters[s.name], s.derivation) if s.kind == "parameter" else None for s in sources]

        def logits(hidden_RD: torch.Tensor) -> torch.Tensor:
            # The one size that there is: of rows.
            inputs = [hidden_RD.shape[0] if value is None else value for value in values]
            (logits_RV,) = code(hidden_RD, *inputs)
            return logits_RV

        return logits

    return bind
