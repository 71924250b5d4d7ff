"""Collects the factors of the cache key besides the config: versions, device, compilers, their settings, source code.

Factors are readable values rather than digests where possible, so that the difference of two entries can be explained.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C import libtriton

from compiled_engine.graphs.compiler.settings import INDUCTOR_OPTIONS, changed_settings, settings_of
from compiled_engine.passes.framework.profile import DeviceProfile, profile_of
from compiled_engine.process.in_background import import_apart

# Sources that shape a compiled graph: top-level modules, and every file directly in these packages.
SOURCE_PACKAGES = (
    "quantisation",
    "quantisation_names",
    "kv_format",
    "attention",
    "graphs.compiler",
    "models.textbook",
    "passes",
    "passes.framework",
    "passes.norm",
    "passes.linear",
    "passes.rope",
    "passes.experts",
    "passes.invariance",
    "passes.parallel",
    "passes.quantised",
    "passes.recurrence",
    "passes.layout",
)
# Dynamo's settings that shape a graph; its others concern logging and limits.
_DYNAMO_SETTINGS = (
    "allow_unspec_int_on_nn_module",
    "assume_static_by_default",
    "automatic_dynamic_shapes",
    "capture_scalar_outputs",
    "dynamic_shapes",
    "inline_inbuilt_nn_modules",
    "install_free_tensors",
    "specialize_float",
    "specialize_int",
)
# The caller's hooks that Inductor runs on every graph; its portable settings do not contain them.
_INDUCTOR_HOOKS = (
    "_post_fusion_custom_pass",
    "_pre_fusion_custom_pass",
    "joint_custom_post_pass",
    "joint_custom_pre_pass",
    "post_grad_custom_post_pass",
    "post_grad_custom_pre_pass",
    "pre_grad_custom_pass",
)
# Settings and environment variables for output folders, workers and progress, which do not shape code.
_SHAPES_NOTHING = (
    *("*path", "*dir", "*progress"),
    *("*_PATH", "*_DIR", "*LOG*", "*WORKER*", "*_COMPILE_THREADS", "*_TIMEOUT*", "MAST_HPC_JOB_NAME", "ROLE_RANK"),
    *("PT2_COMPILE_ID_PREFIX", "CXX"),
)


@dataclass(frozen=True)
class Environment:
    """The factors of the cache key besides the config, in groups. Each field maps names to JSON values."""

    versions: dict[str, Any]
    device: dict[str, Any]
    compiler: dict[str, Any]  # the C++ compiler, on a CPU
    settings: dict[str, Any]  # of torch's compilers, with the engine's options
    profile: dict[str, Any]  # the device's measurements that decide which passes run
    source: dict[str, str]  # digest of each source file that shapes the graph

    def as_factors(self) -> dict[str, Any]:
        return asdict(self)


def this_environment(device: torch.device) -> Environment:
    """Return the factors of this process, for a model on `device`."""
    return Environment(
        versions={
            "python": sys.implementation.cache_tag,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        device=describe_device(device),
        compiler=cpp_compiler() if device.type == "cpu" else {},
        settings=compiler_settings(device.type),
        profile=measured_gains(profile_of(device)),
        source=source_digests(),
    )


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return the device's properties that generated code depends on."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "type": "cuda",
            "index": device.index,
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
        }
    return {
        "type": "cpu",
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": cpu_instructions(),
    }


def cpu_instructions() -> list[str]:
    """Return the sorted names of the CPU's instruction-set extensions, which compiled pieces may use.

    Returns [] on a system without /proc/cpuinfo.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return sorted(flags.partition(":")[2].split())


@cache
def cpp_compiler() -> dict[str, Any]:
    """Return the command, path and version of Inductor's C++ compiler, and the header folders on its command line.

    Inductor names artifacts by a digest of the command line, so with other header folders it would recompile an
    entry's artifacts when it loads them.
    """
    command = _cpp_command()
    words = shlex.split(command)
    version = subprocess.run([*words, "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "command": command,
        "path": os.path.realpath(shutil.which(words[0]) or words[0]),
        "version": version.split("\n")[0],
        "headers": [sysconfig.get_path("include"), str(Path(torch.__file__).parent / "include")],
    }


def _cpp_command() -> str:
    """Return the command of the C++ compiler that Inductor uses, without importing Inductor if possible.

    If Inductor is already imported, its setting is returned, since it may have been changed. It is imported if
    TORCH_INDUCTOR_INSTALL_GXX lets it install a compiler. Otherwise its default is returned: $CXX, g++ or clang++.
    """
    if settings_of("inductor") is not None or os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        command: str = import_apart("torch._inductor.cpp_builder").get_cpp_compiler()
        return command
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def measured_gains(profile: DeviceProfile | None) -> dict[str, Any]:
    """Return the measurements of a profile that decide which passes run, as JSON values; empty without a profile.

    A profile holds what `compiled-engine tune` has measured on a GPU. The rest of it only affects how kernels are
    launched, so it is no factor.
    """
    return _json_value({"noise_us": profile.noise_us, "gains_us": profile.gains_us}) if profile else {}


def compiler_settings(device_type: str) -> dict[str, Any]:
    """Return the settings of torch's compilers, and of the engine, that shape compiled code, by name.

    These are the settings of torch's compilers that differ from their defaults, the engine's own, torch's global ones,
    and the environment variables that torch's compilers and, on a GPU, Triton read.
    """
    hooks = {name: getattr(settings_of("inductor"), name, None) for name in _INDUCTOR_HOOKS}
    inductor = _changed("inductor") | {name: _json_value(hook) for name, hook in hooks.items() if hook is not None}
    dynamo = _changed("dynamo")
    return {
        "inductor": inductor | _json_value(INDUCTOR_OPTIONS),
        "functorch": _changed("functorch"),
        "dynamo": {name: dynamo[name] for name in _DYNAMO_SETTINGS if name in dynamo},
        "environment": _environment_variables(),
        "torch": {
            "default_dtype": str(torch.get_default_dtype()),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "mkldnn": torch.backends.mkldnn.enabled,
        },
        "triton": libtriton.get_cache_invalidating_env_vars() if device_type == "cuda" else {},
    }


def _changed(compiler: str) -> dict[str, Any]:
    return {name: _json_value(value) for name, value in changed_settings(compiler).items() if _shapes_code(name)}


def _environment_variables() -> dict[str, str]:
    """Return the environment variables from which torch's compilers read default settings that shape code, if set."""
    root = Path(torch.__file__).parent
    sources = [(root / f"_{name}" / "config.py").read_text() for name in ("inductor", "functorch", "dynamo")]
    read = {name for source in sources for name in re.findall(r"[\"']([A-Z][A-Z0-9_]+)[\"']", source)}
    return {name: os.environ[name] for name in sorted(read & os.environ.keys()) if _shapes_code(name)}


def _shapes_code(name: str) -> bool:
    return not any(fnmatchcase(name, pattern) for pattern in _SHAPES_NOTHING)


def _json_value(value: Any) -> Any:
    """Return a JSON value that stands for `value`, such as a compiler's setting, and is the same in every process.

    Sets become sorted lists. A function becomes its qualified name; any other object becomes the qualified name of its
    class. If the function or object has a method `uuid`, the result of `uuid` follows the name.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_json_value(item)) for item in value)
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    return f"{name} {value.uuid()}" if callable(getattr(value, "uuid", None)) else name


@cache
def source_digests() -> dict[str, str]:
    """Return, by path, the digest of each source file that shapes the graphs of all models (SOURCE_PACKAGES)."""
    return digests_of(SOURCE_PACKAGES)


def digests_of(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the digest of each file that `source_files` finds, by its path in the package compiled_engine."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in source_files(packages).items()}


def source_files(packages: tuple[str, ...] = SOURCE_PACKAGES) -> dict[str, Path]:
    """Return the Python files directly in these packages, by their path in the package compiled_engine.

    packages: dotted names below compiled_engine; a module is a single file.
    """
    files: dict[str, Path] = {}
    for package in packages:
        module = import_module(f"compiled_engine.{package}")
        if hasattr(module, "__path__"):
            files |= {
                f"{package.replace('.', '/')}/{path.name}": path for path in Path(module.__path__[0]).glob("*.py")
            }
        else:
            files[f"{package}.py"] = Path(str(module.__file__))
    return dict(sorted(files.items()))
