"""A GPU's primary context, made by a thread while this process imports torch or reads files.

Torch uses the primary context too, and finds it made. Only a process that will run on the GPU may call this: a context
takes some hundred megabytes of the device, and a child that is forked afterwards cannot use CUDA.
"""

from __future__ import annotations

import ctypes
from functools import cache

from compiled_engine.process.in_background import InBackground

DRIVER = "libcuda.so.1"


@cache
def cuda_context(index: int) -> InBackground[bool]:
    """Of the GPU `index`, as CUDA counts them. The first call starts a thread, and every call gives the same one.

    The result says whether there is a context; what is wrong, if there is none, torch will say.
    """
    return InBackground(lambda: _make(index))


def index_of(device: str | None) -> int | None:
    """The GPU that the option `device` names, or that "auto" would take if there is one; None for a CPU."""
    kind, _, index = (device or "auto").partition(":")
    if kind == "cpu" or (index and not index.isdecimal()):
        return None
    return int(index or 0)


def _make(index: int) -> bool:
    """Calls of the driver; each leaves Python's lock to others."""
    try:
        driver = ctypes.CDLL(DRIVER)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        return (
            driver.cuInit(0) == 0
            and driver.cuDeviceGet(ctypes.byref(device), index) == 0
            and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        )
    except (OSError, AttributeError):
        return False
