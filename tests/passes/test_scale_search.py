"""The kernel that searches scales of four-bit codes: those that plain PyTorch finds, to the bit."""

from __future__ import annotations

import pytest
import torch
import triton
from interpreting_process import interpret

from compiled_engine.kernels.scale_search import searched_scales
from compiled_engine.passes.framework.rounding import SEARCHED, SMALLEST_MAXIMUM, scales_of
from compiled_engine.quantisation import Rounding

ROUNDINGS = (Rounding("int4", 1, 128), Rounding("int4", 1, 32))
INTERPRETED = "import test_scale_search as tests; tests.check('cpu', (3, 40), (1, 128), (7, 256), (70, 300))"


def weights(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return normal numbers of several magnitudes, with a row of zeros, and an element whose square is 0 in float32."""
    generator = torch.Generator().manual_seed(sum(shape))
    found = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    found[-1] = 0
    found[0, 0] = 2.0**-120
    return found.to(dtype)


def check(device: str, *shapes: tuple[int, int]) -> None:
    for rounding in ROUNDINGS:
        for shape in shapes:
            for dtype in (torch.bfloat16, torch.float32):
                values_NK = weights(*shape, dtype=dtype)
                wanted_RC = scales_of(values_NK, rounding)
                if device == "cuda":
                    found_RC = scales_of(values_NK.cuda(), rounding)
                else:
                    padded = torch.nn.functional.pad(values_NK, (0, -shape[1] % rounding.columns))
                    factors = [size / rounding.largest for size in SEARCHED]
                    found_G = searched_scales(padded.reshape(-1, rounding.columns), factors, SMALLEST_MAXIMUM, 8)
                    found_RC = found_G.view(shape[0], -1)
                assert torch.equal(found_RC.cpu(), wanted_RC), (rounding, shape, dtype)


def test_kernel_in_the_interpreter() -> None:
    done = interpret(__file__, "-c", INTERPRETED)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
def test_kernel_on_a_gpu() -> None:
    check("cuda", (3, 40), (1, 128), (7, 256), (70, 300), (4096, 4096), (12_289, 1024))
    values_NK = weights(4, 256).cuda()
    values_NK[2, 130] = torch.nan
    assert scales_of(values_NK, ROUNDINGS[0]).isnan().tolist() == [
        [False, False],
        [False, False],
        [False, True],
        [False, False],
    ]
