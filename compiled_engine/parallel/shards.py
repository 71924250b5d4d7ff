"""Which slice of each parameter a rank holds: found by comparing the whole model's shapes with those of one share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.models.textbook.architectures import build_model


@dataclass(frozen=True)
class Shard:
    """A parameter of shape `whole` is cut along `dim` into `parts`; None: every rank has all of it.

    Where there are fewer parts than ranks, neighbouring ranks have the same one. first_only: ranks but the first have
    zeros instead, because the sum over ranks must count it once: the bias of a linear whose input is divided.
    """

    whole: tuple[int, ...]
    dim: int | None = None
    parts: int = 1
    first_only: bool = False

    def of(self, tensor: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
        """The slice of rank `rank`, a view; zeros where it has none of a parameter that is the first rank's."""
        if self.first_only and rank:
            return torch.zeros_like(tensor)
        if self.dim is None:
            return tensor
        length = self.whole[self.dim] // self.parts
        return tensor.narrow(self.dim, rank * self.parts // num_ranks * length, length)


def shards_of(config: EngineConfig) -> dict[str, Shard]:
    """By parameter name, tied ones under each of theirs; empty for one rank.

    Raises ValueError for a parameter that would be cut in more than one direction.
    """
    if config.parallel.tensor_parallel_size == 1:
        return {}
    whole = dict(build_model(config.model).named_parameters(remove_duplicate=False))
    local = dict(build_model(config.local_model).named_parameters(remove_duplicate=False))
    found = {name: _shard(name, tuple(p.shape), tuple(local[name].shape)) for name, p in whole.items()}
    for name, shard in list(found.items()):
        owner, _, attribute = name.rpartition(".")
        if attribute == "weight" and shard.dim == 1 and (bias := found.get(f"{owner}.bias")) is not None:
            found[f"{owner}.bias"] = Shard(bias.whole, first_only=True)
    return found


def _shard(name: str, whole: tuple[int, ...], local: tuple[int, ...]) -> Shard:
    cut = [dim for dim, (a, b) in enumerate(zip(whole, local, strict=True)) if a != b]
    if len(cut) > 1:
        raise ValueError(f"{name} would be cut along dimensions {cut}; a rank's share is cut along one")
    if not cut:
        return Shard(whole)
    return Shard(whole, cut[0], whole[cut[0]] // local[cut[0]])


@dataclass(frozen=True)
class RankShare:
    """What rank `rank` of `num_ranks` holds of the parameters in `shards`; others are whole."""

    shards: Mapping[str, Shard]
    rank: int = 0
    num_ranks: int = 1

    def whole_shape(self, name: str, local: torch.Tensor) -> tuple[int, ...]:
        """Of the checkpoint's tensor, of which `local` is this rank's part."""
        return self.shards[name].whole if name in self.shards else tuple(local.shape)

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a checkpoint's tensor: a view, unless it is zeros."""
        return self.shards[name].of(tensor, self.rank, self.num_ranks) if name in self.shards else tensor


WHOLE = RankShare({})
