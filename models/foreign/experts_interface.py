"""Experts as a function of transformers' `ExpertsInterface`, as the textbook writes them, which a pass makes one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

NAME = "compiled_engine"


class UnknownExpertsError(ValueError):
    """Experts that are more than gated MLPs of linears without biases; the message says what they have."""


def all_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[T, D] of tokens [T, D], whose experts and their weights are [T, X]; `module` has the experts' parameters.

    Every expert computes every token; see models/textbook/experts.py. Raises UnknownExpertsError.
    """
    has = [name for name in ("has_bias", "is_transposed", "has_post_expert_norm") if getattr(module, name, False)]
    own_gate = type(module)._apply_gate.__module__ != ExpertsInterface.__module__
    if has or own_gate or not getattr(module, "has_gate", True):
        what = [*has, *(["a gate of their own"] if own_gate else []), *([] if module.has_gate else ["no gate"])]
        raise UnknownExpertsError(f"the experts have {', '.join(what)}; allowed: act(gate) * up of plain linears")
    num_experts = module.gate_up_proj.shape[0]
    none_TE = top_k_weights.new_zeros((top_k_weights.shape[0], num_experts))
    weights_TE = none_TE.scatter(-1, top_k_index, top_k_weights).to(hidden_states.dtype)
    x_ETD = hidden_states.expand(num_experts, -1, -1)
    gate_ETI, up_ETI = torch.bmm(x_ETD, module.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    activation: nn.Module = module.act_fn
    y_ETD = torch.bmm(activation(gate_ETI) * up_ETI, module.down_proj.transpose(1, 2))
    return (y_ETD * weights_TE.t().unsqueeze(-1)).sum(0)


ExpertsInterface.register(NAME, all_experts)
