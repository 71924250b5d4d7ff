"""The runner's kernels: equal to their references on random batches, under the interpreter and on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from interpreter import interpreting, loops_to_a_loaded_bound
from runner_cases import check


@loops_to_a_loaded_bound
def test_kernels_equal_their_references_in_the_interpreter() -> None:
    environment = interpreting(__file__)
    run = subprocess.run(
        [sys.executable, "-c", "import interpreter, runner_cases; runner_cases.main()"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_kernels_equal_their_references_on_a_gpu(seed: int) -> None:
    check(seed, torch.device("cuda"))
