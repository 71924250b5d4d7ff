"""A stand-in for the driver of a GPU that is not there: Triton compiles for it, and nothing can be launched."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget


class Hopper:
    """As much of a driver as Triton needs to compile and to load; a launch fails."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
        load_binary=lambda name, binary, shared, device: (None, object(), 32, 0, 1024),
    )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return partial(pytest.fail, "a kernel was launched")

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def require_hopper() -> None:
    """Skip the test unless this machine has a GPU of compute capability 9."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for compute capability 9")
