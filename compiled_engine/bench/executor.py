"""The price of worker processes, measured in two ways.

`bench executor` times a decode step of two engines on one device, in this process and in a worker. This program times a
step's way through the rings and its encoding alone:

python -m compiled_engine.bench.executor OUTPUT.json
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_engine.bench.engine_steps import STEP_SAMPLES, decode_steps_ms, outputs_needed
from compiled_engine.bench.results import provenance
from compiled_engine.bench.workloads import summary
from compiled_engine.llm import LLM
from compiled_engine.messages import RunnerOutput, SchedulerOutput
from compiled_engine.other_engines.translate import make_options
from compiled_engine.process.progress import Progress
from compiled_engine.processes.ring import RingDescriptors, RingReader, RingWriter
from compiled_engine.processes.wire import Step, decode_result, decode_to_worker, encode, encode_result
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


SIZES = (1, 8, 64, 256)
ROUNDS = 2000


def step_of_decodes(count: int) -> SchedulerOutput:
    """A step of so many decodes."""
    ids = [f"0:{number}" for number in range(count)]
    return SchedulerOutput(1, (), (), ids, [500 + n for n in range(count)], [1] * count, [True] * count, {})


def measure_rings(count: int, steps: RingWriter, results: RingReader) -> dict[str, float]:
    """Microseconds, medians: of a round trip, and of the encoding in it."""
    step, output = step_of_decodes(count), RunnerOutput([100_000 + n for n in range(count)])
    sent, answered = encode(Step(step)), encode_result(output)

    def round_trip() -> None:
        steps.write(encode(Step(step)))
        decode_result(results.read())

    return {
        "round_trip_us": _median_us(round_trip),
        "encode_step_us": _median_us(lambda: encode(Step(step))),
        "decode_step_us": _median_us(lambda: decode_to_worker(sent)),
        "encode_result_us": _median_us(lambda: encode_result(output)),
        "decode_result_us": _median_us(lambda: decode_result(answered)),
        "step_bytes": len(sent),
        "result_bytes": len(answered),
    }


def _median_us(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def echo() -> None:
    """The worker's part, in a process of its own: take a step in, give as many tokens out. Until it is killed."""
    memory, bell, results_memory, results_bell = map(int, sys.argv[1:])
    steps = RingReader(RingDescriptors(memory, (bell,)))
    results = RingWriter(RingDescriptors(results_memory, (results_bell,)), lambda: None)
    while True:
        message = decode_to_worker(steps.read())
        assert isinstance(message, Step)
        results.write(encode_result(RunnerOutput([100_000 + n for n in range(len(message.step.request_ids))])))


def main() -> None:
    rings = RingDescriptors.make(1), RingDescriptors.make(1)
    passed = [number for ring in rings for number in (ring.memory, *ring.bells)]
    with subprocess.Popen(
        [sys.executable, "-c", f"from {__spec__.name} import echo; echo()", *map(str, passed)], pass_fds=passed
    ) as worker:
        steps, results = RingWriter(rings[0], lambda: None), RingReader(rings[1])
        found = [{"decodes": count, **measure_rings(count, steps, results)} for count in SIZES]
        worker.kill()
    result = {"benchmark": "executor_overhead", **provenance(torch.device("cpu")), "steps": found}
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
