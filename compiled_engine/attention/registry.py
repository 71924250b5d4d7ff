"""Attention backends by name, imported when first asked for, and the rule that picks one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module

from compiled_engine.attention.backend import AttentionBackend, AttentionCase

BACKENDS: tuple[str, ...] = ("torch", "cpp", "triton", "flash_attn")
MAX_BLOCK_SIZE = 1 << 16
PACKAGES = {"torch": "torch", "cpp": "torch", "triton": "triton", "flash_attn": "flash-attn"}


@cache
def get_backend(name: str) -> AttentionBackend:
    """The backend of that name. Raises ValueError for an unknown name, ImportError naming a missing package."""
    if name not in BACKENDS:
        raise ValueError(f"attention_backend is {name!r}; known backends: {', '.join(BACKENDS)}")
    try:
        module = import_module(f"compiled_engine.attention.backends.{name}_backend")
    except ImportError as error:
        raise ImportError(f"attention_backend {name!r} needs the package {PACKAGES[name]}: {error}") from error
    backend: AttentionBackend = module.BACKEND
    return backend


def default_backend(device_type: str) -> tuple[str, str]:
    """The backend to try first on a kind of device, and why."""
    if device_type == "cuda":
        return "triton", "cuda: the engine's own kernels, which need no further package"
    return "cpp", "cpu: the engine's own kernel, which needs a C++ compiler"


def resolve_backend(
    requested: str, requested_block_size: int | str, cases: Sequence[AttentionCase]
) -> tuple[str, int, dict[str, str]]:
    """Settle the backend and the block size for a model on a device.

    requested: "auto" or a name of BACKENDS. requested_block_size: tokens in a block, or "auto" for the backend's own.
    cases: one for each shape of heads; their block_size is ignored. Returns the backend, the block size, and why
    whatever was "auto" is so.
    Raises ValueError with the backend's reason when a requested one cannot run a case.
    """
    is_integer = isinstance(requested_block_size, int) and not isinstance(requested_block_size, bool)
    if requested_block_size != "auto" and not (is_integer and 1 <= int(requested_block_size) <= MAX_BLOCK_SIZE):
        raise ValueError(f"block_size is {requested_block_size!r}; allowed: 1 to {MAX_BLOCK_SIZE}, or 'auto'")
    if requested not in ("auto", *BACKENDS):
        raise ValueError(f"attention_backend is {requested!r}; allowed: auto, {', '.join(BACKENDS)}")

    def attempt(name: str) -> tuple[int, str | None]:
        """The block size with this backend, and what keeps it from running the case."""
        try:
            backend = get_backend(name)
        except ImportError as error:
            return 0, str(error)
        automatic = requested_block_size == "auto"
        block_size = backend.default_block_size if automatic else int(requested_block_size)
        obstacles = (backend.unsupported(replace(case, block_size=block_size)) for case in cases)
        return block_size, next((obstacle for obstacle in obstacles if obstacle), None)

    reasons: dict[str, str] = {}
    name = requested
    if requested == "auto":
        name, reasons["attention_backend"] = default_backend(cases[0].device_type)
    block_size, obstacle = attempt(name)
    if obstacle and requested == "auto" and name != "torch":
        reasons["attention_backend"] = f"{name} cannot run this model: {obstacle}"
        name = "torch"
        block_size, obstacle = attempt(name)
    if obstacle:
        raise ValueError(f"attention_backend {name!r} cannot run this model here: {obstacle}")
    if requested_block_size == "auto":
        reasons["cache.block_size"] = f"the default of attention backend {name}"
    return name, block_size, reasons
