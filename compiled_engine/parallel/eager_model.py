"""Puts the collectives into a model that runs eagerly, where no pass does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compiled_engine.collectives.group import current_group
from compiled_engine.collectives.vocabulary import embedding_part
from compiled_engine.parallel.shards import Shard


def add_collectives(model: nn.Module, shards: Mapping[str, Shard]) -> None:
    """Sum the ranks' parts after each linear whose input is divided and each embedding whose vocabulary is."""
    for path, module in list(model.named_modules()):
        shard = shards.get(f"{path}.weight")
        if isinstance(module, nn.Linear) and shard is not None and shard.dim == 1:
            module.register_forward_hook(_summed)
        elif isinstance(module, nn.Embedding) and shard is not None and shard.dim == 0:
            owner, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(owner), attribute, _DividedEmbedding(module.weight))


def _summed(module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return current_group().all_reduce(output)


class _DividedEmbedding(nn.Module):
    def __init__(self, weight_VD: torch.Tensor):
        super().__init__()
        self.weight = weight_VD

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        group = current_group()
        return group.all_reduce(embedding_part(self.weight, ids_T, group.rank))
