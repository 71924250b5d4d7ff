"""Families of models on several ranks and stages: log-probabilities beside those of transformers, layout by layout."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_engine.bench.families import Family, write_checkpoint
from compiled_engine.bench.family_comparison import difference_of
from compiled_engine.bench.machine import provenance

_TENSOR, _STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
_COMPILED: dict[str, Any] = {"mode": "compiled", "strict_passes": True, "compile_workers": 0}
# Stages are parts of a compiled plan, and the last one is a pass: without the compiler there is TP alone.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "TP 2, eager": {**_TENSOR, "mode": "eager"},
    "TP 2, compiled": {**_TENSOR, **_COMPILED},
    "PP 2, compiled": {**_STAGES, **_COMPILED},
    "TP 2 x PP 2, compiled": {**_TENSOR, **_STAGES, **_COMPILED},
    "TP 2, sequence parallel": {**_TENSOR, **_COMPILED, "sequence_parallel": True},
}


def compare_layouts(
    cases: Sequence[Family], layouts: Sequence[str], options: Mapping[str, Any], done: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """As JSON: results, a list of family, implementation and, for each layout, largest, mean and right, or refused.

    options: further ones of `LLM`. `done` is given the result so far after each family.
    """
    found: dict[str, Any] = {"benchmark": "layouts", "layouts": list(layouts), "results": []}
    found |= provenance(torch.device("cpu"))
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            oracle = write_checkpoint(Path(folder), case.to_divide())
            row: dict[str, Any] = {"family": case.name, "implementation": options["model_impl"]}
            for name in layouts:
                row[name] = _compared(Path(folder), oracle, {**options, **LAYOUTS[name]})
        found["results"].append(row)
        done(found)
    return found


def _compared(folder: Path, oracle: Any, options: dict[str, Any]) -> dict[str, Any]:
    try:
        difference = difference_of(folder, oracle, {"device": "cpu"} | options)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"largest": difference.largest, "mean": difference.mean, "right": difference.is_right(torch.float32)}
