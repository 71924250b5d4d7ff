"""Linears of codes in batch-invariant engines: right, and the same bits for a row whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret
from quantised_linear_cases import BY_BLOCKS, BY_ROWS, Case, arguments_of

from compiled_engine.passes.linear import round_inputs
from compiled_engine.passes.linear.hopper_codes import CodesTiles, codes_tiles
from compiled_engine.passes.linear.hopper_linear import HopperTiles
from compiled_engine.passes.linear.hopper_quantised import quantised_tiles
from compiled_engine.passes.linear.invariant_quantised import COUNTS, MOST, launch, on_hopper, reference
from compiled_engine.quantisation import LinearScheme

SCHEMES = (BY_ROWS, BY_BLOCKS, "e4m3 1x*, inputs e4m3 static", "int8 1x*, inputs int8 1x*")
SMALL = (Case(70, 96, 320, bias=True), Case(67, 128, 256, silu_mul=True))
LARGE = (
    *(Case(2100, 6144, 4096), Case(600, 4096, 4096, bias=True), Case(2100, 4096, 4096), Case(600, 1024, 1024)),
    *(Case(2100, 24576, 4096, silu_mul=True), Case(2100, 4096, 12288)),
)


def check_bits(case: Case, scheme: str, dtype: torch.dtype, device: str, counts: tuple[int, ...]) -> None:
    """Assert that rows of a product, whose inputs are rounded before, have the same bits in products of fewer rows."""
    given = arguments_of(case, scheme, dtype, device)
    parsed, name = LinearScheme.parse(scheme), str(dtype).removeprefix("torch.")
    assert parsed.inputs is not None
    weight = *(given[name] for name in ("codes_NK", "scales_RC", "bias_N")), scheme, name
    activation = "silu" if case.silu_mul else None

    def rounded(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return round_inputs.launch(given["x_TK"][first : first + count], parsed.inputs, given["input_scale_1"])

    codes_TK, scales_CT = rounded(0, case.num_tokens)
    whole = launch(codes_TK, scales_CT, *weight, activation)
    expected = reference(codes_TK, scales_CT, *weight, activation)
    error = (whole.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= (1e-3 if dtype == torch.float32 else 2e-2), (case, scheme, error)
    for count in counts:
        first = (case.num_tokens - count) // 2
        found = launch(*rounded(first, count), *weight, activation)
        assert torch.equal(found, whole[first : first + count]), (case, count)


def check_interpreted() -> None:
    for case in SMALL:
        for scheme in SCHEMES:
            check_bits(case, scheme, torch.float32, "cpu", (1, 17))
    print("right")


@loops_to_a_loaded_bound
def test_kernels_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", "from test_invariant_quantised import check_interpreted; check_interpreted()")
    assert run.stdout == "right\n", run.stderr[-2000:]


@pytest.mark.parametrize("scheme", [BY_ROWS, BY_BLOCKS])
@pytest.mark.parametrize("rows", [1024, 4096, 5120, 6144, 24576])
def test_counts_that_are_compared_select_every_tile_on_hopper(rows: int, scheme: str) -> None:
    """And none divides the columns: parts would add in another order."""

    def few(count: int) -> HopperTiles:
        return quantised_tiles(count, rows, 4096, rows == 24576, 132, divides=False)

    def many(count: int) -> CodesTiles:
        return codes_tiles(min(count, MOST), rows, scheme == BY_BLOCKS, 132)

    assert {few(count).parts for count in range(1, 65)} == {1}
    assert {few(count) for count in range(1, 65)} == {few(count) for count in COUNTS if count <= 64}
    assert {many(count) for count in range(65, 8193)} == {many(count) for count in (*COUNTS, MOST + 1) if count > 64}


def test_linears_that_hoppers_kernels_leave_to_another() -> None:
    served = ((9, 0), 4096, 4096, False, False, BY_ROWS, torch.bfloat16)
    assert on_hopper(*served)
    for place, other in enumerate(((8, 9), 4092, 4088, None, True, "int8 1x*, inputs int8 1x*", torch.float32)):
        if other is not None:
            assert not on_hopper(*served[:place], other, *served[place + 1 :])
    blocks = "e4m3 32x128, inputs e4m3 1x128"
    assert not on_hopper(*served[:3], True, False, blocks, torch.float16)
    assert on_hopper(*served[:3], True, False, BY_BLOCKS, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=str)
def test_on_cuda(case: Case, scheme: str) -> None:
    counts = tuple(count for count in {1, 2, 33, 65, 129, 300, 520, 1200, *COUNTS} if count < case.num_tokens)
    check_bits(case, scheme, torch.bfloat16, "cuda", counts)
