"""The kernels of drafts: equal to their references on random batches, in the interpreter and on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from draft_kernel_cases import check
from interpreter import interpreting, loops_to_a_loaded_bound


@loops_to_a_loaded_bound
def test_kernels_equal_their_references_in_the_interpreter() -> None:
    environment = interpreting(__file__)
    run = subprocess.run(
        [sys.executable, "-m", "draft_kernel_cases"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
def test_kernels_equal_their_references_on_a_gpu(part: int) -> None:
    for seed in range(part * 30, part * 30 + 30):
        check(seed, torch.device("cuda"))
