"""Random weights, for running a model's shape without its checkpoint."""

from __future__ import annotations

import hashlib

import torch

from compiled_engine.models.checkpoint.parameters import Weights
from compiled_engine.passes.parameter import BUFFER

STANDARD_DEVIATION = 0.02


def fill_with_random_weights(weights: Weights, seed: int, rank: int = 0, num_ranks: int = 1) -> None:
    """Fill a tensor in place with normal values of small deviation, around 1 for norms and around 0 otherwise.

    The values of a tensor depend on the seed, its name and the kind of device, not on its place or the number of ranks:
    a divided tensor is generated completely, one tensor at a time.
    """
    for batch in weights.batches():
        for leaf, target in batch:
            if leaf.role == BUFFER:
                continue
            digest = hashlib.sha256(f"{seed} {leaf.name}".encode()).digest()
            generator = torch.Generator(target.device)
            generator.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            mean = 1.0 if leaf.name.endswith("norm.weight") else 0.0
            if leaf.shard is None:
                target.normal_(mean, STANDARD_DEVIATION, generator=generator)
            else:
                whole = torch.empty(leaf.shard.whole, dtype=target.dtype, device=target.device)
                whole.normal_(mean, STANDARD_DEVIATION, generator=generator)
                target.copy_(leaf.shard.of(whole, rank, num_ranks))
