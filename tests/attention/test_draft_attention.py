"""Attention of decodes with drafts, a row for each token: right in every backend, and packed into tiles in Triton."""

from __future__ import annotations

import pytest
import torch
from draft_attention_cases import SHAPES, WIDE, wrong
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret

from compiled_engine.attention.backends.triton_decode import queries_of_tile


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_on_a_cpu(backend: str) -> None:
    assert [found for seed in range(12) if (found := wrong(backend, seed, torch.float32, "cpu"))] == []


@loops_to_a_loaded_bound
def test_triton_in_the_interpreter() -> None:
    run = interpret(__file__, "-m", "draft_attention_cases")
    assert run.stdout.strip() == "right", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.product(one_in=8, each=("seed",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(24))
def test_triton_on_cuda(dtype: torch.dtype, seed: int) -> None:
    assert wrong("triton", seed, dtype, "cuda", shapes=(*SHAPES, *WIDE), longest=5000) is None


@pytest.mark.gpu
@pytest.mark.product(one_in=2, each=("longest",))
@pytest.mark.parametrize("longest", [200, 500])
@pytest.mark.parametrize("seed", range(100, 110))
def test_triton_on_cuda_with_short_contexts(seed: int, longest: int) -> None:
    """One program reads all keys of a request, unless requests are few."""
    assert wrong("triton", seed, torch.bfloat16, "cuda", longest=longest) is None


@pytest.mark.parametrize(
    ("query_len", "group", "size", "expected", "expected_of_wide"),
    [
        *((4, 4, 2, 4, 4), (4, 1, 2, 4, 4), (65, 1, 2, 64, 32), (65, 8, 2, 8, 4), (65, 8, 4, 4, 2)),
        *((3, 32, 2, 2, 1), (2, 128, 2, 1, 1)),
    ],
)
def test_a_tile_has_as_many_queries_as_fit(
    query_len: int, group: int, size: int, expected: int, expected_of_wide: int
) -> None:
    assert queries_of_tile(query_len, group, 256, size) == expected
    assert queries_of_tile(query_len, group, 264, size) == expected_of_wide
