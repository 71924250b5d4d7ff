"""Writes into a cache entry what `logits_head` reads; apart from it, since a warm start does not import sympy."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import fx

from compiled_engine.graphs.compiler.direct_piece import direct_source
from compiled_engine.graphs.compiler.logits_head import CODE_FILE, INPUTS_FILE
from compiled_engine.graphs.compiler.piece import piece_to_json
from compiled_engine.passes.graph_inputs import source_of
from compiled_engine.passes.matching import arg


def write_logits_head(folder: Path, graph: fx.Graph, *, with_code: bool) -> None:
    """graph: a lowered trace, which returns the hidden states and the logits of every token. with_code: not only which
    parameters the logits need."""
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
    (folder / INPUTS_FILE).write_text(json.dumps(sources), encoding="utf-8")
    if with_code:
        (folder / CODE_FILE).write_text(direct_source(piece_to_json(fx.GraphModule({}, piece))), encoding="utf-8")
