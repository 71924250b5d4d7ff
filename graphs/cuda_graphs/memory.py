"""Predicts the device memory of CUDA graphs from a few captures, and stores the prediction for later starts.

The prediction is needed before all graphs are captured, because the KV cache gets the memory that the graphs leave.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from compiled_engine.config import EngineConfig, effective_fields
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.environment import digests_of
from compiled_engine.graphs.cache.lookup import Lookup
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey, GraphKind

# Captures of a family are sampled until their driver memory reaches this: the driver allocates in steps of 2 MiB.
ENOUGH_DRIVER_BYTES = 24 << 20
MOST_SAMPLES = 16
# Plausible driver memory per graph in bytes; other readings are caused by other processes.
PLAUSIBLE_DRIVER_BYTES = range(0, 64 << 20)


class MemoryReading(NamedTuple):
    """A reading of the device memory in use, in bytes."""

    pool: int  # reserved by torch; holds the outputs of captured kernels
    driver: int  # everything else; a graph takes some for each node

    def since(self, before: MemoryReading) -> MemoryReading:
        """Return the increase since an earlier reading, separately for torch's memory and the driver's."""
        return MemoryReading(self.pool - before.pool, self.driver - before.driver)


def enough_samples(readings: Sequence[MemoryReading]) -> bool:
    """Return whether enough graphs of a family were captured to predict the memory of the whole family.

    A family is a set of graphs that differ only in size. readings: the increase of memory during each capture so far.
    """
    return len(readings) >= MOST_SAMPLES or _driver_mean(readings) * len(readings) >= ENOUGH_DRIVER_BYTES


def total_bytes(families: Iterable[tuple[Sequence[MemoryReading], int]]) -> int:
    """Return the predicted device memory of all graphs in bytes.

    families: for each family of graphs, the readings of its captured graphs and the number of all its graphs. Graphs
    without a reading need no further memory of the pool, since they fit into the memory of larger graphs.
    """
    total = 0.0
    for readings, count in families:
        total += sum(reading.pool for reading in readings) + _driver_mean(readings) * count
    return int(total)


def _driver_mean(readings: Sequence[MemoryReading]) -> float:
    plausible = [reading.driver for reading in readings if reading.driver in PLAUSIBLE_DRIVER_BYTES]
    return sum(plausible) / len(plausible) if plausible else 0.0


def capture_order(key: GraphKey) -> tuple[bool, bool, int, int]:
    """Return a sort key that puts graphs without attention first, decode graphs last, and large before small ones."""
    return key.kind is GraphKind.FULL, key.is_decode, -key.num_tokens, -key.max_seq_len


def families(keys: Iterable[GraphKey]) -> list[list[GraphKey]]:
    """Group keys into families, whose keys differ only in size. Families and keys are in capture order."""
    found: dict[tuple[object, ...], list[GraphKey]] = {}
    for key in sorted(keys, key=capture_order):
        query_len = key.max_query_len if key.is_decode else 0
        kind = key.kind, query_len, key.purpose, key.without_offsets, key.extra
        found.setdefault(kind, []).append(key)
    return list(found.values())


# Predictions are kept beside the compile cache entry of the captured model.
#
# A prediction is valid for one configuration on one device with one driver. Everything that it may depend on is a
# factor, and a file is used only if all its factors equal those of this process.

# Packages that run during a capture and that the key of the cache entry does not cover.
CAPTURED_PACKAGES = ("attention.backends", "graphs.cuda_graphs", "engine", "features", "sampling", "kernels")
# Environment variables of these families configure CUDA and torch's allocator.
VARIABLES = ("CUDA_", "CUBLAS", "PYTORCH_", "TORCH_", "TRITON_", "NVIDIA_")
MAPPED_FILES = Path("/proc/self/maps")


def graph_memory_factors(config: EngineConfig, entry_key: str, keys: Sequence[str], share: int = 0) -> dict[str, Any]:
    """Return everything that the graphs' memory may depend on, as a dict of JSON values.

    entry_key: the key of the compiled model's cache entry. keys: the names of the graphs, in a fixed order. share: the
    index of the LayerShare (range of layers) that this rank runs.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    return {
        "entry": entry_key,
        "keys": list(keys),
        "share": share,
        "config": effective_fields(config),
        "source": digests_of(CAPTURED_PACKAGES),
        "device": _describe(config.device),
        "variables": {
            name: variables[name] for name in sorted(variables.keys() - {"TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER"})
        },
    }


def _describe(device: torch.device) -> dict[str, Any]:
    """Return the properties of the device. For a GPU, they include the driver library's path, which has its version."""
    if device.type != "cuda":
        return {"type": device.type}
    driver = sorted(set(re.findall(r"/libcuda\.so\S*", MAPPED_FILES.read_text())))
    return {"type": "cuda", "properties": str(torch.cuda.get_device_properties(device)), "driver": driver}


class Predicting(Protocol):
    """The part of CudaGraphManager's interface that predicts the graphs' memory."""

    @property
    def names_to_capture(self) -> list[str]: ...

    def predict(self, all_reduce_min: Callable[[int], int]) -> int: ...

    def expect(self, predicted: int) -> int: ...


def predicted_bytes(
    config: EngineConfig,
    lookup: Lookup | None,
    graphs: Predicting,
    all_reduce_min: Callable[[int], int] = lambda value: value,
    share: int = 0,
) -> int:
    """Return the predicted device memory of all graphs, in bytes.

    If earlier processes with the same factors have stored a prediction for each rank, it is returned. Otherwise
    `graphs` predicts the memory now, and the prediction is stored beside the cache entry.

    lookup: the compiled model's lookup in the compile cache; if it is None or its status is "off", no prediction is
    read or stored. Stored files that are damaged or belong to another user are ignored. all_reduce_min: returns the
    minimum of a number over all ranks; with it, either all ranks predict or none. share: the index of the LayerShare
    (range of layers) that this rank runs; each has its own graphs.
    """
    path, kept, factors = None, None, {}
    if lookup is not None and lookup.status != "off":
        factors = json.loads(json.dumps(graph_memory_factors(config, lookup.key, graphs.names_to_capture, share)))
        path = lookup.folder.with_name(f"{lookup.key}_graphs_{factors_key(factors)}.json")
        kept = _read(path, factors)
    if all_reduce_min(kept is not None) and kept is not None:
        return graphs.expect(kept)
    predicted = graphs.predict(all_reduce_min)
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
    """Write `content` to the file as JSON, atomically. An OSError is ignored, for instance in a read-only folder."""
    with suppress(OSError), tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.stem}_") as file:
        json.dump(content, file)
        file.flush()
        os.replace(file.name, path)


def _digest(factors: dict[str, Any], predicted: int) -> str:
    return hashlib.sha256(json.dumps([factors, predicted], sort_keys=True).encode()).hexdigest()
