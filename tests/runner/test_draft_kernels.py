"""The kernels of drafts: equal to their references on random batches, in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from draft_kernel_cases import check
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret


@loops_to_a_loaded_bound
def test_kernels_equal_their_references_in_the_interpreter() -> None:
    run = interpret(__file__, "-m", "draft_kernel_cases")
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
def test_kernels_equal_their_references_on_a_gpu(part: int) -> None:
    for seed in range(part * 30, part * 30 + 30):
        check(seed, torch.device("cuda"))
