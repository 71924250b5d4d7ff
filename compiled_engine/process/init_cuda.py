"""Initialises a GPU in background threads while this process imports torch or reads files.

The threads initialise CUDA's driver, the GPU's primary context, which torch then uses, and Triton's digest of its own
files.
Only a process that will run on the GPU may create a context: it takes some hundred megabytes of device memory, and a
child forked afterwards cannot use CUDA.
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
    """Start to initialise CUDA's driver, without a context; later calls return the same object.

    The object's result is True if the initialisation succeeded.
    """
    return InBackground(lambda: _driver() is not None)


@cache
def cuda_context(index: int) -> InBackground[bool]:
    """Start to create the primary context of the GPU `index`; later calls return the same object.

    index: in CUDA's numbering. The object's result is True if the context exists; if it is False, torch will report the
    reason.
    """
    return InBackground(lambda: _make(index))


def index_of(device: str | None) -> int | None:
    """Return the GPU's index in the value of the option `device`: 0 for None, "auto" and "cuda", 1 for "cuda:1".

    Returns None for any other value, such as "cpu".
    """
    kind, _, index = (device or "auto").partition(":")
    if kind not in ("auto", "cuda") or (index and not (index.isdecimal() and len(index) < 3)):
        return None
    return int(index or 0)


def gpu_name(index: int) -> str | None:
    """Return the name of the GPU `index`, the same as torch's; None if there is no such GPU. Creates no context.

    index: in CUDA's numbering.
    """
    driver, device, name = _driver(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if (
        driver is None
        or driver.cuDeviceGet(ctypes.byref(device), index) != 0
        or driver.cuDeviceGetName(name, len(name), device) != 0
    ):
        return None
    return name.value.decode()


def _driver() -> ctypes.CDLL | None:
    """Initialise CUDA's driver and return its library; None if that fails. Calls of the library release the GIL."""
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
    """Start to compute Triton's digest of its own files, once the GPU's context exists.

    Later calls return the same object. Triton reads hundreds of megabytes for the digest when it compiles or loads the
    first kernel, and keeps the digest in the process. index: a GPU that this process will run on, see `cuda_context`.
    The result is True if the digest was computed; False without that GPU or if Triton fails.
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
    """Start to initialise the GPU that the option `device` names, in the background; do nothing for a CPU.

    runs_here: this process will run on the GPU, so the GPU's context is created, and Triton's digest is computed.
    Otherwise only the driver is initialised, to enumerate GPUs.
    """
    index = index_of(device)
    if index is None:
        return
    if runs_here:
        triton_digest(index)  # creates a context first
    else:
        cuda_driver()


def given_device(options: Mapping[str, Any]) -> str:
    """Return the option `device` as text, "auto" if it is missing. options: keywords of `LLM`, not yet validated."""
    return str(options.get("device", "auto"))


def core_has_device(options: Mapping[str, Any]) -> bool:
    """Return whether the engine core's own process will use the GPU, rather than replicas or worker processes.

    options: keywords of `LLM`, not yet validated.
    """
    sizes = [options.get(name, 1) for name in _SIZES]
    is_alone = all(type(size) is int and size == 1 for size in sizes)
    return is_alone and not any(str(options.get(name)) in _ELSEWHERE for name in _EXECUTORS)
