"""Finds the placements of a checkpoint's tensors in a transformers model, or only the parameters that they belong to.

Both are read from cache files beside the model's description, or computed if there is no such file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from compiled_engine.config import ModelConfig, RowState, TransformersModel
from compiled_engine.models.foreign.description import IMPORTING, description_file, read_file, write_file
from compiled_engine.models.foreign.placement import WeightPlan
from compiled_engine.recurrence.states import channels

T = TypeVar("T")

# Sections of packed parameters, needed to divide them among ranks.

_LAYER = re.compile(r"\.(\d+)\.")


def mark_packed(model: nn.Module, config: ModelConfig) -> None:
    """Set the attributes `packed` and `outputs_last` on a transformers model's modules.

    From them, parallel/shards.py derives how parameters are divided among ranks. `packed` states the rows of each
    section of a packed parameter: q, k and v in qkv_proj; gate and up in gate_up_proj, in experts too; the parts of a
    recurrence's projection and convolution. Tests that compare log-probabilities verify that the model families split
    their parameters like this. `outputs_last` names expert parameters whose last dimension is that of the outputs, and
    `norms_row` the weight of a norm over all channels of a recurrence. Textbook modules set `packed` themselves.
    """
    states = () if config.recurrences is None else config.recurrences.states
    matrices = {state.name.rpartition(".")[0]: state for state in states if state.num_groups}
    for path, module in model.named_modules():
        packed: dict[str, Any] = {}
        owner, _, own_name = path.rpartition(".")
        if (matrix := matrices.get(owner)) is not None:
            is_space = hasattr(model.get_submodule(owner), "in_proj")  # of Mamba 2
            if own_name == "norm" and is_space and matrix.num_groups == 1:
                module.norms_row = ("weight",)  # type: ignore[assignment]
            elif (sections := _sections(own_name, matrix, is_space=is_space)) is not None:
                packed |= dict.fromkeys((name for name, _ in module.named_parameters(recurse=False)), sections)
        for name, parameter in module.named_parameters(recurse=False):
            if path.endswith(".qkv_proj"):
                layer = _LAYER.search(path)
                heads = config.heads_of(int(layer[1]) if layer else 0)
                rows = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads
                packed[name] = tuple(count * heads.head_dim for count in rows)
            elif name == "gate_up_proj" and _is_transposed(module):  # gate and up alternate
                biases = tuple(each for each in (f"{name}_bias",) if hasattr(module, each))
                module.outputs_last = (name, "down_proj", *biases)  # type: ignore[assignment]
            elif path.endswith((".gate_up_proj", ".shared_mlp.input_linear")) or name == "gate_up_proj":
                half = parameter.shape[1 if parameter.dim() == 3 else 0] // 2
                packed[name] = half, half
        if packed:
            module.packed = packed  # type: ignore[assignment]


def _sections(name: str, matrix: RowState, *, is_space: bool) -> tuple[int, ...] | None:
    """Return the rows of each section of a linear or a convolution before a recurrence; None if it has one section.

    name: of the module. matrix: the recurrence's state. is_space: it is that of Mamba 2, not that of a delta rule.
    """
    queries, keys, values = channels(matrix)
    if is_space:
        sections = {"in_proj": (values, values, keys, queries, matrix.shape[0]), "conv1d": (values, keys, queries)}
    else:
        sections = dict.fromkeys(("in_proj_qkv", "conv1d"), (queries, keys, values))
    return sections.get(name)


def _is_transposed(experts: nn.Module) -> bool:
    """Return whether gate_up_proj and down_proj are [E, H, 2 I] and [E, I, H], not [E, 2 I, H] and [E, H, I]."""
    (_, before, after), (_, inputs, outputs) = experts.gate_up_proj.shape, experts.down_proj.shape  # type: ignore[misc]
    return bool((before, after) == (outputs, 2 * inputs))


log = logging.getLogger("compiled_engine")


def find_weight_plan(
    model: TransformersModel, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], cache_dir: Path | None
) -> WeightPlan:
    """Return the placements of a checkpoint's tensors in a transformers model.

    shapes: name -> shape of each tensor of the checkpoint. cache_dir: folder of the cache file with the placements,
    which is written if it is missing or damaged; None: no file is read or written. Raises ValueError for an unsupported
    conversion, or one whose result has a wrong shape.
    """

    def make() -> WeightPlan:
        from compiled_engine.models.foreign.conversion import plan_of_encoder, plan_weights  # imports transformers
        from compiled_engine.models.foreign.encoder import Encoder
        from compiled_engine.models.foreign.transformers_model import build_foreign_model

        built = build_foreign_model(model.config, dtype)[0]
        return plan_of_encoder(built.model, shapes) if isinstance(built, Encoder) else plan_weights(built, shapes)

    path = _cache_file(model, dtype, cache_dir, json.dumps(sorted(shapes.items())), "weights")
    return _cached(path, WeightPlan.from_json, WeightPlan.to_json, make)


def find_parameters(
    model: TransformersModel, dtype: torch.dtype, names: Collection[str], cache_dir: Path | None
) -> dict[str, list[str]]:
    """Return the names of the model's parameters to which each tensor of a checkpoint contributes.

    names: the tensors'. cache_dir: see `find_weight_plan`.
    """

    def make() -> dict[str, list[str]]:
        from compiled_engine.models.foreign.conversion import parameters_of  # imports transformers
        from compiled_engine.models.foreign.encoder import Encoder
        from compiled_engine.models.foreign.transformers_model import build_foreign_model

        built = build_foreign_model(model.config, dtype)[0]
        inner, prefix = (built.model, "model.") if isinstance(built, Encoder) else (built, "")
        return {name: [f"{prefix}{each}" for each in found] for name, found in parameters_of(inner, names).items()}

    path = _cache_file(model, dtype, cache_dir, json.dumps(sorted(names)), "names")
    return _cached(path, json.loads, json.dumps, make)


def _cache_file(
    model: TransformersModel, dtype: torch.dtype, cache_dir: Path | None, facts: str, kind: str
) -> Path | None:
    """Return the path of a file of this kind beside the model's description. facts: what its content depends on."""
    beside = description_file(model.config, dtype, cache_dir)
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return None if beside is None else beside.with_suffix(f".{digest}.{kind}.json")


def _cached(path: Path | None, read: Callable[[str], T], write: Callable[[T], str], make: Callable[[], T]) -> T:
    """Return the content of a file, or what `make` returns, which is then written to the file.

    path: of the file, None for none. make: may import transformers.
    """
    if path is not None and path.is_file():
        try:
            return read(read_file(path))
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s is damaged and made anew: %s", path, error)
    with IMPORTING:
        made = make()
    write_file(path, write(made))
    return made
