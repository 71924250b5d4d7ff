"""Random batches of attention in poisoned memory: what a backend does not write, it does not read."""

from __future__ import annotations

import json

import pytest
import torch
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret
from random_batches import random_case, verdict

COUNT, MORE = 24, 8
# A batch takes the interpreter much longer.
INTERPRETED = 12
# Each batch on a GPU compiles kernels of its own.
ON_A_GPU, PARTS = 6, 64


def seeds(config: pytest.Config, part: int, count: int = COUNT) -> range:
    """Return the seeds of a part; with --all, `MORE` times as many."""
    return range(1000 * part, 1000 * part + count * (MORE if config.getoption("--all") else 1))


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_on_a_cpu(backend: str, pytestconfig: pytest.Config) -> None:
    verdicts = [verdict(backend, random_case(seed, "small"), "cpu", torch.float32) for seed in seeds(pytestconfig, 0)]
    assert set(verdicts) <= {"right", "refused"}
    assert verdicts.count("right") > len(verdicts) // 3


@loops_to_a_loaded_bound
def test_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    numbers = seeds(pytestconfig, 1, INTERPRETED)
    run = interpret(__file__, "-m", "random_batches", str(numbers.start), str(len(numbers)))
    found = json.loads(run.stdout or "{}")
    assert found.get("wrong") == {}, run.stdout[-2000:] + run.stderr[-2000:]
    assert found["right"] > len(numbers) // 2
    assert found["poisoned"] == (not pytestconfig.getoption("--unpoisoned"))


@pytest.mark.gpu
@pytest.mark.product(one_in=12, each=("backend",))
@pytest.mark.parametrize("backend", ["triton", "flash_attn", "torch"])
@pytest.mark.parametrize("part", range(PARTS))
def test_on_a_gpu(part: int, backend: str) -> None:
    wrong = {}
    for seed in range(ON_A_GPU * part, ON_A_GPU * (part + 1)):
        case, dtype = random_case(seed, "large"), (torch.bfloat16, torch.float16)[seed % 2]
        text = verdict(backend, case, "cuda", dtype, captured=backend == "triton" and seed % 3 == 0)
        if text not in ("right", "refused"):
            wrong[case.name] = text
    assert wrong == {}
