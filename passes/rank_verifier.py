"""Executes every rank's share of a graph and compares it with the graph of the undivided model.

The undivided graph is run once on random inputs. Then each call of the divided graph is made for each rank, on its
slices of the values recorded there, and must give its slice of what was recorded; a sum over the ranks must give the
whole. Every call starts from recorded numbers, so errors do not add up. Slices follow from the shapes of both graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from compiled_engine.collectives.group import StandIn, in_group
from compiled_engine.parallel.shards import Shard
from compiled_engine.passes.graph_inputs import is_parameter, source_of
from compiled_engine.passes.graph_pass import CompileRange, PassResult
from compiled_engine.passes.random_inputs import RandomInputs
from compiled_engine.passes.verifier import (
    MOST_TOKENS,
    Values,
    VerificationError,
    difference,
    mutated,
    run_call,
    run_whole,
)


@torch.no_grad()
def verify_ranks(
    whole: fx.Graph,
    divided: fx.Graph,
    result: PassResult,
    shards: Mapping[str, Shard],
    num_ranks: int,
    compile_range: CompileRange,
    device: torch.device,
) -> int:
    """Raises VerificationError naming the value, the number of tokens and how far off it is.

    Returns how many sums over ranks were compared.
    """
    originals = {node.name: node for node in whole.nodes}
    sums = {replacement.after: originals[replacement.before] for replacement in result.replacements}
    parts = {node.all_input_nodes[0] for node in sums}
    for num_tokens in sorted({compile_range.low, min(compile_range.high, MOST_TOKENS)}):
        inputs = RandomInputs(whole, num_tokens, device, 1.0)
        recorded, _ = run_whole(whole, inputs)
        ranks = [
            _Rank(rank, num_ranks, shards, recorded, originals, {s.name: o for s, o in sums.items()})
            for rank in range(num_ranks)
        ]
        for node in divided.nodes:
            if node in sums:
                part = node.all_input_nodes[0]
                found = torch.stack([rank.compute(part).float() for rank in ranks]).sum(0)
                _compare(node, num_tokens, recorded[sums[node]], found)
            elif _is_comparable(node) and node not in parts:
                for rank in ranks:
                    _compare(node, num_tokens, rank.slice(node), rank.compute(node))
    return len(sums)


class _Rank:
    """One rank's view of the recorded values. sums: by name, the original of each sum over the ranks."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        shards: Mapping[str, Shard],
        recorded: Values,
        originals: Mapping[str, fx.Node],
        sums: Mapping[str, fx.Node],
    ):
        self._rank, self._num_ranks, self._shards = rank, num_ranks, shards
        self._recorded, self._originals, self._sums = recorded, originals, sums

    def slice(self, node: fx.Node) -> Any:
        """What the rank has of a recorded value."""
        value = self._recorded[self._sums.get(node.name) or self._originals[node.name]]
        if is_parameter(node):
            name = source_of(node).name
            return self._shards[name].of(value, self._rank, self._num_ranks) if name in self._shards else value
        return self._part(value, node.meta.get("val"))

    def _part(self, value: Any, local: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._part(item, like) for item, like in zip(value, local, strict=True)]
        if not isinstance(value, torch.Tensor):
            return value
        for dim, size in enumerate(local.shape):
            if isinstance(size, int) and value.shape[dim] != size:
                parts = value.shape[dim] // size
                value = value.narrow(dim, self._rank * parts // self._num_ranks * size, size)
        return value

    def compute(self, node: fx.Node) -> Any:
        with in_group(StandIn(self._num_ranks, self._rank)):
            return run_call(node, {argument: self.slice(argument) for argument in node.all_input_nodes})


def _is_comparable(node: fx.Node) -> bool:
    """Whether a call has a value that follows from its arguments alone, one tensor."""
    is_call = node.op == "call_function" and not mutated(node) and isinstance(node.meta.get("val"), torch.Tensor)
    return is_call and not any(mutated(user) and node in mutated(user).values() for user in node.users)


def _compare(node: fx.Node, num_tokens: int, expected: torch.Tensor, found: torch.Tensor) -> None:
    problem = difference(expected, expected.float(), found.to(expected.dtype))
    if problem is not None:
        raise VerificationError(f"pass tensor_parallel, {num_tokens} tokens: {node.name} {problem}")
