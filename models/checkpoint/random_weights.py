"""Random weights, for running a model's shape without its checkpoint."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from compiled_engine.parallel.shards import WHOLE, RankShare

STANDARD_DEVIATION = 0.02


def fill_with_random_weights(model: nn.Module, seed: int, share: RankShare = WHOLE) -> None:
    """Normal with a small deviation, around 1 for norms and around 0 for the rest, in place, on its device.

    A parameter's values follow from the seed, its name and the kind of device, not from where it is stored, nor from
    how many ranks share it: of one that is divided all is generated, one parameter at a time. Parameters on the meta
    device stay there.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(parameter.device)
        generator.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        if name not in share.shards:
            parameter.data.normal_(mean, STANDARD_DEVIATION, generator=generator)
        else:
            whole = torch.empty(share.whole_shape(name, parameter), dtype=parameter.dtype, device=parameter.device)
            parameter.data.copy_(share.of(name, whole.normal_(mean, STANDARD_DEVIATION, generator=generator)))
