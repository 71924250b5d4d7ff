"""Main program of worker processes that compile Triton kernels and store the binaries in Triton's cache folder."""

from __future__ import annotations

import importlib
import time
import traceback
from typing import Any

from compiled_engine.kernels.kernel_digest import digest_helpers_first
from compiled_engine.process.worker_program import Answer, Messages, Work, run_workers


def main() -> None:
    """Run the worker program: read messages and answer them, see process/worker_program.py.

    - The first message, for all workers, is {"modules": [modules to import]}.
    - Each later message names a kernel to compile: {"target": [backend, architecture, warp size], "module", "name",
      "specialization"}, with the specialization as Triton passes it to its jit_cache_hook.
    - An answer is {"seconds": s} or {"error": text}.
    """
    run_workers(_prepare)


def _prepare(order: dict[str, Any]) -> Work:
    from triton.runtime.cache import triton_key

    for module in order["modules"]:
        importlib.import_module(module)
    triton_key()  # a digest of hundreds of megabytes
    return _compile_kernels


def _compile_kernels(messages: Messages, answer: Answer) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    known: list[Any] = []
    for message in messages:
        start_s = time.perf_counter()
        if message["target"] != known:
            known = message["target"]
            triton.runtime.driver.set_active(_CompileOnly(GPUTarget(*known)))
        try:
            kernel = getattr(importlib.import_module(message["module"]), message["name"])
            digest_helpers_first(kernel)
            kernel.preload(message["specialization"])
            answer({"seconds": time.perf_counter() - start_s})
        except Exception:
            answer({"error": traceback.format_exc()})


class _CompileOnly:
    """A Triton driver that can only compile. It returns `target` as the GPU to compile for.

    It creates no CUDA context, which would take GPU memory and a second.
    """

    def __init__(self, target: Any):
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0
