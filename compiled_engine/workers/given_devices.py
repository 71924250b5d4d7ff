"""What the keywords of `LLM` say of devices, before anybody has checked them, and without PyTorch.

Processes are launched by it that import while this one does. What is wrong with the keywords is said by others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiled_engine.workers.worker_child import visible_gpus

# More workers than that are launched once the options are known to be right.
_MOST_EARLY = 16
# Options that give the devices to other processes than the core's.
_SIZES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
_ELSEWHERE = ("multiprocess", "ray")


def given_device(options: Mapping[str, Any]) -> str:
    return str(options.get("device", "auto"))


def core_has_device(options: Mapping[str, Any]) -> bool:
    """Whether the process of the engine core has the device; False where replicas or workers have it."""
    sizes = [options.get(name, 1) for name in _SIZES]
    is_alone = all(type(size) is int and size == 1 for size in sizes)
    return is_alone and str(options.get("distributed_executor")) not in _ELSEWHERE


def num_early_workers(options: Mapping[str, Any]) -> int:
    """How many workers the engine has; 0 if it has none, or that is not plain."""
    sizes = [options.get(name, 1) for name in _SIZES]
    if not all(type(size) is int and 1 <= size <= _MOST_EARLY for size in sizes):
        return 0
    data, tensor, pipeline = sizes
    count, device = tensor * pipeline, given_device(options)
    executor = str(options.get("distributed_executor", "auto"))
    elsewhere = data > 1 or str(options.get("distributed_executor_backend")) not in ("None", "mp", "multiprocess")
    if elsewhere or count > _MOST_EARLY or not (executor == "multiprocess" or (executor == "auto" and count > 1)):
        return 0
    if device == "cpu":
        return count
    # Where no GPU is visible, "auto" is the CPU. With too few the engine does not start.
    return count if device in ("auto", "cuda") and len(visible_gpus(count)) in (0, count) else 0
