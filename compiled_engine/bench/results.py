"""Read benchmark results, which are JSON, and make the records of machine, versions and model that they contain."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from compiled_engine.process.cores import usable_cores

if TYPE_CHECKING:
    import torch

    from compiled_engine.config import EngineConfig

# Name of an ablation's variant with all parts of the engine, by device type.
WHOLE = {"cuda": "compiled + full", "cpu": "compiled"}


def read_json(name: str, path: Path) -> Any:
    """Return the content of a JSON file. Raises ValueError, naming the option `name`, if it is missing or invalid."""
    if not path.is_file():
        raise ValueError(f"{name} is {str(path)!r}; allowed: a JSON file")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{name} is {str(path)!r}, which is no JSON: {error}") from error


def read_result(name: str, path: Path, *benchmarks: str) -> dict[str, Any]:
    """Return the result of one of `benchmarks` from a JSON file. Raises ValueError for any other content.

    name: the option that gives the path, for errors.
    """
    result = read_json(name, path)
    if not isinstance(result, dict) or result.get("benchmark") not in benchmarks:
        allowed = " or ".join(f"bench {benchmark}" for benchmark in benchmarks)
        raise ValueError(f"{name} is {str(path)!r}; allowed: a JSON file of {allowed}")
    return result


def host_record() -> dict[str, Any]:
    """Return the processor, its usable cores, the memory in bytes, and the system."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.system(),
    }


def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the version of Python, and the versions of the given packages that are installed."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def today() -> str:
    """Return today's date in ISO format."""
    return datetime.date.today().isoformat()


def host_provenance() -> dict[str, Any]:
    """Return the origin of a client's result: date, machine, versions."""
    return {"date": today(), "machine": host_record(), "versions": installed_versions(("compiled-engine", "httptools"))}


def processor() -> str:
    """Return the processor's name if the system reports it, otherwise its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def require_httptools() -> None:
    """Raise ValueError if httptools, which load tests need, is missing."""
    if find_spec("httptools") is None:
        raise ValueError("this benchmark needs httptools: python -m pip install 'compiled-engine[bench]'")


# Latencies of a load test: name in results -> name in tables.
LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2el_ms": "E2EL"}
PACKAGES = ("compiled-engine", "torch", "triton", "transformers", "flash-attn")


def machine_record(device: torch.device) -> dict[str, Any]:
    """Return the device's name and memory in bytes, and the host's processor, cores, threads and memory."""
    import torch

    record: dict[str, Any] = {"device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        record |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return record | host_record() | {"threads": torch.get_num_threads()}


def versions_record() -> dict[str, str]:
    """Return versions of Python, CUDA and the relevant installed packages."""
    import torch

    versions = installed_versions(PACKAGES)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def provenance(device: torch.device) -> dict[str, Any]:
    """Return the origin of a result: date (ISO), machine, versions."""
    return {"date": today(), "machine": machine_record(device), "versions": versions_record()}


def model_record(config: EngineConfig, shape: str | None) -> dict[str, Any]:
    """Return the model's name (of the shape, the hub or the folder), architecture, dtype and limits."""
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
    """Return engine options as JSON values: paths become text, tuples lists."""
    plain: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Path):
            plain[name] = str(value)
        else:
            plain[name] = list(value) if isinstance(value, tuple) else value
    return plain


def conditions(config: EngineConfig, options: Mapping[str, Any], shape: str | None) -> dict[str, Any]:
    """Return the conditions of an engine's benchmark: provenance, model, and the given options."""
    given = {name: value for name, value in plain_options(options).items() if shape is None or name != "model"}
    return {
        **provenance(config.device),
        "model": model_record(config, shape),
        "options": given | ({"shape": shape} if shape else {}),
    }


def has_figures(record: Mapping[str, Any]) -> bool:
    """Return whether an ablation's record has figures; a variant that failed at once has none."""
    return "step_ms" in record
