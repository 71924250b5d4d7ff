"""On what a measurement was made: device, processor, versions, model. Plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from compiled_engine.bench.host import host_record, installed_versions, today
from compiled_engine.config import EngineConfig

PACKAGES = ("compiled-engine", "torch", "triton", "transformers", "flash-attn")


def machine_record(device: torch.device) -> dict[str, Any]:
    """The device's name and memory in bytes, the processor, its usable cores and threads, the host's memory."""
    record: dict[str, Any] = {"device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        record |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return record | host_record() | {"threads": torch.get_num_threads()}


def versions_record() -> dict[str, str]:
    """Versions of Python, CUDA and the packages that matter, of those that are installed."""
    versions = installed_versions(PACKAGES)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def provenance(device: torch.device) -> dict[str, Any]:
    """What every result of a benchmark states of its origin: date (of today, ISO), machine, versions."""
    return {"date": today(), "machine": machine_record(device), "versions": versions_record()}


def model_record(config: EngineConfig, shape: str | None) -> dict[str, Any]:
    """The model's name (the shape's, the hub's or the folder's), architecture, data type and limits."""
    model = config.model
    return {
        "name": shape or model.hub_name or model.path.name,
        "architecture": model.architecture,
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": model.num_layers,
        "max_model_len": model.max_model_len,
        "load_format": model.load_format,
        "attention_backend": config.attention_backend,
    }


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Engine options as JSON has them: paths become text, tuples lists."""
    plain: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Path):
            plain[name] = str(value)
        else:
            plain[name] = list(value) if isinstance(value, tuple) else value
    return plain


def conditions(config: EngineConfig, options: Mapping[str, Any], shape: str | None) -> dict[str, Any]:
    """What the result of an engine's benchmark states: its provenance, the model, and options: those that were
    given."""
    given = {name: value for name, value in plain_options(options).items() if shape is None or name != "model"}
    return {
        **provenance(config.device),
        "model": model_record(config, shape),
        "options": given | ({"shape": shape} if shape else {}),
    }
