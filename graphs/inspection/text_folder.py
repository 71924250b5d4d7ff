"""Writes the inspector's report as a folder of text files, to compare models, versions or machines.

Values that differ from run to run (seconds) or from machine to machine (paths) are in files of their own.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import depyf
from torch import nn

from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.graphs.compiled_model import compile_model
from compiled_engine.graphs.inspection.report import Report
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline


def write_text_folder(report: Report, folder: Path) -> None:
    """Write the report's files to `folder`. The folder may exist; other files in it stay."""
    data = report.data
    summaries = {
        "config.json": json.dumps(data["config"], indent=1, sort_keys=True),
        "cache.json": json.dumps(data["cache"], indent=1, sort_keys=True),
        "times.json": json.dumps(data["phases"], indent=1),
        "guards.json": json.dumps(data["guards"], indent=1),
        "passes.txt": "\n".join(_passes(data["passes"])),
        "pieces.txt": "\n".join(_pieces(data["pieces"])),
        "kernels_per_step.txt": "\n".join(_kernels(data["kernels_per_step"])),
        "modules.txt": "\n".join(_modules(data["modules"])) if data["modules"] else "",
    }
    for name, text in (summaries | report.texts).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def _passes(passes: Iterable[dict[str, Any]]) -> list[str]:
    lines = []
    for one in passes:
        state = f"{one['matches']} of {one['contract']}" if one["applied"] else one["reason"]
        lines.append(f"{one['range']:>12} {one['name']}: {state}")
        lines += [f"{'':>12}   did not match: {reason}" for reason in one["near_misses"]]
        lines += [f"{'':>12}   {note}" for note in one["notes"]]
    return lines


def _pieces(pieces: Iterable[dict[str, Any]]) -> list[str]:
    lines = []
    for piece in pieces:
        uses = ", ".join(f"{count} times in {name}" for name, count in piece["uses"].items())
        lines.append(f"{piece['name']}: {uses}")
        lines += [f"  {kernel['launches']} x {kernel['kind']} {kernel['name']}" for kernel in piece["kernels"]]
    return lines


def _kernels(per_step: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for name, counts in per_step.items():
        lines.append(f"{name}: {counts['total']}")
        lines += [f"  {kernel['launches']} x {kernel['kind']} {kernel['name']}" for kernel in counts["kernels"]]
    return lines


def _modules(module: dict[str, Any], depth: int = 0) -> list[str]:
    count = f" x {module['count']}" if module["count"] > 1 else ""
    shapes = [f"{p['name']} {p['dtype']}{p['shape']}" for p in module["parameters"]]
    lines = ["  " * depth + " ".join([f"{module['path'] or 'model'}: {module['kind']}{count}", *shapes])]
    for child in module["children"]:
        lines += _modules(child, depth + 1)
    return lines


def write_depyf_folder(
    config: EngineConfig, make_model: Callable[[ModelConfig], nn.Module], folder: Path, progress: Progress
) -> None:
    """Compile the model once more under depyf, which writes decompiled code, guards and graphs to `folder`.

    The model is compiled in this process, without worker processes and without the compile cache. Errors of
    `compile_model` are passed on.
    """
    here = replace(config, compile=replace(config.compile, cache_dir=None, workers=0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*You are trying to debug `torch.compile`", category=UserWarning)
        with depyf.prepare_debug(str(folder)):
            compile_model(here, make_model, progress, Timeline())
