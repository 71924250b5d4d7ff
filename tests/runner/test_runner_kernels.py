"""The runner's kernels: equal to their references on random batches, under the interpreter and on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from interpreter import interpreting, loops_to_a_loaded_bound
from runner_cases import check

from compiled_engine.runner.warm_up import MOST_MEMORY, sample_once
from compiled_engine.sampling.ranks import VocabularySlice


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


@pytest.mark.gpu
def test_a_sample_of_the_warm_up_leaves_nothing_to_be_written_later() -> None:
    """Its log-probabilities go to pinned memory, which others get as soon as it has returned."""
    device = torch.device("cuda")
    logits_RV = torch.zeros(2, 512, device=device)
    sample_once(MOST_MEMORY, logits_RV, VocabularySlice.of(512, None))  # compiles
    torch.cuda._sleep(100_000_000)
    sample_once(MOST_MEMORY, logits_RV, VocabularySlice.of(512, None))
    assert torch.cuda.current_stream().query()
