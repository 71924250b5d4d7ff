"""Attention backends by name, imported when first asked for, and the rule that picks one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from compiled_engine.attention.backend import AttentionBackend
from compiled_engine.attention.case import AttentionCase, GraphSupport, Refused, Support

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


@dataclass(frozen=True)
class AttentionChoice:
    """The backend and the block size of a model's attention, and why whatever was "auto" is so.

    cases: those of the model's layers. support: what the backend offers for all of them.
    """

    backend: str
    block_size: int
    cases: tuple[AttentionCase, ...]
    support: Support
    reasons: dict[str, str]


def choose_backend(requested: str, requested_block_size: int | str, cases: Sequence[AttentionCase]) -> AttentionChoice:
    """Settle the backend and the block size for a model on a device.

    requested: "auto" or a name of BACKENDS. requested_block_size: tokens in a block, or "auto" for the backend's own.
    cases: of the model's layers; their block size is ignored.
    Raises ValueError with the backend's reason when a requested one refuses a case.
    """
    is_integer = isinstance(requested_block_size, int) and not isinstance(requested_block_size, bool)
    if requested_block_size != "auto" and not (is_integer and 1 <= int(requested_block_size) <= MAX_BLOCK_SIZE):
        raise ValueError(f"block_size is {requested_block_size!r}; allowed: 1 to {MAX_BLOCK_SIZE}, or 'auto'")

    def chosen(name: str, reasons: dict[str, str]) -> AttentionChoice:
        """Choose this backend. Raises Refused or ImportError."""
        backend = get_backend(name)
        if requested_block_size == "auto":
            block_size = backend.default_block_size
            reasons = reasons | {"cache.block_size": f"the default of attention backend {name}"}
        else:
            block_size = int(requested_block_size)
        asked = tuple(case.with_block_size(block_size) for case in cases)
        support = Support.of_all([backend.accept(case) for case in asked])
        return AttentionChoice(name, block_size, asked, support, reasons)

    name = requested
    reasons: dict[str, str] = {}
    if requested == "auto":
        name, reason = default_backend(cases[0].device)
        try:
            return chosen(name, {"attention_backend": reason})
        except (Refused, ImportError) as refusal:
            name, reasons = "torch", {"attention_backend": f"{name} cannot run this model: {refusal}"}
    try:
        return chosen(name, reasons)
    except (Refused, ImportError) as refusal:
        raise ValueError(f"attention_backend {name!r} cannot run this model here: {refusal}") from refusal


def captured_always(cases: Sequence[AttentionCase]) -> list[str]:
    """Return the backends that run these cases in every CUDA graph."""
    names = []
    for name in BACKENDS:
        try:
            supports = [get_backend(name).accept(case) for case in cases]
        except (Refused, ImportError):
            continue
        if Support.of_all(supports).graphs is GraphSupport.ALWAYS:
            names.append(name)
    return names
