"""The machine of a measurement that needs no device: processor, cores, memory, versions. Plain JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil


def host_record() -> dict[str, Any]:
    """The processor, its usable cores, the memory in bytes, the system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": processor(),
        "cores": cores,
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.system(),
    }


def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of Python and of those of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def today() -> str:
    """The date, as ISO has it."""
    return datetime.date.today().isoformat()


def host_provenance() -> dict[str, Any]:
    """What the result of a client states of its origin."""
    return {"date": today(), "machine": host_record(), "versions": installed_versions(("compiled-engine", "httptools"))}


def processor() -> str:
    """Its name where the system tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def require_httptools() -> None:
    """Raises ValueError where a load test cannot read answers."""
    if find_spec("httptools") is None:
        raise ValueError("this benchmark needs httptools: python -m pip install 'compiled-engine[bench]'")
