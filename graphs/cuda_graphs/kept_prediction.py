"""The predicted memory of the graphs, kept beside the entry of the compile cache that they are captured from.

A prediction holds for one configuration on one device with one driver. Everything that it may depend on is a factor;
a file counts only if all its factors are those of this process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from compiled_engine.config import EngineConfig, flat_fields
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.environment import digests_of
from compiled_engine.graphs.cache.lookup import Lookup

# Packages besides those in the entry's key whose code is captured or captures.
CAPTURED_ROOMS = ("attention.backends", "graphs.cuda_graphs", "runner", "sampling", "kernels")
# Fields that say where something is, or why: not what is captured.
OF_NO_EFFECT = ("model.path", "model.hub_name", "model.revision", "tokenizer", "compile.cache_dir", "reasons")
# Environment variables of these families configure CUDA and torch's allocator.
VARIABLES = ("CUDA_", "CUBLAS", "PYTORCH_", "TORCH_", "TRITON_", "NVIDIA_")
MAPPED_FILES = Path("/proc/self/maps")


def graph_memory_factors(config: EngineConfig, entry_key: str, keys: Sequence[str], stage: int = 0) -> dict[str, Any]:
    """All factors of the graphs' memory, as JSON.

    entry_key: of the compiled model. keys: names of the captured graphs, in order. stage: of a pipeline.
    """
    fields = {name: value for name, value in flat_fields(config).items() if name not in OF_NO_EFFECT}
    variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    return {
        "entry": entry_key,
        "keys": list(keys),
        "stage": stage,
        "config": fields,
        "source": digests_of(CAPTURED_ROOMS),
        "device": _describe(config.device),
        "variables": {
            name: variables[name] for name in sorted(variables.keys() - {"TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER"})
        },
    }


def _describe(device: torch.device) -> dict[str, Any]:
    """The device and its driver: the file of its library, whose name ends in the version."""
    if device.type != "cuda":
        return {"type": device.type}
    driver = sorted(set(re.findall(r"/libcuda\.so\S*", MAPPED_FILES.read_text())))
    return {"type": "cuda", "properties": str(torch.cuda.get_device_properties(device)), "driver": driver}


class Predicting(Protocol):
    """See CudaGraphManager."""

    @property
    def names_to_capture(self) -> list[str]: ...

    def predict(self, least: Callable[[int], int]) -> int: ...

    def expect(self, predicted: int) -> int: ...


def predicted_bytes(
    config: EngineConfig,
    lookup: Lookup | None,
    graphs: Predicting,
    least: Callable[[int], int] = lambda value: value,
    stage: int = 0,
) -> int:
    """Bytes of all graphs: predicted by `graphs`, or by an earlier process with these factors.

    lookup: of the compiled model; without one, or without a cache, the prediction is made now. A damaged file, or
    another user's, is ignored. least: minimum over ranks; all ranks predict, or none. stage: of a pipeline; each stage
    has separate graphs.
    """
    path, kept, factors = None, None, {}
    if lookup is not None and lookup.status != "off":
        factors = json.loads(json.dumps(graph_memory_factors(config, lookup.key, graphs.names_to_capture, stage)))
        path = lookup.folder.with_name(f"{lookup.key}_graphs_{factors_key(factors)}.json")
        kept = _read(path, factors)
    if least(kept is not None) and kept is not None:
        return graphs.expect(kept)
    predicted = graphs.predict(least)
    if path is not None:
        _write(path, {"factors": factors, "bytes": predicted, "digest": _digest(factors, predicted)})
    return predicted


def _read(path: Path, factors: dict[str, Any]) -> int | None:
    try:
        if path.lstat().st_uid != os.geteuid():
            return None
        kept = json.loads(path.read_bytes())
        found = kept["bytes"]
        if kept["factors"] == factors and type(found) is int and kept["digest"] == _digest(factors, found):
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write the file atomically; a read-only folder is no error."""
    with suppress(OSError), tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.stem}_") as file:
        json.dump(content, file)
        file.flush()
        os.replace(file.name, path)


def _digest(factors: dict[str, Any], predicted: int) -> str:
    return hashlib.sha256(json.dumps([factors, predicted], sort_keys=True).encode()).hexdigest()
