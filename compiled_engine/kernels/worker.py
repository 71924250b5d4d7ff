"""A process that compiles Triton kernels into Triton's folder: one JSON line in for each, one JSON line out."""

from __future__ import annotations

import importlib
import time
import traceback
from typing import Any

from compiled_engine.process.worker_process import messages_and_answer


def main() -> None:
    """First line: {"modules": [those to import]}; second: {"target": [backend, architecture, warp size]}; then
    {"module", "name", "specialization"} until the end, the last being what Triton's cache hook is handed.

    Answers {"ready": true}, then {"seconds": s} or {"error": text}.
    """
    messages, answer = messages_and_answer()
    import triton
    from triton.backends.compiler import GPUTarget

    for module in next(messages)["modules"]:
        importlib.import_module(module)

    answer({"ready": True})
    target = GPUTarget(*next(messages)["target"])
    triton.runtime.driver.set_active(_CompileOnly(target))
    for message in messages:
        start_s = time.perf_counter()
        try:
            getattr(importlib.import_module(message["module"]), message["name"]).preload(message["specialization"])
            answer({"seconds": time.perf_counter() - start_s})
        except Exception:
            answer({"error": traceback.format_exc()})


class _CompileOnly:
    """A driver for a GPU that this process does not touch: a CUDA context would take memory and a second."""

    def __init__(self, target: Any):
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0
