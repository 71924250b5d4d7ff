"""What stands side by side in the packed parameters of models of transformers, for those that ranks divide."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from compiled_engine.config import ModelConfig

_LAYER = re.compile(r"\.(\d+)\.")


def mark_packed(model: nn.Module, config: ModelConfig) -> None:
    """Give modules whose parameters are packed the attribute `packed`, as textbook modules have it.

    Linears named qkv_proj have the rows of q, k and v; what is named gate_up_proj, those of gate and of up, also where
    it has them of every expert. Whether a family's forward takes them apart so, equal answers have to show.
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
