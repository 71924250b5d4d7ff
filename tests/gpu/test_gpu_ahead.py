"""What is made for a GPU beside the imports, and that a machine without one is none the worse."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from compiled_engine.kernels.compile_ahead import triton_digests
from compiled_engine.process.init_cuda import cuda_context, index_of


@pytest.mark.parametrize(
    ("device", "index"),
    [(None, 0), ("auto", 0), ("cuda", 0), ("cuda:3", 3), ("cpu", None), ("cuda:x", None)],
)
def test_the_gpu_that_an_option_names(device: str | None, index: int | None) -> None:
    assert index_of(device) == index


def test_what_is_not_there_is_no_error() -> None:
    missing = torch.device("cuda", torch.cuda.device_count())
    assert cuda_context(missing.index).result() is False
    triton_digests(missing).result()


def test_triton_is_digested_once() -> None:
    from triton.runtime.cache import triton_key

    device = torch.device("cuda", torch.cuda.device_count())
    assert triton_digests(device) is triton_digests(device)
    triton_digests(device).result()
    misses = triton_key.cache_info().misses
    triton_key()
    assert triton_key.cache_info().misses == misses


ON_A_GPU = """
from compiled_engine.process.init_cuda import cuda_context
made = cuda_context(0)
import torch
assert made.result()
assert float(torch.ones(3, device="cuda:0").sum()) == 3
"""


@pytest.mark.gpu
def test_torch_goes_on_with_what_was_made() -> None:
    subprocess.run([sys.executable, "-P", "-c", ON_A_GPU], check=True)
