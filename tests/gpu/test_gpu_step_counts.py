"""What a step costs the host and the device on a GPU, in counts: launches, graphs, kernels, allocations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from compiled_engine.bench.engine_steps import decode_kernels, decodes
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]

NUM_STEPS = 4
# Of a step of decodes, in its graph: norm and qkv, rotation and write, attention and its combination, output, gate and
# up, down; around the layers: preparation, embedding, angles, head, sampling, advance.
KERNELS_A_LAYER, KERNELS_AROUND = 7, 8
# Beside a mixed step's graph: staged writes, rows, logits, tokens and their advance.
LAUNCHES_OF_A_MIXED_STEP = 12
LAUNCH = ("cudaLaunchKernel", "cuLaunchKernel")
ALLOCATION = ("cudaMalloc", "cudaHostAlloc", "cudaHostRegister", "cudaFree", "cuMemAlloc", "cuMemCreate", "cuMemMap")


@pytest.fixture(scope="module")
def graphed() -> Iterator[LLM]:
    sizes = {"capture_sizes": (1, 8, 64), "capture_token_sizes": (16, 64, 512)}
    with LLM(
        device="cuda", dtype="bfloat16", mode="graphed", graph_mode="full", num_blocks=2000, progress=False, **sizes
    ) as llm:
        yield llm


def host_calls(steps: Callable[[int], None]) -> Counter[str]:
    """The driver's functions that NUM_STEPS steps call, after as many others."""
    steps(NUM_STEPS)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        steps(NUM_STEPS)
    return Counter(event.name for event in profile.events())


def count(calls: Counter[str], prefixes: tuple[str, ...]) -> int:
    return sum(number for name, number in calls.items() if name.startswith(prefixes))


@pytest.mark.parametrize("num_requests", [1, 8, 50])
def test_a_decode_step_is_one_graph_and_at_most_one_launch(graphed: LLM, num_requests: int) -> None:
    """The launch puts new blocks into the tables, for all requests that have any."""
    with decodes(graphed, random.Random(0), num_requests, 32, 64) as core:

        def steps(number: int) -> None:
            for _ in range(number):
                core.step()

        calls = host_calls(steps)
    assert calls["cudaGraphLaunch"] == NUM_STEPS
    assert count(calls, LAUNCH) <= NUM_STEPS
    assert count(calls, ALLOCATION) == 0
    assert calls["cudaStreamSynchronize"] == 0


def test_a_decode_step_runs_seven_kernels_a_layer(graphed: LLM) -> None:
    most = KERNELS_A_LAYER * graphed.config.model.num_layers + KERNELS_AROUND
    kernels = decode_kernels(graphed, random.Random(0), 32, NUM_STEPS)
    assert kernels is not None
    assert kernels <= most


def test_a_mixed_step_is_one_graph_and_a_few_launches(graphed: LLM) -> None:
    """Whatever the number of layers: staged writes, then the graph, then rows, logits, tokens and their advance."""
    random_ = random.Random(0)
    prompts = [tuple(random_.randrange(4096) for _ in range(40)) for _ in range(2 * NUM_STEPS)]
    with decodes(graphed, random.Random(0), 8, 32, 64) as core:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

        def steps(number: int) -> None:
            for _ in range(number):
                core.add(EngineRequest(f"prompt-{len(prompts)}", prompts.pop(), params))
                core.step()

        calls = host_calls(steps)
    assert calls["cudaGraphLaunch"] == NUM_STEPS
    assert count(calls, LAUNCH) <= LAUNCHES_OF_A_MIXED_STEP * NUM_STEPS
    assert count(calls, ALLOCATION) == 0
