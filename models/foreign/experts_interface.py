"""Experts as a function of transformers' `ExpertsInterface`, as the textbook writes them, which a pass makes one op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

NAME = "compiled_engine"


class UnknownExpertsError(ValueError):
    """Experts that are more than gated MLPs; the message names the difference."""


def all_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute [T, D] from tokens [T, D] with experts and weights [T, X]; `module` has the experts' parameters.

    Every expert computes every token; see models/textbook/experts.py. Raises UnknownExpertsError.
    """
    _require_known(module)
    gate_up, down = module.gate_up_proj, module.down_proj
    if not module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    num_experts = gate_up.shape[0]
    none_TE = top_k_weights.new_zeros((top_k_weights.shape[0], num_experts))
    weights_TE = none_TE.scatter(-1, top_k_index, top_k_weights).to(hidden_states.dtype)
    gate_up_ETI = torch.bmm(hidden_states.expand(num_experts, -1, -1), gate_up)
    if module.has_bias:
        gate_up_ETI = gate_up_ETI + module.gate_up_proj_bias.unsqueeze(1)
    y_ETD = torch.bmm(module._apply_gate(gate_up_ETI), down)
    if module.has_bias:
        y_ETD = y_ETD + module.down_proj_bias.unsqueeze(1)
    return (y_ETD * weights_TE.t().unsqueeze(-1)).sum(0)


def experts_by_columns(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """(module, name) of weights [E, in, out]: the kernels want [E, out, in] in memory, whatever the shape is."""
    for module in model.modules():
        if getattr(module, "is_transposed", False) and hasattr(module, "gate_up_proj"):
            yield from ((module, name) for name in ("gate_up_proj", "down_proj"))


def _require_known(module: Any) -> None:
    own_gate = type(module)._apply_gate.__module__ != ExpertsInterface.__module__
    clamped = hasattr(module, "alpha") and hasattr(module, "limit")
    has = [
        *(["a norm behind each"] if getattr(module, "has_post_expert_norm", False) else []),
        *(["a gate of their own"] if own_gate and not clamped else []),
        *([] if getattr(module, "has_gate", True) else ["no gate"]),
    ]
    if has:
        raise UnknownExpertsError(f"the experts have {', '.join(has)}; allowed: act(gate) * up, and GPT-OSS's gate")


ExpertsInterface.register(NAME, all_experts)
