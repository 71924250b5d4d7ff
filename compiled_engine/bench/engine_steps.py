"""Single steps of a running engine, which no call of the public API shows: mixed batches, and a decode's kernels."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch

from compiled_engine.bench.bounds import Chunk
from compiled_engine.bench.workloads import random_prompts
from compiled_engine.config import EngineConfig
from compiled_engine.core.engine_core import EngineCore
from compiled_engine.llm import LLM
from compiled_engine.messages import EngineRequest
from compiled_engine.sampling.params import SamplingParams

# Steps before the first that counts: the decodes' prompts, and whatever runs ahead.
SETTLING_STEPS = 4
# Prompts of mixed steps that may be there at once: one is computed, others wait for their results to be taken in.
PROMPTS_IN_FLIGHT = 4
# Of a steady decode step; the first only settles.
STEP_SAMPLES = 4


def outputs_needed(num_steps: int) -> int:
    """Tokens that a request must be able to generate so as not to end while `num_steps` steps are measured."""
    return num_steps + 4 * SETTLING_STEPS


def mixed_chunks(num_decodes: int, decode_context: int, prompt_len: int, num_steps: int) -> list[Chunk]:
    """What `mixed_step_ms` has in its middle step, for a lower bound."""
    context = decode_context + 2 * SETTLING_STEPS + num_steps / 2
    return [Chunk(context, 1)] * num_decodes + [Chunk(0, prompt_len)]


def mixed_step_ms(
    llm: LLM, generator: random.Random, num_decodes: int, decode_context: int, prompt_len: int, num_steps: int
) -> float:
    """Time of a step in which `num_decodes` requests decode and one prompt of `prompt_len` tokens is computed.

    A steady state: the decodes run throughout, starting from `decode_context` tokens of prompt, and before each step
    one new prompt arrives, which is computed whole in one step, yields one token and ends. The figure is the wall time
    of `num_steps` such steps, with scheduling, sampling and output, divided by their number, in ms.
    """
    total_steps = num_steps + SETTLING_STEPS
    with decodes(llm, generator, num_decodes, decode_context, outputs_needed(num_steps)) as core:
        arriving = enumerate(random_prompts(llm, generator, [prompt_len] * total_steps))

        def steps(count: int) -> None:
            for number, prompt in islice(arriving, count):
                core.add(_request(f"prompt-{number}", prompt, 1))
                core.step()

        steps(SETTLING_STEPS)
        seconds = _wall_seconds(lambda: steps(num_steps), llm.config)
    return seconds / num_steps * 1e3


def decode_steps_ms(llm: LLM, generator: random.Random, num_requests: int, context: int, num_steps: int) -> list[float]:
    """Times of a steady step of `num_requests` decodes, which start from `context` tokens of prompt: STEP_SAMPLES times
    the wall time of `num_steps` steps one after another, with scheduling and output, divided by their number, in ms."""
    with decodes(llm, generator, num_requests, context, outputs_needed(STEP_SAMPLES * num_steps)) as core:

        def steps() -> None:
            for _ in range(num_steps):
                core.step()

        steps()
        return [_wall_seconds(steps, llm.config) / num_steps * 1e3 for _ in range(STEP_SAMPLES - 1)]


def decode_kernels(llm: LLM, generator: random.Random, context: int, num_steps: int) -> float | None:
    """Kernels that the device runs in one steady decode step of one request, copies not counted; None without CUDA, and
    where workers run them.

    Counted by the profiler over `num_steps` steps, and divided by their number.
    """
    if not _runs_on_gpu(llm.config):
        return None
    with decodes(llm, generator, 1, context, outputs_needed(num_steps)) as core:
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
    """What workers still compute then is a step at most, before and after."""
    if _runs_on_gpu(config):
        torch.cuda.synchronize(config.device)
    start = time.perf_counter()
    work()
    if _runs_on_gpu(config):
        torch.cuda.synchronize(config.device)
    return time.perf_counter() - start


def _runs_on_gpu(config: EngineConfig) -> bool:
    """Whether this process does."""
    return config.device.type == "cuda" and config.parallel.executor == "in_process"
