"""What is made for a GPU beside the imports, and that a machine without one is none the worse."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from compiled_engine.kernels.triton_digest import triton_digest
from compiled_engine.process.cuda_context import cuda_context, index_of


@pytest.mark.parametrize(
    ("device", "index"),
    [(None, 0), ("auto", 0), ("cuda", 0), ("cuda:3", 3), ("cpu", None), ("cuda:x", None)],
)
def test_the_gpu_that_an_option_names(device: str | None, index: int | None) -> None:
    assert index_of(device) == index


def test_triton_is_digested_once() -> None:
    from triton.runtime.cache import triton_key

    assert triton_digest() is triton_digest()
    triton_digest().result()
    misses = triton_key.cache_info().misses
    triton_key()
    assert triton_key.cache_info().misses == misses


def test_a_gpu_that_is_not_there_has_no_context() -> None:
    assert cuda_context(torch.cuda.device_count()).result() is False


ON_A_GPU = """
from compiled_engine.process.cuda_context import cuda_context
made = cuda_context(0)
import torch
assert made.result()
assert float(torch.ones(3, device="cuda:0").sum()) == 3
"""


@pytest.mark.gpu
def test_torch_finds_the_context() -> None:
    subprocess.run([sys.executable, "-P", "-c", ON_A_GPU], check=True)
