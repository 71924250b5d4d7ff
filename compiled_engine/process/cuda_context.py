"""CUDA, made ready by a thread while this process imports torch or reads files: its driver, or a GPU's primary context.

Torch uses the primary context too, and finds it made. Only a process that will run on the GPU may make one: a context
takes some hundred megabytes of the device, and a child that is forked afterwards cannot use CUDA.
"""

from __future__ import annotations

import ctypes
from functools import cache

from compiled_engine.process.in_background import InBackground

DRIVER = "libcuda.so.1"


@cache
def cuda_driver() -> InBackground[bool]:
    """The driver without a context. The result says whether there is one."""
    return InBackground(lambda: _driver() is not None)


@cache
def cuda_context(index: int) -> InBackground[bool]:
    """Of the GPU `index`, as CUDA counts them. The first call starts a thread, and every call gives the same one.

    The result says whether there is a context; what is wrong, if there is none, torch will say.
    """
    return InBackground(lambda: _make(index))


def index_of(device: str | None) -> int | None:
    """The GPU that the option `device` names, or that "auto" would take if there is one; None for a CPU."""
    kind, _, index = (device or "auto").partition(":")
    if kind not in ("auto", "cuda") or (index and not (index.isdecimal() and len(index) < 3)):
        return None
    return int(index or 0)


def _driver() -> ctypes.CDLL | None:
    """Calls of it leave Python's lock to others."""
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
