"""Linears of codes in batch-invariant engines: right, and the same bits for a row whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret
from quantised_linear_cases import BY_BLOCKS, BY_ROWS, Case, arguments_of

from compiled_engine.passes.linear.invariant_quantised import launch, reference

SCHEMES = (BY_ROWS, BY_BLOCKS, "e4m3 1x*, inputs e4m3 static", "int8 1x*, inputs int8 1x*")
SMALL = (Case(70, 96, 320, bias=True), Case(67, 128, 256, silu_mul=True))
LARGE = (
    *(Case(600, 6144, 4096), Case(600, 4096, 4096, bias=True)),
    *(Case(600, 24576, 4096, silu_mul=True), Case(600, 4096, 12288)),
)


def check_bits(case: Case, scheme: str, dtype: torch.dtype, device: str, counts: tuple[int, ...]) -> None:
    """Assert that rows of a product have the same bits in products of these numbers of rows."""
    given = arguments_of(case, scheme, dtype, device)
    x_TK, activation = given["x_TK"], "silu" if case.silu_mul else None
    weight = *(given[name] for name in ("codes_NK", "scales_RC", "input_scale_1", "bias_N")), scheme, activation
    whole = launch(x_TK, *weight)
    expected = reference(x_TK, *weight)
    error = (whole.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= (1e-3 if dtype == torch.float32 else 2e-2), (case, scheme, error)
    for count in counts:
        first = (case.num_tokens - count) // 2
        assert torch.equal(launch(x_TK[first : first + count], *weight), whole[first : first + count]), (case, count)


def check_interpreted() -> None:
    for case in SMALL:
        for scheme in SCHEMES:
            check_bits(case, scheme, torch.float32, "cpu", (1, 17))
    print("right")


@loops_to_a_loaded_bound
def test_kernels_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", "from test_invariant_quantised import check_interpreted; check_interpreted()")
    assert run.stdout == "right\n", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=str)
def test_on_cuda(case: Case, scheme: str) -> None:
    counts = tuple(count for count in (1, 2, 8, 33, 64, 65, 128, 129, 300, 520) if count < case.num_tokens)
    check_bits(case, scheme, torch.bfloat16, "cuda", counts)
