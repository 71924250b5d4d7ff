"""Puts a checkpoint's tensors into a materialised model: everything is checked before anything is copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from compiled_engine.config import ModelConfig
from compiled_engine.models.checkpoint.foreign_tensors import Pair, match_foreign
from compiled_engine.models.checkpoint.mxfp4 import Mxfp4Tensor
from compiled_engine.models.checkpoint.random_weights import fill_with_random_weights
from compiled_engine.models.checkpoint.safetensors_files import STORED_DTYPES, map_tensors, name_some
from compiled_engine.models.checkpoint.staged_copy import copy_to_device
from compiled_engine.models.textbook.experts import Experts
from compiled_engine.parallel.shards import WHOLE, RankShare
from compiled_engine.process.progress import Progress

RECOMPUTED = "rotary_emb.inv_freq"  # a buffer that old checkpoints hold; the model computes its own


def load_weights(
    model: nn.Module,
    config: ModelConfig,
    progress: Progress,
    share: RankShare = WHOLE,
    cache_dir: Path | None = None,
) -> None:
    """Write each tensor of the checkpoint once into its parameter, converted to the parameter's dtype.

    share: the slices of the tensors that the model's parameters are; nothing else of the files is read, nor what
    belongs to parameters that are still on the meta device. config: of the undivided model. What is missing of a
    checkpoint from the hub is downloaded first. The model has been through `parameters.materialize`. config.load_format
    dummy: random weights instead. cache_dir: where is kept what was found out about checkpoints of transformers'
    models.
    Raises ValueError, and has copied nothing, if files are missing or damaged, or tensors are missing,
    unexpected, of another shape, of a dtype that is not in STORED_DTYPES, or tied and yet different; OSError
    if a download fails.
    """
    if config.load_format == "dummy":
        with progress.stage("random weights"):
            fill_with_random_weights(model, config.seed, share)
        return
    if config.hub_name is not None:
        from compiled_engine.models.checkpoint.hub import (
            download_weights,  # imports huggingface_hub, which a folder does without
        )

        download_weights(config.hub_name, config.path, progress)
    tensors = map_tensors(config.path)
    pairs: Sequence[Pair]
    if config.transformers is None:
        pairs = _match(tensors, model, config, share)
    else:
        pairs = match_foreign(tensors, model, config, share, cache_dir)
    device = pairs[0][1].device
    with progress.stage("load weights", len(pairs)) as advance:
        plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        for source, target in pairs:
            if isinstance(source, Mxfp4Tensor):
                source.decode_into(target)
            elif device.type == "cuda" and source.is_contiguous() and target.is_contiguous():
                plain.append((source, target))
                continue
            else:
                # The device is the faster one to exchange dimensions.
                target.copy_(source.to(device) if source.is_contiguous() else source)
            advance(1)
        if plain:
            copy_to_device(plain, device, advance)


def checkpoint_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint has of a model, by name: its parameters, or views of them where a module says that it holds
    them in parts. A tied parameter is there under each of its names."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for name, _ in module.named_parameters():
                del tensors[f"{path}.{name}"]
            tensors |= {f"{path}.{name}": view for name, view in module.checkpoint_tensors()}
    return tensors


def _match(
    tensors: dict[str, torch.Tensor], model: nn.Module, config: ModelConfig, share: RankShare
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter with the slice of a tensor that belongs in it, in file order."""
    parameters = checkpoint_tensors(model)
    known = {name: tensor for name, tensor in tensors.items() if name in parameters}
    found = {id(parameters[name]) for name in known}
    whole = {name: share.whole_shape(name, parameters[name]) for name in known}
    problems = {
        "missing": [name for name, target in parameters.items() if id(target) not in found],
        "unexpected": [name for name in tensors if name not in known and not name.endswith(RECOMPUTED)],
        "of another shape": [
            f"{name} ({list(tensor.shape)} instead of {list(whole[name])})"
            for name, tensor in known.items()
            if tuple(tensor.shape) != whole[name]
        ],
        "of a dtype that is not supported": [
            f"{name} ({tensor.dtype})" for name, tensor in known.items() if tensor.dtype not in STORED_DTYPES
        ],
    }
    lines = [f"{len(names)} {kind}: {name_some(names)}" for kind, names in problems.items() if names]
    if lines:
        raise ValueError(f"the tensors in {config.path} do not fit {config.architecture}: {'; '.join(lines)}")

    sources: dict[int, str] = {}
    for name, tensor in known.items():
        twin = sources.setdefault(id(parameters[name]), name)
        if (
            twin != name
            and not parameters[name].is_meta
            and not torch.equal(share.of(twin, known[twin]), share.of(name, tensor))
        ):
            raise ValueError(f"{config.path}: tie_word_embeddings is true, but {twin} and {name} differ")
    wanted = [name for name in sources.values() if not parameters[name].is_meta]
    return [pair for name in wanted for pair in share.pairs(name, known[name], parameters[name])]
