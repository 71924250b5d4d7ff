"""Mixture of experts (Shazeer et al., 2017): a router sends each token to a few of many gated MLPs, the experts.

Shape letters: E experts, of which X are chosen for each token; I is the intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from compiled_engine.config import ExpertsConfig, ModelConfig


class Experts(nn.Module):
    """All experts of a layer. Each parameter is a stack of matrices, one for each expert."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        E, D, I = experts.count, config.hidden_size, experts.intermediate_size  # noqa: E741
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, D, dtype=config.dtype))
        self.down_proj = nn.Parameter(torch.empty(E, D, I, dtype=config.dtype))
        self.packed = {"gate_up_proj": (I, I)}

    def forward(self, x_TD: torch.Tensor, weights_TE: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the experts' outputs for each token, [T, D].

        weights_TE: 0 for experts that were not chosen. Every expert computes every token, so that the traced code does
        not depend on the values of weights_TE. The compiler removes the unneeded work.
        """
        x_ETD = x_TD.expand(self.gate_up_proj.shape[0], -1, -1)
        gate_ETI, up_ETI = torch.bmm(x_ETD, self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        y_ETD = torch.bmm(F.silu(gate_ETI) * up_ETI, self.down_proj.transpose(1, 2))
        return (y_ETD * weights_TE.t().unsqueeze(-1)).sum(0)

    def checkpoint_tensors(self) -> Iterator[tuple[str, str, tuple[tuple[int, int], ...]]]:
        """Yield (name, parameter, position) for each tensor in which checkpoints store the experts.

        The parameter contains the tensor; the position is the tensor's (start, end) in each dimension of the parameter.
        Both names are relative to this module.
        """
        _, D, I = self.down_proj.shape  # noqa: E741
        for expert in range(self.down_proj.shape[0]):
            one = expert, expert + 1
            yield f"{expert}.gate_proj.weight", "gate_up_proj", (one, (0, I), (0, D))
            yield f"{expert}.up_proj.weight", "gate_up_proj", (one, (I, 2 * I), (0, D))
            yield f"{expert}.down_proj.weight", "down_proj", (one, (0, D), (0, I))


class SparseMLP(nn.Module):
    """A router and its experts, which take the place of a dense MLP."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, experts.count, bias=False, dtype=config.dtype)
        self.experts = Experts(config, experts)
        self.per_token, self.renormalise = experts.per_token, experts.renormalise

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        probabilities_TE = F.softmax(self.gate(x_TD).float(), dim=-1)
        weights_TX, chosen_TX = probabilities_TE.topk(self.per_token, dim=-1)
        if self.renormalise:
            weights_TX = weights_TX / weights_TX.sum(-1, keepdim=True)
        weights_TE = torch.zeros_like(probabilities_TE).scatter(-1, chosen_TX, weights_TX)
        return self.experts(x_TD, weights_TE.to(x_TD.dtype))
