"""What a model does between hidden states and logits, as generated Python: for models whose code a later start lacks.

The textbook's models have a method for it, and so has foreign code, but a start that finds its model compiled imports
none. It is taken from the trace (see `logits_head_writer`), and its ops are called one by one, as eager code does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from compiled_engine.graphs.compiler.direct_piece import load_direct
from compiled_engine.graphs.compiler.plan import read_source
from compiled_engine.passes.graph_inputs import derived

INPUTS_FILE, CODE_FILE = "logits.json", "logits.py"
Logits = Callable[[torch.Tensor], torch.Tensor]


def read_logits_head(folder: Path, device_type: str) -> Callable[[Mapping[str, torch.Tensor]], Logits] | None:
    """What binds the code to parameters, by name; None where an entry has none."""
    if not (folder / CODE_FILE).is_file():
        return None
    code = load_direct((folder / CODE_FILE).read_text(), device_type)
    sources = [read_source(item) for item in json.loads((folder / INPUTS_FILE).read_text())[1:]]

    def bind(parameters: Mapping[str, torch.Tensor]) -> Logits:
        values = [derived(parameters[s.name], s.derivation) if s.kind == "parameter" else None for s in sources]

        def logits(hidden_RD: torch.Tensor) -> torch.Tensor:
            # The one size that there is: of rows.
            inputs = [hidden_RD.shape[0] if value is None else value for value in values]
            (logits_RV,) = code(hidden_RD, *inputs)
            return logits_RV

        return logits

    return bind
