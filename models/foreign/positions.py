"""Adapts models that compute the positions of tokens from the length of transformers' cache.

The engine passes positions to each step. Modules that embed positions are changed to use these positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding

from compiled_engine.models.foreign.compat import mixed
from compiled_engine.models.foreign.interfaces import Step

_COUNTED = {"cache_length", "position_ids"}  # parameters of modules that count positions unless they are given some


class StepPositions:
    """Mixin for a module that embeds positions: uses those of the engine's step instead of computing its own."""

    step: Step | None

    def forward(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Return the embeddings of the step's positions, [T, D] or [1, T, D], depending on the family's code."""
        if self.step is not None:
            keywords["position_ids"] = self.step.positions_T
        return super().forward(*arguments, **keywords)  # type: ignore[misc,no-any-return]


class TableOfPositions:
    """Mixin for XGLM's sinusoidal position embeddings: reads a table for the longest text, which never grows."""

    weights: torch.Tensor
    offset: int

    def forward(self, position_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        """Return the embeddings [1, T, D] of positions [1, T]."""
        return embedding(position_ids + self.offset, self.weights)


def adapt_positions(model: Any) -> None:
    """Change modules that compute positions themselves in place, so that they embed the positions of the step."""
    takes_positions = any("position_ids" in _parameters(each) for each in _decoders(model))
    for module in model.modules():
        if type(module).__name__ == "XGLMSinusoidalPositionalEmbedding":
            module.__class__ = mixed(TableOfPositions, type(module))
        elif not takes_positions and isinstance(module, nn.Embedding) and _parameters(module) >= _COUNTED:
            module.__class__ = mixed(StepPositions, type(module))
            own: Any = module
            own.step = None


def _decoders(model: Any) -> Iterator[nn.Module]:
    for module in (model.base_model, getattr(model.base_model, "decoder", None)):
        if isinstance(module, nn.Module):
            yield module


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(type(module).forward).parameters)
