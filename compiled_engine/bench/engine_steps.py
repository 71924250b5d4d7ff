"""Single steps of a running engine, which no call of the public API shows: mixed batches, decodes, their kernels, and
where a decode step's time goes."""

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

# Steps before the first that counts: the decodes' prompts, and whatever runs ahead.
SETTLING_STEPS = 4
# Prompts of mixed steps that may be present at once: one is computed, others wait for their results to be processed.
PROMPTS_IN_FLIGHT = 4
# Samples of an unchanged decode step; the first is a warm-up.
STEP_SAMPLES = 4


def outputs_needed(num_steps: int, max_new_tokens_per_step: int = 1) -> int:
    """Tokens that a request must be able to generate so as not to end while `num_steps` steps are measured, each of
    which may yield max_new_tokens_per_step."""
    return (num_steps + 4 * SETTLING_STEPS) * max_new_tokens_per_step


def mixed_chunks(num_decodes: int, decode_context: int, prompt_len: int, num_steps: int) -> list[Chunk]:
    """The middle step of `mixed_step_ms`, for a lower bound."""
    context = decode_context + 2 * SETTLING_STEPS + num_steps / 2
    return [Chunk(context, 1)] * num_decodes + [Chunk(0, prompt_len)]


def mixed_step_ms(
    llm: LLM, generator: random.Random, num_decodes: int, decode_context: int, prompt_len: int, num_steps: int
) -> float:
    """Time of a step in which `num_decodes` requests decode and one prompt of `prompt_len` tokens is computed.

    The decodes run throughout, starting from `decode_context` tokens of prompt. Before each step one new prompt
    arrives, is computed in one step, yields one token and ends. The figure is the wall time of `num_steps` steps, with
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
    """Return times of a step of `num_requests` unchanged decodes, which start from `context` tokens of prompt:
    STEP_SAMPLES times the wall time of `num_steps` consecutive steps, with scheduling and output, divided by their
    number, in ms."""
    output_len = outputs_needed(STEP_SAMPLES * num_steps, llm.config.max_new_tokens_per_step)
    with decodes(llm, generator, num_requests, context, output_len) as core:

        def steps() -> None:
            for _ in range(num_steps):
                core.step()

        steps()
        return [_wall_seconds(steps, llm.config) / num_steps * 1e3 for _ in range(STEP_SAMPLES - 1)]


def decode_kernels(llm: LLM, generator: random.Random, context: int, num_steps: int) -> float | None:
    """Return the kernels of a decode step of one request, copies not counted; None without CUDA, and with workers.

    Counted by the profiler over `num_steps` steps, and divided by their number.
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
    """The engine's core while this many requests decode; they end with the block."""
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
    """Time some work, to the end of the device's. Workers may still compute a step, before and after."""
    if _runs_on_gpu(config):
        torch.cuda.synchronize(config.device)
    start = time.perf_counter()
    work()
    if _runs_on_gpu(config):
        torch.cuda.synchronize(config.device)
    return time.perf_counter() - start


def _runs_on_gpu(config: EngineConfig) -> bool:
    """Return whether this process runs the steps."""
    return config.device.type == "cuda" and config.parallel.executor == "in_process"


CONTEXT = 128
# The host's laps in their order; `wait` is for the device.
LAPS = ("schedule", "prepare", "launch", "wait", "output")


def step_split(
    llm: LLM, batch_sizes: Sequence[int], num_steps: int, warm_up: int, repeats: int, progress: Progress
) -> list[dict[str, Any]]:
    """Return for each batch size: microseconds a step of each lap, `host` (all but wait), `step` (wall), `device`
    (first to last kernel; None without CUDA), and `device_idle`, the share of the wall time in which no step was on the
    device; with drafts `tokens`, how many a step yields for a request, and `token`, microseconds for each; else None.
    Each is the median and the spread of `repeats` rounds, which are means over num_steps steps; `warm_up` rounds before
    them do not count."""
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
    """Return those of an engine's metrics that the number of drafts and their sharpness are chosen by, and how many
    requests have come to rest, if any; none if they are fixed."""
    of_length = ("draft_lengths", "draft_shares", "draft_step_ms", "draft_length_chosen")
    names = (*of_length, "draft_sharpness", "draft_sharpness_shares")
    choice = {name: metrics[name] for name in names if name in metrics}
    return choice | ({"rested": metrics["rested"]} if metrics["rested"] else {})


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
    """Write a trace of some decode steps, host and device, for Perfetto or chrome://tracing."""
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
