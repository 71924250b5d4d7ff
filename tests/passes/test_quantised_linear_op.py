"""The kernels behind quantised_linear compute what its reference says, also in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from compiled_engine.passes.framework.rounding import weight_codes, weight_scales
from compiled_engine.passes.linear.quantised_kernels import library_obstacle
from compiled_engine.passes.linear.quantised_linear_op import launch, reference
from compiled_engine.quantisation import LinearScheme
from compiled_engine.quantisation_names import ONLINE

SCHEMES = (*ONLINE.values(), "e4m3 1x*, inputs e4m3 static", "e4m3 1x*", "e4m3 8x40, inputs e4m3 1x40")
ADDED = {
    "plain": {},
    "a norm": {"norm_weight_K": 1.0, "eps": 1e-6},
    "a residual": {"residual_TM": 1.0},
    "silu * up": {"silu_mul": True},
}


def arguments_of(scheme: str, dtype: torch.dtype, added: dict[str, float], device: str) -> dict[str, object]:
    T, N, K = 17, 256, 320
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    weight_NK = normal(N, K) / K**0.5
    sizes = {"norm_weight_K": (K,), "residual_TM": (T, N)}
    more = {name: normal(*sizes[name]).to(dtype) if name in sizes else value for name, value in added.items()}
    return {
        "x_TK": normal(T, K).to(dtype),
        "codes_NK": weight_codes(weight_NK, scheme),
        "scales_RC": weight_scales(weight_NK, scheme),
        "zeros_RC": None,
        "input_scale_1": torch.full((1,), 0.02, device=device) if "static" in scheme else None,
        "bias_N": normal(N).to(dtype),
        "scheme": scheme,
    } | more


@pytest.mark.gpu
@pytest.mark.product(one_in=1000, each=("scheme", "added"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_compute_the_reference(scheme: str, added: str, dtype: torch.dtype) -> None:
    arguments = arguments_of(scheme, dtype, ADDED[added], "cuda")
    expected = reference(**arguments).float()
    launch(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = launch(**arguments)
    graph.replay()
    # One step of bfloat16 in the norm may round a code of the inputs the other way.
    tolerance = 0.03 if dtype == torch.bfloat16 else 0.005
    assert float((found.float() - expected).abs().max()) <= tolerance * float(expected.abs().max())


def test_the_library_takes_whole_rows_and_even_sizes() -> None:
    def obstacle(scheme: str, k: int = 64, rows: int = 32, dtype: torch.dtype = torch.bfloat16) -> str:
        return library_obstacle(k, rows, LinearScheme.parse(scheme), dtype) or ""

    assert obstacle(ONLINE["fp8"]) == obstacle("e4m3 1x*, inputs e4m3 static") == ""
    assert "whole rows" in obstacle(ONLINE["fp8_block"])
    assert "not rounded" in obstacle("e4m3 1x*")
    assert "multiples of 16" in obstacle(ONLINE["fp8"], k=40)
    assert "multiples of 16" in obstacle(ONLINE["fp8"], rows=40)
    assert "float16" in obstacle(ONLINE["fp8"], dtype=torch.float16)
