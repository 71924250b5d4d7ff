"""Our attention as a function of transformers' `AttentionInterface`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from compiled_engine.attention.op import attention_or_value

# transformers makes masks for known implementations; for this one it makes none.
NAME = "compiled_engine"


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, d] in, [1, T, heads, d] out; `module` has `step` and the number of its layer, `layer_idx`.

    What the other arguments may be was checked when the model was observed; the window is that of the mask, which
    is not made here.
    """
    q_THd, k_TKd, v_TKd = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    step: Any = module.step
    window = step.sliding_windows[module.layer_idx]
    cache = step.kv_caches[module.layer_idx]
    out_THd = attention_or_value(q_THd, k_TKd, v_TKd, cache, step.inputs, scale, window, softcap, s_aux)
    return out_THd.unsqueeze(0), None


AttentionInterface.register(NAME, attend)
