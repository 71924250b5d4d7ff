"""Random weights, for running a model's shape without its checkpoint."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

STANDARD_DEVIATION = 0.02


def fill_with_random_weights(model: nn.Module, seed: int) -> None:
    """Normal with a small deviation, around 1 for norms and around 0 for the rest, in place, on its device.

    A parameter's values follow from the seed, its name and the kind of device, not from where it is stored.
    """
    for name, parameter in model.named_parameters():
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(parameter.device)
        generator.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        parameter.data.normal_(mean, STANDARD_DEVIATION, generator=generator)
