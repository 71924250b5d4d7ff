"""Placements of a checkpoint's tensors in a model of transformers, from a file beside its description or computed."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from compiled_engine.config import TransformersModel
from compiled_engine.models.foreign.description import description_file, read_file, write_file
from compiled_engine.models.foreign.placement import WeightPlan

log = logging.getLogger("compiled_engine")


def find_weight_plan(
    model: TransformersModel, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], cache_dir: Path | None
) -> WeightPlan:
    """Placements of the checkpoint's tensors (name -> shape).

    Raises ValueError for an unsupported conversion, or one with another shape than the model's.
    """
    beside = description_file(model.config, dtype, cache_dir)
    digest = hashlib.sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest()[:16]
    path = None if beside is None else beside.with_suffix(f".{digest}.weights.json")
    if path is not None and path.is_file():
        try:
            return WeightPlan.from_json(read_file(path))
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s is damaged and made anew: %s", path, error)
    from compiled_engine.models.foreign.conversion import plan_weights  # imports transformers
    from compiled_engine.models.foreign.transformers_model import build_foreign_model

    plan = plan_weights(build_foreign_model(model.config, dtype)[0], shapes)
    write_file(path, plan.to_json())
    return plan
