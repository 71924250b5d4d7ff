"""Declaration of a format of quantised weights in checkpoints: how config.json states it, and how its tensors are read.

Formats are declared beside the code that reads their tensors; weight_formats.py lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.packed_weights import PackedWeight
from compiled_engine.quantisation import LinearScheme, Quantisation

# End of an error: what else there is to do.
INSTEAD = (
    ": a checkpoint in FP8, or with integers of compressed-tensors, GPTQ or AWQ, or one in bfloat16 with "
    "quantization='fp8'"
)
Read = Callable[
    [Mapping[str, torch.Tensor], Quantisation | None, Path], tuple[dict[str, torch.Tensor], dict[str, PackedWeight]]
]


@dataclass(frozen=True)
class WeightFormat:
    """A format in which checkpoints of compressed-tensors, and maybe of modelopt, store quantised weights."""

    name: str  # the `format` of compressed-tensors
    scheme_of: Callable[[JsonFields], LinearScheme]  # reads a group of `config_groups`
    holds: Callable[[LinearScheme], bool]  # whether weights of a scheme are written in this format
    presets: Mapping[str, LinearScheme] = field(default_factory=dict)  # names that `config_groups` may have
    algorithms: Mapping[str, LinearScheme] = field(default_factory=dict)  # names in modelopt's `quant_algo`
    # Puts the checkpoint's tensors into the engine's layout, see `read_weights`; None if they already are in it.
    read: Read | None = None
