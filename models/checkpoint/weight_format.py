"""Defines the class that declares a format of quantised weights in checkpoints.

A declaration says how config.json states the format, and how its tensors are read. weight_formats.py lists all
declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.packed_weights import PackedWeight
from compiled_engine.quantisation import LinearScheme, Quantisation

# End of an error about a format that is not supported: the alternatives.
INSTEAD = (
    ": a checkpoint in FP8, or with integers of compressed-tensors, GPTQ or AWQ, or one in bfloat16 with "
    "quantization='fp8'"
)
Read = Callable[
    [Mapping[str, torch.Tensor], Quantisation | None, Path], tuple[dict[str, torch.Tensor], dict[str, PackedWeight]]
]


@dataclass(frozen=True)
class WeightFormat:
    """Declares a format in which checkpoints of compressed-tensors, and possibly modelopt, store quantised weights."""

    name: str  # the `format` of compressed-tensors
    scheme_of: Callable[[JsonFields], LinearScheme]  # reads a group of `config_groups`
    holds: Callable[[LinearScheme], bool]  # whether weights of a scheme are written in this format
    presets: Mapping[str, LinearScheme] = field(default_factory=dict)  # names that `config_groups` may have
    algorithms: Mapping[str, LinearScheme] = field(default_factory=dict)  # names in modelopt's `quant_algo`
    # Puts the checkpoint's tensors into the engine's layout, see `read_weights`; None if they already are in it.
    read: Read | None = None
