"""Initialise a GPU in threads while this process imports torch or reads files.

This covers CUDA's driver, the GPU's primary context, and Triton's digest of its own files. Torch then finds and uses
the primary context. Only a process that will run on the GPU may create one: a context takes some hundred megabytes of
device memory, and a child forked afterwards cannot use CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

from compiled_engine.process.in_background import InBackground

DRIVER = "libcuda.so.1"
# Options that move the devices to other processes than the core's.
_SIZES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
_EXECUTORS = ("distributed_executor", "distributed_executor_backend")
_ELSEWHERE = ("multiprocess", "mp", "ray")


@cache
def cuda_driver() -> InBackground[bool]:
    """Initialise the driver without a context. The result tells whether that succeeded."""
    return InBackground(lambda: _driver() is not None)


@cache
def cuda_context(index: int) -> InBackground[bool]:
    """Create the primary context of the GPU `index`, in CUDA's numbering. The first call starts a thread; all calls
    return the same one.

    The result tells whether there is a context; if not, torch will report the reason.
    """
    return InBackground(lambda: _make(index))


def index_of(device: str | None) -> int | None:
    """Return the GPU index for the option `device`, where "auto" is GPU 0; None for a CPU."""
    kind, _, index = (device or "auto").partition(":")
    if kind not in ("auto", "cuda") or (index and not (index.isdecimal() and len(index) < 3)):
        return None
    return int(index or 0)


def gpu_name(index: int) -> str | None:
    """Return a GPU's name as torch has it, by CUDA's numbering; None if it does not exist. Creates no context."""
    driver, device, name = _driver(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if (
        driver is None
        or driver.cuDeviceGet(ctypes.byref(device), index) != 0
        or driver.cuDeviceGetName(name, len(name), device) != 0
    ):
        return None
    return name.value.decode()


def _driver() -> ctypes.CDLL | None:
    """Return the initialised driver, or None. Its calls release the GIL."""
    try:
        driver = ctypes.CDLL(DRIVER)
        return driver if driver.cuInit(0) == 0 else None
    except (OSError, AttributeError):
        return None


def _make(index: int) -> bool:
    driver = _driver()
    if driver is None:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return (
        driver.cuDeviceGet(ctypes.byref(device), index) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    )


@cache
def triton_digest(index: int) -> InBackground[bool]:
    """Compute Triton's digest of its own files, hundreds of megabytes, which names every binary: the first kernel needs
    it. Triton caches it for the process.

    The first call starts a thread; all calls return the same one. For a process that will run on the GPU `index`, see
    `cuda_context`. The result tells whether the digest was computed; without that GPU it is not.
    """
    context = cuda_context(index)
    return InBackground(lambda: context.result() and _make_digest())


def _make_digest() -> bool:
    try:
        import triton  # noqa: F401 - the package first: an import of its module by two threads may find half of it
        from triton.runtime.cache import triton_key

        triton_key()
    except Exception:  # an unknown or damaged version; the first kernel computes it again and reports the error
        return False
    return True


def init_cuda(device: str, *, runs_here: bool) -> None:
    """Start the initialisation for the option `device`. runs_here: this process runs on the GPU; otherwise it only
    enumerates GPUs."""
    index = index_of(device)
    if index is None:
        return
    if runs_here:
        triton_digest(index)  # creates a context first
    else:
        cuda_driver()


def given_device(options: Mapping[str, Any]) -> str:
    """Return the value of `device` in unchecked keywords of `LLM`, by default "auto"."""
    return str(options.get("device", "auto"))


def core_has_device(options: Mapping[str, Any]) -> bool:
    """Return whether the core's process uses the device, given unchecked keywords of `LLM`; False if replicas or
    workers use it."""
    sizes = [options.get(name, 1) for name in _SIZES]
    is_alone = all(type(size) is int and size == 1 for size in sizes)
    return is_alone and not any(str(options.get(name)) in _ELSEWHERE for name in _EXECUTORS)
