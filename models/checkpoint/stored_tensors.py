"""Maps the tensors of a checkpoint, or describes those whose files are not downloaded yet."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from compiled_engine.config import ModelConfig
from compiled_engine.models.checkpoint.safetensors_files import map_tensors


def stored_tensors(
    config: ModelConfig, choose: Callable[[Collection[str]], Collection[str]] = lambda names: names
) -> dict[str, torch.Tensor]:
    """Return all tensors of a model's checkpoint, by name.

    If its weights are not downloaded yet, return meta tensors instead, from the headers of the files on the hub that
    have the tensors that `choose` selects from all names. Raises the errors of `map_tensors` and `describe_weights`.
    """
    if config.hub_name is None:
        return map_tensors(config.path)
    from compiled_engine.models.checkpoint.hub import (
        describe_weights,  # imports huggingface_hub, not needed for a folder
        has_weights,
    )

    if has_weights(config.path):
        return map_tensors(config.path)
    return describe_weights(config.hub_name, config.path, choose)
