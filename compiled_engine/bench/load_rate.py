"""Compare the rate of loading a checkpoint with that of reading its files from start to end by read()."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compiled_engine.bench.shapes import SHAPES, write_shape
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize, parameters_of
from compiled_engine.process.progress import Progress

READ_BYTES = 16 << 20
SHARD_BYTES = 4 << 30


def write_random_checkpoint(folder: Path, shape: str, device: torch.device, progress: Progress) -> Path:
    """Write a sharded safetensors checkpoint with an index and random weights of a known shape. Returns `folder`.

    Raises ValueError for a shape that is quantised.
    """
    if "quantization_config" in SHAPES.get(shape, {}):
        plain = (name for name, fields in SHAPES.items() if "quantization_config" not in fields)
        raise ValueError(f"shape is {shape!r}, which is quantised; allowed: {', '.join(plain)}")
    write_shape(folder, shape)
    config, _ = read_model_config(
        folder, dtype="bfloat16", max_model_len=None, load_format="dummy", seed=0, device_type=device.type
    )
    parameters = dict(build_model(config).named_parameters())
    shards: list[dict[str, torch.Tensor]] = [{}]
    weight_map, size = {}, 0
    with progress.stage("write checkpoint", total=len(parameters)) as advance:
        for name, parameter in parameters.items():
            if size > SHARD_BYTES:
                _save_shard(folder, len(shards), shards[-1])
                shards.append({})
                size = 0
            values = torch.empty(parameter.shape, dtype=config.dtype, device=device).uniform_(-0.05, 0.05)
            shards[-1][name] = values.cpu()
            weight_map[name] = _shard_name(len(shards))
            size += values.numel() * values.itemsize
            advance(1)
        _save_shard(folder, len(shards), shards[-1])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _shard_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _save_shard(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / _shard_name(number))
    tensors.clear()


def measure(folder: Path, device: torch.device, progress: Progress, repeats: int = 3) -> dict[str, Any]:
    """Measure the rates of reading a checkpoint's files and of loading it, in turn, `repeats` times in this process.

    The page cache is left as it is. Returns a dict: `read_gb_per_s` and `load_gb_per_s` are the rates of all repeats,
    ascending; `load_over_read` is the ratio of their medians; `host_peak_bytes` is the peak of anonymous and shared
    memory that a load adds, without mapped files.
    """
    files = sorted(folder.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in files)
    config, _ = read_model_config(
        folder, dtype="auto", max_model_len=None, load_format="safetensors", seed=0, device_type=device.type
    )
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the CUDA context is not part of loading
    model = build_model(config)
    weights = materialize(model, parameters_of(model), device)
    reads, loads, peaks = [], [], []
    for _ in range(repeats):
        reads.append(total / _timed(lambda: _read_all(files), device))
        with _host_peak() as peak:
            loads.append(total / _timed(lambda: load_weights(weights, model, config, progress), device))
        peaks.append(peak[0])
    reads.sort()
    loads.sort()
    read, load = reads[repeats // 2], loads[repeats // 2]
    return {
        "device": str(device),
        "bytes": total,
        "read_gb_per_s": [rate / 1e9 for rate in reads],
        "load_gb_per_s": [rate / 1e9 for rate in loads],
        "load_over_read": load / read,
        "host_peak_bytes": max(peaks),
        "largest_tensor_bytes": max(parameter.nbytes for parameter in model.parameters()),
    }


def _timed(work: Any, device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _read_all(files: list[Path]) -> None:
    buffer = bytearray(READ_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


@contextmanager
def _host_peak() -> Iterator[list[int]]:
    """Sample this process's anonymous and shared memory every few milliseconds during the block.

    Yields a list whose only entry is the largest growth so far, in bytes.
    """
    before, peak, stop = _host_bytes(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            peak[0] = max(peak[0], _host_bytes() - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def _host_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
