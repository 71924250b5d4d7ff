"""Sections of packed parameters of transformers' models, for division among ranks."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from compiled_engine.config import ModelConfig

_LAYER = re.compile(r"\.(\d+)\.")


def mark_packed(model: nn.Module, config: ModelConfig) -> None:
    """Give modules with packed parameters the attribute `packed`, like textbook modules.

    Linears named qkv_proj have the rows of q, k and v; modules named gate_up_proj those of gate and up, also for every
    expert. That a family's forward splits them like this is verified by equal log-probabilities.
    """
    for path, module in model.named_modules():
        packed: dict[str, Any] = {}
        for name, parameter in module.named_parameters(recurse=False):
            if path.endswith(".qkv_proj"):
                layer = _LAYER.search(path)
                heads = config.heads_of(int(layer[1]) if layer else 0)
                rows = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads
                packed[name] = tuple(count * heads.head_dim for count in rows)
            elif path.endswith(".gate_up_proj") or name == "gate_up_proj":
                half = parameter.shape[1 if parameter.dim() == 3 else 0] // 2
                packed[name] = half, half
        if packed:
            module.packed = packed  # type: ignore[assignment]
