"""Random weights, for running a model's shape without its checkpoint."""

from __future__ import annotations

import hashlib

import torch

from compiled_engine.models.checkpoint.parameters import Weights
from compiled_engine.passes.parameter import BUFFER, CODES, INPUT_SCALE, SCALES

STANDARD_DEVIATION = 0.02
CODES_DEVIATION, INPUT_SCALE_SIZE = 64.0, 0.02


def fill_with_random_weights(weights: Weights, seed: int, rank: int = 0, num_ranks: int = 1) -> None:
    """Normal with a small deviation, around 1 for norms and around 0 for the rest, in place, on its device; codes
    of all sizes, with scales that give their values about that deviation.

    The values of a tensor follow from the seed, its name and the kind of device, not from where it is stored, nor from
    how many ranks share it: of one that is divided all is generated, one tensor at a time.
    """
    for batch in weights.batches():
        for leaf, target in batch:
            if leaf.role == BUFFER:
                continue
            digest = hashlib.sha256(f"{seed} {leaf.name}".encode()).digest()
            generator = torch.Generator(target.device)
            generator.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            mean = 1.0 if leaf.name.endswith("norm.weight") else 0.0
            if leaf.shard is None and leaf.role not in (CODES, SCALES, INPUT_SCALE):
                target.normal_(mean, STANDARD_DEVIATION, generator=generator)
                continue
            shape = target.shape if leaf.shard is None else leaf.shard.whole
            dtype = torch.float32 if leaf.role in (CODES, SCALES, INPUT_SCALE) else target.dtype
            whole = torch.empty(shape, dtype=dtype, device=target.device)
            if leaf.role == CODES:
                whole.normal_(0.0, CODES_DEVIATION, generator=generator)
            elif leaf.role in (SCALES, INPUT_SCALE):
                size = STANDARD_DEVIATION / CODES_DEVIATION if leaf.role == SCALES else INPUT_SCALE_SIZE
                whole.uniform_(0.5 * size, 1.5 * size, generator=generator)
            else:
                whole.normal_(mean, STANDARD_DEVIATION, generator=generator)
            target.copy_(whole if leaf.shard is None else leaf.shard.of(whole, rank, num_ranks))
