"""The runner's kernels: equal to their references on random batches, under the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret
from runner_cases import check


@loops_to_a_loaded_bound
def test_kernels_equal_their_references_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", "import interpreter, runner_cases; runner_cases.main()")
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.product(one_in=4)
@pytest.mark.parametrize("seed", range(60))
def test_kernels_equal_their_references_on_a_gpu(seed: int) -> None:
    check(seed, torch.device("cuda"))
