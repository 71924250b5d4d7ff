"""Finds the placements of a multimodal checkpoint's tensors in its vision tower.

The names are converted as transformers does when it loads the whole model, so all prefixes that its versions have
written are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from compiled_engine.models.foreign.description import IMPORTING
from compiled_engine.models.foreign.placement import WeightPlan

Shape = tuple[int, ...]


def plan_of_tower(config_json: str, dtype: torch.dtype, shapes: Mapping[str, Shape]) -> WeightPlan:
    """Return the placements of the tower's tensors among a checkpoint's (name -> shape).

    Tensors of the text model are left out. Raises ValueError for an unsupported conversion, or one whose result has a
    wrong shape.
    """
    with IMPORTING:
        from compiled_engine.models.foreign.conversion import plan_weights  # imports transformers
        from compiled_engine.models.vision.tower import multimodal_model

        model = multimodal_model(config_json, dtype)
        return plan_weights(model, {name: shapes[name] for name in _of_tower(model, shapes)})


def tower_names(config_json: str, dtype: torch.dtype, names: Iterable[str]) -> list[str]:
    """Return those names of a checkpoint's tensors that belong to the tower."""
    with IMPORTING:
        from compiled_engine.models.vision.tower import multimodal_model  # imports transformers

        return _of_tower(multimodal_model(config_json, dtype), names)


def _of_tower(model: Any, names: Iterable[str]) -> list[str]:
    from compiled_engine.models.foreign.compat import Conversions  # imports transformers

    conversions = Conversions(model, [name for name, _ in model.named_parameters()])
    parts = {name.split(".")[0] for name, _ in model.model.named_parameters()}
    return [name for name in names if conversions.target(name)[0].removeprefix("model.").split(".")[0] in parts]
