"""The tensors of a checkpoint beside the parts of parameters that they belong in, for models of transformers."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from compiled_engine.config import ModelConfig
from compiled_engine.models.checkpoint.mxfp4 import BYTES, Mxfp4Tensor
from compiled_engine.models.checkpoint.safetensors_files import STORED_DTYPES, name_some
from compiled_engine.models.foreign.placement import Placement
from compiled_engine.models.foreign.weights import find_weight_plan
from compiled_engine.parallel.shards import RankShare

Pair = tuple[torch.Tensor | Mxfp4Tensor, torch.Tensor]


def match_foreign(
    tensors: dict[str, torch.Tensor], model: nn.Module, config: ModelConfig, share: RankShare, cache_dir: Path | None
) -> list[Pair]:
    """Each part of a parameter with the tensor, or part of one, that belongs in it, in file order.

    share: the slices of the tensors that the parameters are. config: of the undivided model.

    Raises ValueError if tensors are missing, unexpected, of another shape or of a dtype that is not supported, or if
    the checkpoint holds tied parameters with different values.
    """
    assert config.transformers is not None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    try:
        plan = find_weight_plan(config.transformers, config.dtype, shapes, cache_dir)
    except ValueError as error:
        raise ValueError(f"the tensors in {config.path} do not fit {config.architecture}: {error}") from error
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    parameters |= {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    first: dict[int, str] = {}
    owners = {name: first.setdefault(id(tensor), name) for name, tensor in parameters.items()}
    # Of tied parameters that a checkpoint holds several times one is read.
    chosen: dict[str, str] = {}
    for placement in plan.placements:
        chosen.setdefault(owners[placement.target], placement.target)
    placements = [p for p in plan.placements if chosen[owners[p.target]] == p.target]
    covered = Counter(dict.fromkeys(first.values(), 0))
    for placement in placements:
        covered[owners[placement.target]] += _elements(placement.placed)
    whole = {name: share.whole_shape(name, tensor) for name, tensor in parameters.items()}
    misfits = [p for p in placements if not _fits(p, whole, tensors)]
    packed = {name for p in placements if p.scales for name in (p.source, p.scales)}
    problems = {
        "missing": [name for name, count in covered.items() if count < math.prod(whole[name])],
        "unexpected": list(plan.unexpected),
        "of another shape": [
            f"{p.source} ({list(shapes[p.source])} instead of {list(whole[p.target])})" for p in misfits
        ],
        "of a dtype that is not supported": [
            f"{name} ({tensors[name].dtype})"
            for name in sorted({name for p in placements for name in (p.source, p.scales) if name})
            if tensors[name].dtype not in ((torch.uint8,) if name in packed else STORED_DTYPES)
        ],
    }
    lines = [f"{len(names)} {kind}: {name_some(names)}" for kind, names in problems.items() if names]
    if lines:
        raise ValueError(f"the tensors in {config.path} do not fit {config.architecture}: {'; '.join(lines)}")
    twins = [p for p in plan.placements if chosen[owners[p.target]] != p.target]
    _require_equal(twins, placements, owners, tensors, config)
    order = {name: place for place, name in enumerate(tensors)}
    ordered = sorted(placements, key=lambda p: order[p.source])
    return [pair for p in ordered for pair in _pairs(p, tensors, parameters, share)]


def _require_equal(
    twins: list[Placement],
    read: list[Placement],
    owners: dict[str, str],
    tensors: dict[str, torch.Tensor],
    config: ModelConfig,
) -> None:
    """Of tied parameters that the checkpoint holds several times the others are not read: they must be the same."""
    places = {(owners[p.target], p.placed): p.source for p in read}
    for twin in twins:
        source = places.get((owners[twin.target], twin.placed), twin.source)
        if source != twin.source and not torch.equal(tensors[source], tensors[twin.source]):
            raise ValueError(f"{config.path}: tie_word_embeddings is true, but {source} and {twin.source} differ")


def _pairs(
    placement: Placement, tensors: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor], share: RankShare
) -> list[Pair]:
    """Of packed values, which are not divided, the one pair; else a rank's parts."""
    if placement.scales:
        packed = Mxfp4Tensor(tensors[placement.source], tensors[placement.scales])
        return [(packed, parameters[placement.target].mT)]
    shard = share.shards.get(placement.target)
    if shard is None or (shard.dim is None and not (shard.first_only and share.rank)):
        return [placement.pair(tensors, parameters)]
    if shard.dim is None:
        source, target = placement.pair(tensors, parameters)
        return [(torch.zeros_like(source), target)]
    places = shard.places(share.rank, share.num_ranks)
    return [part.pair(tensors, parameters) for part in placement.cut(shard.dim, places)]


def _fits(placement: Placement, whole: dict[str, tuple[int, ...]], tensors: dict[str, torch.Tensor]) -> bool:
    shape = whole[placement.target]
    if placement.scales:
        blocks = tensors[placement.source].shape
        if len(blocks) != 4 or blocks[3] != BYTES or blocks[:3] != tensors[placement.scales].shape:
            return False
    inside = all(end <= size for (_, end), size in zip(placement.placed, shape, strict=False))
    return len(shape) == len(placement.placed) and inside


def _elements(spans: tuple[tuple[int, int], ...]) -> int:
    count = 1
    for start, end in spans:
        count *= end - start
    return count
