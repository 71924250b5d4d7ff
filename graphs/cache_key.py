"""What decides whether a compiled model can be used again: the declared factors of the cache key.

Every config field is in one of the two lists below; a field in neither is an error, so that a new one cannot be
forgotten.
"""

from __future__ import annotations

import hashlib
import importlib
import platform
import subprocess
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
import triton
from torch._inductor.cpp_builder import get_cpp_compiler

from compiled_engine.config import EngineConfig
from compiled_engine.passes.manager import pass_uuid

GRAPH_FIELDS = {
    "model.architecture",
    "model.vocab_size",
    "model.hidden_size",
    "model.intermediate_size",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
    "model.head_dim",
    "model.rms_norm_eps",
    "model.rope",
    "model.tie_word_embeddings",
    "model.qkv_bias",
    "model.attention_out_bias",
    "model.mlp_bias",
    "model.sliding_windows",
    "model.dtype",
    "scheduler.max_num_batched_tokens",
    "compile.passes",
    "attention_backend",
}
OTHER_FIELDS = {
    "model.path",
    "model.max_position_embeddings",
    "model.max_model_len",
    "model.load_format",
    "model.seed",
    "cache.block_size",
    "cache.num_blocks",
    "cache.gpu_memory_utilization",
    "cache.enable_prefix_caching",
    "scheduler.max_num_seqs",
    "scheduler.max_model_len",
    "scheduler.policy",
    "compile.enabled",
    "compile.cache_dir",
    "graph.mode",
    "graph.capture_sizes",
    "device",
    "reasons",
}
SOURCE_PACKAGES = ("compiled_engine.passes", "compiled_engine.graphs")
SOURCE_MODULES = (
    "compiled_engine.attention.inputs",
    "compiled_engine.attention.op",
    "compiled_engine.models.families",
    "compiled_engine.models.layers",
    "compiled_engine.models.llama",
    "compiled_engine.models.qwen3",
    "compiled_engine.models.rope",
)


def cache_factors(config: EngineConfig) -> dict[str, Any]:
    """All factors, readable: config fields, pass digests, versions, device and the digest of our own source."""
    flat = _flatten(config)
    undeclared = set(flat) - GRAPH_FIELDS - OTHER_FIELDS
    if undeclared:
        raise RuntimeError(f"config fields not declared as graph-affecting or not: {sorted(undeclared)}")
    return {
        "config": {name: flat[name] for name in sorted(GRAPH_FIELDS)},
        "passes": {name: pass_uuid(name) for name in config.compile.passes},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "c++": cpp_compiler_version() if config.device.type == "cpu" else None,
        },
        "inductor": inductor_settings_digest(),
        "device": describe_device(config.device),
        "source": source_digest(),
    }


def inductor_settings_digest() -> str:
    """Digest of Inductor's own settings, which the caller or its environment may have changed."""
    settings = inductor_config.save_config_portable()
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()


@cache
def cpp_compiler_version() -> str:
    """The first line of what the C++ compiler says of itself."""
    command = [get_cpp_compiler(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def describe_device(device: torch.device) -> dict[str, Any]:
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
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "flags": cpu_flags_digest(),
    }


def cpu_flags_digest() -> str:
    """Digest of the instruction sets that the CPU says it has; compiled pieces use all of them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return hashlib.sha256(flags.encode()).hexdigest()[:16]


@cache
def source_digest() -> str:
    """Digest of every Python file that shapes the compiled graph: model code, passes, and the compiler itself."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(f"{path.parent.name}/{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def source_files() -> list[Path]:
    """The files that `source_digest` reads."""
    folders = [Path(next(iter(importlib.import_module(name).__path__))) for name in SOURCE_PACKAGES]
    modules = [Path(str(importlib.import_module(name).__file__)) for name in SOURCE_MODULES]
    return sorted([path for folder in folders for path in folder.glob("*.py")] + modules)


def _flatten(config: EngineConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in ("model", "cache", "scheduler", "compile", "graph"):
            flat |= {f"{field.name}.{name}": _plain(inner) for name, inner in asdict(value).items()}
        else:
            flat[field.name] = _plain(value)
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, str | int | float | bool | dict | None) else str(value)
