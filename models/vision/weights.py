"""Finds the placements of a multimodal checkpoint's tensors in the vision tower.

Names are converted as in transformers when it loads the whole model, so the prefixes that different versions of
transformers write are all known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from compiled_engine.models.foreign.description import IMPORTING
from compiled_engine.models.foreign.placement import WeightPlan

Shape = tuple[int, ...]


def plan_of_tower(config_json: str, dtype: torch.dtype, shapes: Mapping[str, Shape]) -> WeightPlan:
    """Return the placements of a multimodal checkpoint's tensors in the vision tower.

    config_json: text of config.json. dtype: of the tower. shapes: name -> shape of each tensor of the checkpoint;
    tensors of the text model are ignored. Raises ValueError for an unsupported conversion, or one whose result has a
    wrong shape.
    """
    with IMPORTING:
        from compiled_engine.models.foreign.conversion import plan_weights  # imports transformers
        from compiled_engine.models.vision.tower import multimodal_model

        model = multimodal_model(config_json, dtype)
        return plan_weights(model, {name: shapes[name] for name in _of_tower(model, shapes)})


def tower_names(config_json: str, dtype: torch.dtype, names: Iterable[str]) -> list[str]:
    """Return the names of those tensors of a multimodal checkpoint that belong to the vision tower.

    config_json: text of config.json. names: of all tensors of the checkpoint.
    """
    with IMPORTING:
        from compiled_engine.models.vision.tower import multimodal_model  # imports transformers

        return _of_tower(multimodal_model(config_json, dtype), names)


def _of_tower(model: Any, names: Iterable[str]) -> list[str]:
    from compiled_engine.models.foreign.compat import Conversions  # imports transformers

    conversions = Conversions(model, [name for name, _ in model.named_parameters()])
    parts = {name.split(".")[0] for name, _ in model.model.named_parameters()}
    return [name for name in names if conversions.target(name)[0].removeprefix("model.").split(".")[0] in parts]
