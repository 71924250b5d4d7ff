"""Factors of what a start does with a compiled model: the kernels that it needs besides, and the memory of its graphs.

They hold for one configuration on one device with one driver. Everything that they may depend on is among them.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from compiled_engine.config import EngineConfig, flat_fields
from compiled_engine.graphs.cache.environment import digests_of_files, source_files, versions
from compiled_engine.passes.framework.profile import PROFILES

# Packages besides those in the entry's key whose code is captured, captures, or launches kernels.
START_PACKAGES = ("attention.backends", "graphs.cuda_graphs", "runner", "sampling", "kernels")
# Fields that say where something is, or why: not what is captured.
_WHERE = ("model.path", "model.hub_name", "model.revision", "compile.cache_dir")
OF_NO_EFFECT = (*_WHERE, *(f"speculation.draft.{name}" for name in _WHERE), "tokenizer", "reasons")
# Environment variables of these families configure CUDA and torch's allocator.
VARIABLES = ("CUDA_", "CUBLAS", "PYTORCH_", "TORCH_", "TRITON_", "NVIDIA_")
OTHER_VARIABLES = ("TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER")
MAPPED_FILES = Path("/proc/self/maps")


def start_factors(config: EngineConfig, stage: int = 0) -> dict[str, Any]:
    """All factors of a start but the entry of the compile cache, as JSON. stage: of a pipeline."""
    device = _describe(config.device)  # torch sets a variable when it begins to use a GPU
    names = sorted(name for name in os.environ if name.startswith(VARIABLES) and name not in OTHER_VARIABLES)
    return {
        "stage": stage,
        "config": {name: value for name, value in flat_fields(config).items() if name not in OF_NO_EFFECT},
        "source": _source_digests(),
        "versions": versions(),
        "device": device,
        "variables": {name: os.environ[name] for name in names},
    }


@cache
def _source_digests() -> dict[str, str]:
    """Of code, and of the devices' profiles, which have the tiles of kernels."""
    profiles = {f"profiles/{path.name}": path for path in sorted(PROFILES.glob("*.json"))}
    return digests_of_files(source_files(START_PACKAGES) | profiles)


def _describe(device: torch.device) -> dict[str, Any]:
    """The device and its driver: the file of its library, whose name ends in the version."""
    if device.type != "cuda":
        return {"type": device.type}
    properties = str(torch.cuda.get_device_properties(device))  # which loads the library
    driver = sorted(set(re.findall(r"/libcuda\.so\S*", MAPPED_FILES.read_text())))
    return {"type": "cuda", "properties": properties, "driver": driver}
