"""The tensors of a checkpoint that pools, under the names that the model with its head has for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from compiled_engine.config import ModelConfig
from compiled_engine.models.checkpoint.safetensors_files import map_tensors
from compiled_engine.pooling import Dense

POOLER = "pooler."
_OUTPUT = "lm_head.weight"
_OTHER_HEADS = (_OUTPUT, "score.weight", "score.bias")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def pooling_tensors(
    tensors: Mapping[str, torch.Tensor], own: Collection[str], config: ModelConfig
) -> dict[str, torch.Tensor]:
    """Rename tensors of a decoder that is stored alone, leave out heads that are not run, and add those of the head.

    own: the model's names. Raises ValueError if tensors of the head are missing.
    """
    assert config.pooling is not None
    found = {name if name in own or f"model.{name}" not in own else f"model.{name}": t for name, t in tensors.items()}
    heads = [_of_head(dense, found, config) for dense in config.pooling.head]
    found = {name: tensor for name, tensor in found.items() if name not in _OTHER_HEADS}
    for number, head in enumerate(heads):
        found |= {f"{POOLER}linears.{number}.{name}": tensor for name, tensor in head.items()}
    return found


def _of_head(dense: Dense, tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Its weight and bias, by these names."""
    if dense.tokens:
        names = (*([] if config.tie_word_embeddings else [_OUTPUT]), *_embeddings(tensors))
        output_VD = next((tensors[name] for name in names if name in tensors), None)
        if output_VD is None:
            raise ValueError(f"{config.path} must hold {_OUTPUT}, whose rows judge; it is missing")
        return {"weight": output_VD[list(dense.tokens)]}
    folder = config.path / dense.source
    prefix, found = ("linear.", map_tensors(folder)) if folder.is_dir() else (f"{dense.source}.", tensors)
    names = ("weight", "bias") if dense.bias else ("weight",)
    if missing := [f"{prefix}{name}" for name in names if f"{prefix}{name}" not in found]:
        raise ValueError(f"{config.path} must hold the head of the model; missing: {', '.join(missing)}")
    return {name: found[f"{prefix}{name}"] for name in names}


def _embeddings(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name in tensors if name.endswith(_EMBEDDINGS)]
