"""A steady decode step split into what the host does, and how much of it the device works."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from compiled_engine.bench.engine_steps import decodes, outputs_needed
from compiled_engine.bench.workloads import Rounds, repeated, summary
from compiled_engine.llm import LLM
from compiled_engine.process.progress import Progress

CONTEXT = 128
# The host's laps in their order; `wait` is for the device.
LAPS = ("schedule", "prepare", "launch", "wait", "output")


def step_split(
    llm: LLM, batch_sizes: Sequence[int], num_steps: int, rounds: Rounds, progress: Progress
) -> list[dict[str, Any]]:
    """For each batch size: microseconds a step of each lap, `host` (all but wait), `step` (wall), `device` (first to
    last kernel; None without CUDA), and `device_idle`, the share of the wall time in which no step was on the device;
    each as median and spread of the rounds, which are means over num_steps steps."""
    found = []
    for batch_size in batch_sizes:
        once = partial(_sample, llm, random.Random(rounds.seed), batch_size, num_steps)
        samples = repeated(once, rounds, progress)
        record: dict[str, Any] = {"batch_size": batch_size}
        for name in samples[0]:
            values = [value for sample in samples if (value := sample[name]) is not None]
            record[name] = summary(values) if values else None
        found.append(record)
    return found


def _sample(llm: LLM, generator: random.Random, batch_size: int, num_steps: int) -> dict[str, float | None]:
    with decodes(llm, generator, batch_size, CONTEXT, outputs_needed(2 * num_steps)) as core:
        for _ in range(num_steps):
            core.step()
        core.clock.start()
        for _ in range(num_steps):
            core.step()
        core.clock.stop()
        device_s = core.clock.device_seconds() if llm.config.device.type == "cuda" else None
        return split(core.clock.host_seconds(), device_s, num_steps)


def split(host_s: dict[str, float], device_s: float | None, num_steps: int) -> dict[str, float | None]:
    """Microseconds a step, and the share in which the device was idle."""
    laps = {name: host_s.get(name, 0.0) for name in LAPS}
    wall = sum(laps.values())
    found: dict[str, float | None] = {name: seconds / num_steps * 1e6 for name, seconds in laps.items()}
    found["host"] = (wall - laps["wait"]) / num_steps * 1e6
    found["step"] = wall / num_steps * 1e6
    found["device"] = None if device_s is None else device_s / num_steps * 1e6
    found["device_idle"] = None if device_s is None else max(0.0, 1 - device_s / wall)
    return found


def profile(llm: LLM, batch_size: int, num_steps: int, path: str) -> None:
    """A trace of some steady decode steps, host and device, for Perfetto or chrome://tracing."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if llm.config.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with (
        decodes(llm, random.Random(0), batch_size, CONTEXT, outputs_needed(2 * num_steps)) as core,
        torch.profiler.profile(activities=activities) as profiler,
    ):
        for _ in range(num_steps):
            core.step()
        if llm.config.device.type == "cuda":
            torch.cuda.synchronize(llm.config.device)
    profiler.export_chrome_trace(path)
