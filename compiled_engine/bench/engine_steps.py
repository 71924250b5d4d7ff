"""Measure single engine steps, below the public API: mixed steps, decode steps, their kernels, and their time split."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from compiled_engine.bench.bounds import Chunk
from compiled_engine.bench.workloads import random_prompts, summary
from compiled_engine.config import EngineConfig
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.llm import LLM
from compiled_engine.process.progress import Progress
from compiled_engine.sampling.params import SamplingParams

# Uncounted first steps, which compute the decodes' prompts and fill the asynchronous pipeline.
SETTLING_STEPS = 4
# Prompts present at once in mixed steps: one is computed, and others' results are still to be processed.
PROMPTS_IN_FLIGHT = 4
# Samples of an unchanged decode step; the first is a warm-up.
STEP_SAMPLES = 4


def outputs_needed(num_steps: int, max_new_tokens_per_step: int = 1) -> int:
    """Return how many output tokens a request needs so that it does not end while `num_steps` steps are measured.

    Each step may yield `max_new_tokens_per_step` tokens.
    """
    return (num_steps + 4 * SETTLING_STEPS) * max_new_tokens_per_step


def mixed_chunks(num_decodes: int, decode_context: int, prompt_len: int, num_steps: int) -> list[Chunk]:
    """Return the chunks, one per request, of an average step that `mixed_step_ms` measures with the same arguments.

    The lower bound of a step's time is computed from these chunks.
    """
    context = decode_context + 2 * SETTLING_STEPS + num_steps / 2
    return [Chunk(context, 1)] * num_decodes + [Chunk(0, prompt_len)]


def mixed_step_ms(
    llm: LLM, generator: random.Random, num_decodes: int, decode_context: int, prompt_len: int, num_steps: int
) -> float:
    """Return the time of a step with `num_decodes` decodes and the prefill of one prompt of `prompt_len` tokens.

    The decodes run throughout, after prompts of `decode_context` tokens. Before each step a new prompt arrives, which
    is computed in that step, yields one token and ends. The figure is the wall time of `num_steps` steps, with
    scheduling, sampling and output, divided by their number, in ms.
    """
    total_steps = num_steps + SETTLING_STEPS
    output_len = outputs_needed(num_steps, llm.config.max_new_tokens_per_step)
    with decodes(llm, generator, num_decodes, decode_context, output_len) as core:
        arriving = enumerate(random_prompts(llm, generator, [prompt_len] * total_steps))

        def steps(count: int) -> None:
            for number, prompt in islice(arriving, count):
                core.add(_request(f"prompt-{number}", prompt, 1))
                core.step()

        steps(SETTLING_STEPS)
        seconds = _wall_seconds(lambda: steps(num_steps), llm.config)
    return seconds / num_steps * 1e3


def decode_steps_ms(llm: LLM, generator: random.Random, num_requests: int, context: int, num_steps: int) -> list[float]:
    """Return STEP_SAMPLES - 1 times of a decode step in ms, for `num_requests` requests with `context` prompt tokens.

    Each time is the wall time of `num_steps` consecutive steps, with scheduling and output, divided by their number.
    """
    output_len = outputs_needed(STEP_SAMPLES * num_steps, llm.config.max_new_tokens_per_step)
    with decodes(llm, generator, num_requests, context, output_len) as core:

        def steps() -> None:
            for _ in range(num_steps):
                core.step()

        steps()
        return [_wall_seconds(steps, llm.config) / num_steps * 1e3 for _ in range(STEP_SAMPLES - 1)]


def decode_kernels(llm: LLM, generator: random.Random, context: int, num_steps: int) -> float | None:
    """Return the number of kernels in a decode step of one request, without copies.

    It is a mean over `num_steps` steps, from PyTorch's profiler. None without CUDA or with worker processes.
    """
    if not _runs_on_gpu(llm.config):
        return None
    with decodes(llm, generator, 1, context, outputs_needed(num_steps, llm.config.max_new_tokens_per_step)) as core:
        torch.cuda.synchronize(llm.config.device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(num_steps):
                core.step()
            torch.cuda.synchronize(llm.config.device)
    kernels = [
        event
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return len(kernels) / num_steps


@contextmanager
def decodes(
    llm: LLM, generator: random.Random, num_requests: int, context: int, output_len: int
) -> Iterator[EngineCore]:
    """Yield the engine core while num_requests requests decode. These requests are aborted after the block.

    context: prompt tokens of each request. output_len: the most tokens that each request generates.
    """
    core = llm.core
    prompts = random_prompts(llm, generator, [context] * num_requests)
    requests = [_request(f"decode-{i}", prompt, output_len) for i, prompt in enumerate(prompts)]
    try:
        for request in requests:
            core.add(request)
        prefills = -(-num_requests * context // llm.config.scheduler.max_num_batched_tokens)
        for _ in range(prefills + SETTLING_STEPS):
            core.step()
        yield core
    finally:
        for request in requests:
            core.abort(request.request_id)
        while core.has_unfinished():
            core.step()


def _request(request_id: str, prompt: Sequence[int], output_len: int) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    return EngineRequest(request_id, tuple(prompt), params)


def _wall_seconds(work: Callable[[], None], config: EngineConfig) -> float:
    """Return the wall time of `work` in seconds, until the device is idle.

    With worker processes the device is not waited for, so earlier and later steps may overlap with `work`.
    """
    if _runs_on_gpu(config):
        torch.cuda.synchronize(config.device)
    start = time.perf_counter()
    work()
    if _runs_on_gpu(config):
        torch.cuda.synchronize(config.device)
    return time.perf_counter() - start


def _runs_on_gpu(config: EngineConfig) -> bool:
    return config.device.type == "cuda" and config.parallel.executor == "in_process"


CONTEXT = 128
# The parts of a step on the host, in order. `wait` waits for the device.
LAPS = ("schedule", "prepare", "launch", "wait", "output")


def step_split(
    llm: LLM, batch_sizes: Sequence[int], num_steps: int, warm_up: int, repeats: int, progress: Progress
) -> list[dict[str, Any]]:
    """Return a record for each batch size that says how the time of a decode step is spent.

    A record has microseconds per step for each of LAPS, the parts of the host's work (schedule, prepare, launch, wait,
    output), for `host` (all of these except wait), `step` (wall time) and `device` (first to last kernel; None without
    CUDA). `device_idle` is the share of wall time without a step on the device. With drafts, `tokens` is the number of
    tokens per step and request, and `token` the microseconds per token; otherwise both are None.

    Each figure has median and spread over `repeats` rounds, after `warm_up` uncounted rounds. A round's figure is the
    mean over `num_steps` steps.
    """
    found = []
    for batch_size in batch_sizes:
        generator = random.Random(llm.config.model.seed)
        samples = []
        with progress.stage("measure", total=warm_up + repeats) as advance:
            for _ in range(warm_up + repeats):
                samples.append(_sample(llm, generator, batch_size, num_steps))
                advance(1)
        samples = samples[warm_up:]
        record: dict[str, Any] = {"batch_size": batch_size}
        for name in samples[0]:
            values = [value for sample in samples if (value := sample[name]) is not None]
            record[name] = summary(values) if values else None
        found.append(record)
    return found


def _sample(llm: LLM, generator: random.Random, batch_size: int, num_steps: int) -> dict[str, float | None]:
    most = llm.config.max_new_tokens_per_step
    with decodes(llm, generator, batch_size, CONTEXT, outputs_needed(2 * num_steps, most)) as core:
        for _ in range(num_steps):
            core.step()
        before = llm.metrics()["accepted_tokens"]
        core.clock.start()
        for _ in range(num_steps):
            core.step()
        core.clock.stop()
        device_s = core.clock.device_seconds() if llm.config.device.type == "cuda" else None
        found = split(core.clock.host_seconds(), device_s, num_steps)
        tokens = 1 + (llm.metrics()["accepted_tokens"] - before) / (num_steps * batch_size)
    assert found["step"] is not None
    by_token = (tokens, found["step"] / tokens) if most > 1 else (None, None)
    return found | dict(zip(("tokens", "token"), by_token, strict=True))


def draft_choice(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that show how the engine chooses the number of drafts, and their sharpness.

    Sharpness is a factor on the logits from which drafts are sampled. Returns {} for an engine that chooses neither. If
    requests have stopped drafting, their number is included as `rested`.
    """
    of_length = ("draft_lengths", "draft_shares", "draft_step_ms", "draft_length_chosen")
    names = (*of_length, "draft_sharpness", "draft_sharpness_shares")
    choice = {name: metrics[name] for name in names if name in metrics}
    return choice | ({"rested": metrics["rested"]} if metrics["rested"] else {})


def split(host_s: dict[str, float], device_s: float | None, num_steps: int) -> dict[str, float | None]:
    """Return a round's figures, see `step_split`, from the seconds that all its steps took.

    host_s: seconds on the host by lap. device_s: seconds on the device; None without CUDA.
    """
    laps = {name: host_s.get(name, 0.0) for name in LAPS}
    wall = sum(laps.values())
    found: dict[str, float | None] = {name: seconds / num_steps * 1e6 for name, seconds in laps.items()}
    found["host"] = (wall - laps["wait"]) / num_steps * 1e6
    found["step"] = wall / num_steps * 1e6
    found["device"] = None if device_s is None else device_s / num_steps * 1e6
    found["device_idle"] = None if device_s is None else max(0.0, 1 - device_s / wall)
    return found


def profile(llm: LLM, batch_size: int, num_steps: int, path: str) -> None:
    """Write a trace of `num_steps` decode steps on host and device to `path`, for Perfetto or chrome://tracing."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if llm.config.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with (
        decodes(
            llm,
            random.Random(0),
            batch_size,
            CONTEXT,
            outputs_needed(2 * num_steps, llm.config.max_new_tokens_per_step),
        ) as core,
        torch.profiler.profile(activities=activities) as profiler,
    ):
        for _ in range(num_steps):
            core.step()
        if llm.config.device.type == "cuda":
            torch.cuda.synchronize(llm.config.device)
    profiler.export_chrome_trace(path)
