"""Attention of images whose tokens see each other, by every backend that computes it, against its definition."""

from __future__ import annotations

import json

import pytest
import torch
from attention_cases import wrong_images
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*(("torch", dtype) for dtype in DTYPES), ("cpp", torch.float32), ("cpp", torch.bfloat16)],
    ids=str,
)
def test_on_a_cpu(backend: str, dtype: torch.dtype) -> None:
    assert wrong_images(backend, "cpu", dtype) == {}


@loops_to_a_loaded_bound
def test_the_triton_kernel_in_the_interpreter() -> None:
    ran = interpret(__file__, "-c", "import interpreter, attention_cases; attention_cases.main_of_images('triton')")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout) == {}


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_on_a_gpu(backend: str, dtype: torch.dtype) -> None:
    assert wrong_images(backend, "cuda", dtype) == {}
