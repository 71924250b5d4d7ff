"""Calls functions of the user on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.step_hooks import RunnerParts, StepFeature
from compiled_engine.features.rank_calls.plan import NAME
from compiled_engine.features.weight_updates.step_weight_updates import StepWeightUpdates
from compiled_engine.process.import_name import import_name

# Bytes of the results of all ranks together. They cross processes in a message, which holds twice as many.
MOST_BYTES = 64 << 20

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], int]


@dataclass(frozen=True)
class Rank:
    """A rank of the engine: the first argument of a function that `collective_rpc` calls on every rank."""

    index: int  # among the ranks of all stages of a replica
    num_ranks: int
    device: torch.device
    # The rank's part of the parameters, and buffers, by the engine's names: merged, folded and quantised. To be read,
    # but not while the weights sleep.
    tensors: Mapping[str, torch.Tensor]
    kept: dict[str, Any]  # for functions: what a later call finds again, such as a connection
    load: LoadWeights

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Add whole tensors of a checkpoint to the update under way; return how many tensors it has now.

        weights: pairs of the checkpoint's name and a tensor on any device. Tensors are kept by reference until the
        update is finished, so clone what changes before. Every rank must add all tensors. Raises ControlError if no
        update is under way, or a name comes twice.
        """
        return self.load(weights)


class StepRankCalls(StepFeature):
    """Calls functions with the rank as their first argument."""

    name = NAME
    calls = ("call",)

    def __init__(self, parts: RunnerParts, rank: int, num_ranks: int, updates: StepWeightUpdates) -> None:
        """Make the feature of a rank. rank, num_ranks: see StepWeightUpdates. updates: takes the tensors."""
        self._index, self._num_ranks, self._device = rank, num_ranks, parts.config.device
        self._tensors, self._updates = MappingProxyType(parts.tensors), updates
        self._kept: dict[str, Any] = {}

    def call(
        self, function: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], loads: bool
    ) -> dict[str, Any]:
        """Call `function(rank, *args, **kwargs)`, and return its result, and the number of tensors of the update.

        function: a callable, or its name "package.module:function"; the result of the latter must be plain data.
        loads: whether an update is under way, so that the function may add tensors.

        Raises ValueError if the name cannot be imported, ControlError if the result is not plain data, and what the
        function raises.
        """
        found = import_name("method", function) if isinstance(function, str) else function
        load = self._updates.take_tensors if loads else _refuse
        rank = Rank(self._index, self._num_ranks, self._device, self._tensors, self._kept, load)
        value = found(rank, *args, **kwargs)
        if isinstance(function, str):
            try:
                size = len(msgspec.msgpack.encode(value))
            except (TypeError, OverflowError) as error:
                raise ControlError(
                    f"{function} returned {type(value).__name__}; allowed: plain data: {error}"
                ) from error
            if size > (most := MOST_BYTES // self._num_ranks):
                raise ControlError(f"{function} returned {size} bytes; allowed on each rank: {most}")
        return {"value": value, "received": self._updates.num_received}

    def close(self) -> None:
        self._kept.clear()
        del self._tensors, self._updates


def _refuse(weights: Iterable[tuple[str, torch.Tensor]]) -> int:
    raise ControlError("no weight update is under way; start one first")
