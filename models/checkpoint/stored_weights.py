"""Finds how a checkpoint of a transformers model stores the parameters that it has under other names than the model.

Rules of quantisation name modules as the checkpoint does. Transformers' conversions rename many of its tensors, and
stack those of experts, so the rules cannot be matched against the model's names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from compiled_engine.config import ModelConfig
from compiled_engine.models.checkpoint.packed_weights import NAMES
from compiled_engine.models.checkpoint.pooling_folder import own_name
from compiled_engine.models.checkpoint.safetensors_files import STORED_DTYPES
from compiled_engine.models.foreign.find_description import find_description
from compiled_engine.models.foreign.weights import find_parameters
from compiled_engine.passes.linear.experts_codes import projections_of
from compiled_engine.quantisation import LinearScheme, Quantisation, StoredWeight

_WEIGHT = ".weight"
# Last parts of the names of tensors that hold a weight's codes.
_CODES = ("weight", *dict.fromkeys(names.words for names in NAMES.values()))


def find_stored_weights(
    model: ModelConfig, rules: Quantisation, tensors: Mapping[str, torch.Tensor], cache_dir: Path | None
) -> tuple[StoredWeight, ...]:
    """Return how a checkpoint stores the parameters of a transformers model that it names or divides otherwise.

    Experts are among them whatever their names. rules: the checkpoint's. tensors: the checkpoint's; only their names
    and dtypes are read. cache_dir: see `find_description`.
    """
    assert model.transformers is not None
    described = find_description(model.transformers.config, model.dtype, cache_dir).parameters
    matrices = {each.name for each in described if len(each.shape) == 2 and each.name.endswith(_WEIGHT)}
    experts = {each.name for each in described if len(each.shape) == 3 and projections_of(each.name)}
    if model.pooling is not None and model.causal:
        own = {each.name for each in described}
        tensors = {own_name(name, own): tensor for name, tensor in tensors.items()}
    dtypes = _dtypes(tensors)
    parts: dict[str, list[str]] = defaultdict(list)
    for name, parameters in find_parameters(model.transformers, model.dtype, dtypes, cache_dir).items():
        for parameter in parameters:
            parts[parameter].append(name)
    renamed = [name for name in matrices & parts.keys() if parts[name] != [name]]
    found = {name: _of_parts(parts[name], dtypes, rules) for name in (*renamed, *experts)}
    return tuple(
        StoredWeight(name, "", scheme) if isinstance(scheme, str) else StoredWeight(name, str(scheme), "")
        for name, scheme in sorted(found.items())
    )


def _dtypes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype | None]:
    """Return the dtypes of the checkpoint's weights, by name; None for codes.

    Packed codes have the name of their weight. Tensors stored beside a weight, such as scales, are left out.
    """
    found: dict[str, torch.dtype | None] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind in _CODES:
            found[f"{module}{_WEIGHT}"] = tensor.dtype if tensor.dtype in STORED_DTYPES else None
        elif not any(f"{module}.{each}" in tensors for each in _CODES):
            found[name] = tensor.dtype
    return found


def _of_parts(
    parts: Sequence[str], dtypes: Mapping[str, torch.dtype | None], rules: Quantisation
) -> LinearScheme | str:
    """Return the scheme of a parameter, or why it is not quantised. parts: the tensors that it consists of.

    The dtypes decide, since some checkpoints do not list the modules that stay in 16 bits, such as routers and the
    head, or list them by the model's names.
    """
    plain = next((part for part in parts if dtypes[part] is not None), None)
    if plain is not None:
        return f"the checkpoint holds {plain} in {str(dtypes[plain]).removeprefix('torch.')}"
    return rules.of_modules([_module(part) for part in parts]) if parts else "the checkpoint holds nothing for it"


def _module(weight: str) -> str:
    return weight.removesuffix(_WEIGHT)
