"""What a step pays for its workers being processes: a step there, its tokens back, by the rings and their encoding.

python -m compiled_engine.bench.executor_overhead OUTPUT.json
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compiled_engine.bench.machine import provenance
from compiled_engine.messages import RunnerOutput, SchedulerOutput
from compiled_engine.workers.ring import RingDescriptors, RingReader, RingWriter
from compiled_engine.workers.worker_wire import Step, decode_result, decode_to_worker, encode, encode_result

SIZES = (1, 8, 64, 256)
ROUNDS = 2000


def decodes(count: int) -> SchedulerOutput:
    """A step of so many decodes."""
    ids = [f"0:{number}" for number in range(count)]
    return SchedulerOutput(1, (), (), ids, [500 + n for n in range(count)], [1] * count, [True] * count, {})


def measure(count: int, steps: RingWriter, results: RingReader) -> dict[str, float]:
    """Microseconds, medians: of a round trip, and of the encoding in it."""
    step, output = decodes(count), RunnerOutput([100_000 + n for n in range(count)])
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
        found = [{"decodes": count, **measure(count, steps, results)} for count in SIZES]
        worker.kill()
    result = {"benchmark": "executor_overhead", **provenance(torch.device("cpu")), "steps": found}
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
