"""Match a checkpoint's tensors to the tensors of a textbook or transformers model, and check all of them.

The result is a list of placements for each tensor of the model. A placement says which part of a checkpoint's tensor
becomes which part of the model's tensor (models/foreign/placement.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from compiled_engine.config import ModelConfig, TransformersModel
from compiled_engine.models.checkpoint.file_names import name_some
from compiled_engine.models.checkpoint.mxfp4 import BYTES
from compiled_engine.models.checkpoint.pooling_folder import POOLER
from compiled_engine.models.checkpoint.quantised_tensors import KV_SCALES, Stored, encoded, find_stored
from compiled_engine.models.checkpoint.safetensors_files import STORED_DTYPES
from compiled_engine.models.foreign.placement import Placement, Span, whole
from compiled_engine.models.foreign.weights import find_weight_plan
from compiled_engine.models.textbook.experts import Experts
from compiled_engine.models.textbook.mtp import PROJECTION
from compiled_engine.models.vision.weights import plan_of_tower

RECOMPUTED = "rotary_emb.inv_freq"  # a buffer that old checkpoints hold; the model computes its own
Shape = tuple[int, ...]
Problems = dict[str, list[str]]
# The kinds of problems, in the order in which an error lists them.
KINDS = (
    *("missing", "unexpected", "of another shape", "of a dtype that is not supported"),
    *("of a value that is not allowed", "quantised against the rules"),
)


@dataclass(frozen=True)
class Matched:
    """The placements (see Placement) of a checkpoint's tensors in the model, by the name of the model's tensor.

    A tied tensor has several names; the first one is used here. read: the placements to read.
    """

    read: Mapping[str, Sequence[Placement]]
    # placements of further copies, if a checkpoint stores a tied tensor several times
    twins: Mapping[str, Sequence[Placement]]
    stored: Mapping[str, Stored]  # scales of quantised tensors, by the name of the quantised tensor


def match_tensors(
    tensors: Mapping[str, torch.Tensor], model: nn.Module, config: ModelConfig, cache_dir: Path | None
) -> Matched:
    """Match the checkpoint's tensors to the model's by name. Returns their placements, see Placement.

    model: the undivided model, which may be on the meta device. cache_dir: see `find_weight_plan`; only used for
    transformers' models. Raises ValueError if tensors are missing or unexpected, have a wrong shape, dtype or value, or
    are quantised against the rules.
    """
    stored, wrong = find_stored(tensors, config.quantisation)
    beside = {name for each in stored.values() for name in each.beside}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in beside}
    if config.quantisation is not None:
        shapes = {name: shape for name, shape in shapes.items() if not KV_SCALES.match(name)}
    own: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    if config.transformers is None:
        placements, problems = _of_textbook(model, own, shapes)
    else:
        kept = model.state_dict().keys()
        own |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
        placements, problems = _of_transformers(config, config.transformers, own, shapes, cache_dir)
    extra = problems.get("unexpected", [])
    problems["unexpected"] = [name for name in extra if not _is_zero_bias(name, tensors, stored)]
    placements = [encoded(placement, stored) for placement in placements]
    read, twins = _tied_apart(placements, own)
    if config.transformers is not None:
        problems = _misfits(read, own, shapes) | problems
    used = {name: p.in_blocks for p in placements if p.source not in stored for name in p.sources}
    # Scales that are multiplied by another one were checked when they were read.
    in_floats = [each for each in stored.values() if each.whole is None]
    floats = {name for each in in_floats for name in (each.scales, each.input_scale) if name is not None}
    used |= {name: False for name in floats if name in tensors}
    problems["of a dtype that is not supported"] = [
        f"{name} ({tensors[name].dtype})"
        for name, in_bytes in used.items()
        if tensors[name].dtype not in ((torch.uint8,) if in_bytes else STORED_DTYPES)
    ]
    found = {kind: names for kind in KINDS if (names := [*problems.get(kind, ()), *wrong.get(kind, ())])}
    if found:
        lines = (f"{len(names)} {kind}: {name_some(names)}" for kind, names in found.items())
        raise ValueError(f"the tensors in {config.path} do not fit {config.architecture}: {'; '.join(lines)}")
    return Matched(read, twins, stored)


def _is_zero_bias(name: str, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Stored]) -> bool:
    """Return whether a tensor is an all-zero bias of a quantised linear.

    Writers of GPTQ checkpoints store such biases for linears without a bias.
    """
    module, _, kind = name.rpartition(".")
    return kind == "bias" and f"{module}.weight" in stored and not tensors[name].any()


def _of_transformers(
    config: ModelConfig,
    model: TransformersModel,
    own: Mapping[str, torch.Tensor],
    shapes: Mapping[str, Shape],
    cache_dir: Path | None,
) -> tuple[list[Placement], Problems]:
    """Match the checkpoint's tensors to the model's as transformers does. Returns the placements, and the problems.

    Tensors of a pooler, and of the projection of an MTP layer, are matched by name. own: the model's tensors by name.
    shapes: of the checkpoint's tensors. Raises ValueError if transformers' conversions do not fit the model.
    """
    added = [name for name in shapes if name.startswith((f"{POOLER}.", f"{PROJECTION}.")) and name in own]
    stated = {name: shape for name, shape in shapes.items() if name not in added}
    try:
        if config.vision is not None:
            plan = plan_of_tower(model.config, config.dtype, stated)
        else:
            plan = find_weight_plan(model, config.dtype, stated, cache_dir)
    except ValueError as error:
        raise ValueError(f"the tensors in {config.path} do not fit {config.architecture}: {error}") from error
    placements = list(plan.placements)
    if config.pooling is not None:  # a pooling model has no output projection
        placements = [placement for placement in placements if placement.target in own]
    placements += [whole(name, name, shapes[name]) for name in added]
    return placements, {"unexpected": list(plan.unexpected)}


def _of_textbook(
    model: nn.Module, own: Mapping[str, torch.Tensor], shapes: Mapping[str, Shape]
) -> tuple[list[Placement], Problems]:
    """Match the checkpoint's tensors to the model's by name. Returns the placements, and the problems.

    An Experts module declares the names of its tensors. own: the model's parameters by name. shapes: shapes of the
    checkpoint's tensors.
    """
    expected = {name: (name, tuple((0, size) for size in tensor.shape)) for name, tensor in own.items()}
    of_file = {name: tuple(tensor.shape) for name, tensor in own.items()}
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for name, _ in module.named_parameters():
                del expected[f"{path}.{name}"]
            for name, parameter, placed in module.checkpoint_tensors():
                expected[f"{path}.{name}"] = f"{path}.{parameter}", placed
                of_file[f"{path}.{name}"] = tuple(end - start for start, end in placed[1:])
    known = [name for name in shapes if name in expected]
    placements = [Placement(name, _all_of(shapes[name]), *expected[name]) for name in known]
    places = {name: (id(own[target]), placed) for name, (target, placed) in expected.items()}
    found = {places[name] for name in known}
    return placements, {
        "missing": [name for name, place in places.items() if place not in found],
        "unexpected": [name for name in shapes if name not in expected and not name.endswith(RECOMPUTED)],
        "of another shape": [
            f"{name} ({list(shapes[name])} instead of {list(of_file[name])})"
            for name in known
            if shapes[name] != of_file[name]
        ],
    }


def _tied_apart(
    placements: Sequence[Placement], own: Mapping[str, torch.Tensor]
) -> tuple[dict[str, list[Placement]], dict[str, list[Placement]]]:
    """Divide placements into those to read, and those of further copies of tied tensors. Returns (read, twins).

    Both are dicts by the name of the model's tensor; a tied tensor is listed under the first of its names. own: the
    model's tensors by name.
    """
    first: dict[int, str] = {}
    owners = {name: first.setdefault(id(tensor), name) for name, tensor in own.items()}
    chosen: dict[str, str] = {}
    read: dict[str, list[Placement]] = defaultdict(list)
    twins: dict[str, list[Placement]] = defaultdict(list)
    for placement in placements:
        owner = owners[placement.target]
        is_read = chosen.setdefault(owner, placement.target) == placement.target
        (read if is_read else twins)[owner].append(placement)
    return dict(read), dict(twins)


def _misfits(
    read: Mapping[str, Sequence[Placement]], own: Mapping[str, torch.Tensor], shapes: Mapping[str, Shape]
) -> Problems:
    """Return two kinds of problems: tensors of the model that `read` does not fill, and placements that do not fit.

    The kinds are "missing" and "of another shape". read: placements by the name of the model's tensor. own: the tensors
    of a transformers model by name. shapes: shapes of the checkpoint's tensors.
    """
    owners: dict[int, str] = {}
    for name, tensor in own.items():
        owners.setdefault(id(tensor), name)
    parts = {name: read.get(name, ()) for name in owners.values()}
    covered = {name: sum(_elements(p.placed) for p in several) for name, several in parts.items()}
    return {
        "missing": [
            name
            for name, count in covered.items()
            if count < math.prod(own[name].shape) and not any(p.in_blocks for p in parts[name])
        ],
        "of another shape": [
            f"{p.source} ({list(shapes[p.source])} instead of {list(own[p.target].shape)})"
            for several in read.values()
            for p in several
            if not _fits(p, tuple(own[p.target].shape), shapes)
        ],
    }


def _fits(placement: Placement, shape: Shape, shapes: Mapping[str, Shape]) -> bool:
    if placement.in_blocks:  # read as a whole
        blocks, scales = (shapes[name] for name in placement.sources)
        return placement.placed == _all_of(shape) and blocks == (*scales, BYTES)
    inside = all(end <= size for (_, end), size in zip(placement.placed, shape, strict=False))
    return len(shape) == len(placement.placed) and inside


def _all_of(shape: Shape) -> tuple[Span, ...]:
    return tuple((0, size) for size in shape)


def _elements(spans: tuple[Span, ...]) -> int:
    return math.prod(end - start for start, end in spans)
