"""The computation from hidden states to logits: its parameters, and generated Python for models whose code is not
imported.

Models have a method for it, but a warm start does not import foreign code. Both are taken from the trace (see
`logits_head_writer`). The generated code calls ops one by one, as eager code does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from compiled_engine.graphs.compiler.direct_piece import load_direct
from compiled_engine.graphs.compiler.plan import Input, read_input
from compiled_engine.passes.parameter import Parameter

INPUTS_FILE, CODE_FILE = "logits.json", "logits.py"
Logits = Callable[[torch.Tensor], torch.Tensor]


def read_logits_parameters(folder: Path) -> tuple[Parameter, ...]:
    """Parameters that the logits need."""
    return tuple(source for source in _read_inputs(folder) if isinstance(source, Parameter))


def read_logits_head(folder: Path, device_type: str) -> Callable[[Mapping[str, torch.Tensor]], Logits] | None:
    """A function that binds the code to parameters, by name; None if an entry has no code."""
    if not (folder / CODE_FILE).is_file():
        return None
    code = load_direct((folder / CODE_FILE).read_text(), device_type)
    inputs = _read_inputs(folder)

    def bind(parameters: Mapping[str, torch.Tensor]) -> Logits:
        values = [parameters[source.name] if isinstance(source, Parameter) else None for source in inputs]

        def logits(hidden_RD: torch.Tensor) -> torch.Tensor:
            # The one size that there is: of rows.
            arguments = [hidden_RD.shape[0] if value is None else value for value in values]
            (logits_RV,) = code(hidden_RD, *arguments)
            return logits_RV

        return logits

    return bind


def _read_inputs(folder: Path) -> list[Input]:
    """Placeholders after the first, which is the hidden states."""
    return [read_input(item) for item in json.loads((folder / INPUTS_FILE).read_text())[1:]]
