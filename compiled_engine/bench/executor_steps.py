"""What a decode step pays for running in a worker process: two engines on one device, measured in turns."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_engine.bench.engine_steps import STEP_SAMPLES, decode_steps_ms, outputs_needed
from compiled_engine.bench.workloads import summary
from compiled_engine.llm import LLM
from compiled_engine.other_engines.translate import make_options
from compiled_engine.process.progress import Progress
from compiled_engine.resolve.engine import resolve

CONTEXT = 128
EXECUTORS = ("in_process", "multiprocess")


def options_for(options: Mapping[str, Any], most_requests: int, num_steps: int) -> dict[str, Any]:
    """The options of both engines: with a KV cache that is no larger than the measurement needs, as both have one.
    Raises ValueError for options of several devices."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if options.get(name, 1) != 1:
            raise ValueError(
                f"{name} is {options[name]}; allowed: 1, since one device is needed without workers as well"
            )
    if "distributed_executor" in options:
        given = options["distributed_executor"]
        raise ValueError(f"distributed_executor is {given!r}; allowed: none, since both ways are measured")
    block_size = resolve(make_options(options)).cache.block_size
    longest = CONTEXT + outputs_needed(STEP_SAMPLES * num_steps)
    num_blocks = 1 + most_requests * -(-longest // block_size)
    return {"num_blocks": num_blocks, "max_num_seqs": most_requests} | dict(options)


def compare_executors(
    options: Mapping[str, Any], sizes: Sequence[int], num_steps: int, repeats: int, progress: Progress
) -> list[dict[str, Any]]:
    """For each number of decodes: batch_size; by executor the time of a step in ms, median and spread; by how much the
    median of the worker's steps is longer, in microseconds and as a ratio.

    A round is a number of steps of each engine; rounds alternate between the two, the first does not count.
    """
    found: dict[tuple[int, str], list[float]] = {(size, name): [] for size in sizes for name in EXECUTORS}
    with (
        LLM(**options, distributed_executor="in_process", progress=False) as own,
        LLM(**options, distributed_executor="multiprocess", progress=False) as worker,
        progress.stage("measure", total=repeats + 1) as advance,
    ):
        for number in range(repeats + 1):
            for size in sizes:
                for name, llm in zip(EXECUTORS, (own, worker), strict=True):
                    times = decode_steps_ms(llm, random.Random(number), size, CONTEXT, num_steps)
                    found[size, name] += times if number else []
            advance(1)
    return [_record(size, {name: found[size, name] for name in EXECUTORS}) for size in sizes]


def _record(size: int, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    own, worker = (statistics.median(times[name]) for name in EXECUTORS)
    return {
        "batch_size": size,
        **{f"{name}_ms": summary(times[name]) for name in EXECUTORS},
        "longer_us": (worker - own) * 1e3,
        "ratio": worker / own,
    }
