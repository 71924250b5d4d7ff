"""The fused kernels of the passes against their plain-torch references, on random shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compiled_engine.passes import residual_rms_norm, silu_mul

SHAPES = [(1, 8), (2, 64), (7, 100), (64, 1024), (3, 4096), (513, 640), (5, 5120)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

INTERPRETED = """
import torch
from compiled_engine.passes import residual_rms_norm, silu_mul

generator = torch.Generator().manual_seed(0)
for tokens, width in [(1, 8), (3, 100), (5, 256)]:
    x, residual = (torch.randn(tokens, width, generator=generator) for _ in range(2))
    weight, gate_up = torch.randn(width, generator=generator), torch.randn(tokens, 2 * width, generator=generator)
    normed, total = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    block = 1 << (width - 1).bit_length()
    residual_rms_norm._kernel[(tokens,)](x, residual, weight, normed, total, width, 3e-5, BLOCK=block)
    expected = residual_rms_norm.reference(x, residual, weight, 3e-5)
    torch.testing.assert_close((normed, total), expected, rtol=1e-5, atol=1e-5)
    out = torch.full_like(x, float("nan"))
    silu_mul._kernel[(tokens, -(-width // 64))](gate_up, out, width, BLOCK=64)
    torch.testing.assert_close(out, silu_mul.reference(gate_up), rtol=1e-5, atol=1e-5)
print("right")
"""


def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "right", run.stderr[-2000:]


@pytest.mark.parametrize(
    ("kernel", "integers", "block"),
    [(residual_rms_norm._kernel, {"hidden_size"}, 4096), (silu_mul._kernel, {"width"}, 1024)],
)
def test_compiled_for_hopper(kernel: Any, integers: set[str], block: int) -> None:
    """Needs no GPU. The kernels' files are also read by Inductor, which knows only torch and triton names."""
    types = {"BLOCK": "constexpr", "eps": "fp32"} | dict.fromkeys(integers, "i32")
    signature = {name: types.get(name, "*bf16") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index("BLOCK"),): block})
    program = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "ptx" in program.asm


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_residual_rms_norm_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.randn(shape[1], device="cuda", dtype=dtype)
    got = residual_rms_norm.residual_rms_norm(x, residual, weight, 1e-6)
    expected = residual_rms_norm.reference(x, residual, weight, 1e-6)
    torch.testing.assert_close(got, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = torch.randn(shape[0], 2 * shape[1], device="cuda", dtype=dtype)
    expected = silu_mul.reference(gate_up)
    torch.testing.assert_close(silu_mul.silu_mul(gate_up), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
