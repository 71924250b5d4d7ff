"""Sampling in C++ gives the tokens of the reference in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import sampling_kernel_cases as cases
import torch

from compiled_engine.sampling import gumbel


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(("num_samples", "vocab_size"), [(1, 4099), (20, 77), (4, 151_936), (33, 16), (5, 47)])
def test_the_tokens_are_those_of_the_reference(num_samples: int, vocab_size: int, filtered: bool) -> None:
    cases.choose_matches("cpu", num_samples, vocab_size, torch.float32, filtered, gumbel.sample_in_cpp)


def test_draws_of_many_seeds_are_those_of_the_reference() -> None:
    """All logits are alike, so that the noise alone decides: also by its smallest and largest values."""
    rows, vocab_size = 500, 4096
    logits_SV = torch.zeros(rows, vocab_size)
    generator = torch.Generator().manual_seed(0)
    seeds_N = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    arguments = (torch.arange(rows, dtype=torch.int32), torch.arange(rows), torch.ones(rows), seeds_N, None)
    expected_S, got_S = torch.full((2, rows), -7)
    gumbel.sample(logits_SV, *arguments, expected_S)
    gumbel.sample_in_cpp(logits_SV, *arguments, got_S)
    assert got_S.tolist() == expected_S.tolist()
    assert len(np.unique(got_S.numpy())) > rows // 2
