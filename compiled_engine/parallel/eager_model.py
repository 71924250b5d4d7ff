"""Puts the collectives into a model that runs eagerly, where no pass does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compiled_engine.collectives.group import current_group
from compiled_engine.parallel.shards import Shard


def add_collectives(model: nn.Module, shards: Mapping[str, Shard]) -> None:
    """Sum the ranks' parts after each linear whose input is divided, after experts, whose second products' are, and
    after each embedding whose vocabulary is divided."""
    for path, module in model.named_modules():
        own = {name: shards.get(f"{path}.{name}") for name, _ in module.named_parameters(recurse=False)}
        if any(shard is not None and shard.divides_input for shard in own.values()):
            module.register_forward_hook(_summed)
        elif isinstance(module, nn.Embedding) and (shard := own["weight"]) is not None and shard.dim == 0:
            divided = _DividedEmbedding(module.weight.shape[0])
            module.register_forward_pre_hook(divided.before)
            module.register_forward_hook(divided.after)


def _summed(module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return current_group().all_reduce(output)


class _DividedEmbedding:
    """Around an embedding, which may scale what it looks up: tokens of other ranks count as zeros."""

    def __init__(self, num_rows: int):
        self._num_rows = num_rows
        self._elsewhere: torch.Tensor

    def before(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[torch.Tensor]:
        """Rows of this rank."""
        rows = arguments[0] - current_group().rank * self._num_rows
        self._elsewhere = (rows < 0) | (rows >= self._num_rows)
        return (rows.masked_fill(self._elsewhere, 0),)

    def after(self, module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return current_group().all_reduce(output.masked_fill(self._elsewhere.unsqueeze(-1), 0.0))
