"""The kernels of linears with integer codes: under Triton's interpreter, compiled for Hopper, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hopper_compilation import compiled_for_hopper, stack_bytes
from interpreting_process import interpret
from quantised_linear_cases import ALONE, Case, arguments_of, assert_kernels_compute_the_reference
from small_batch_linear_cases import nan_in_new_tensors

from compiled_engine.passes.framework.rounding import decode
from compiled_engine.passes.linear import integer_product, quantised_kernels
from compiled_engine.passes.linear.quantised_linear_op import reference
from compiled_engine.passes.linear.quantised_product import Tiles
from compiled_engine.quantisation import LinearScheme

# Tokens, rows, columns: tiles that end in part, more tokens than a tile, a step and a group that end beyond K.
CASES = (
    Case(3, 72, 192, bias=True),
    Case(17, 136, 320, silu_mul=True, residual=True, activation="gelu_tanh"),
    Case(70, 200, 256, residual=True),
    Case(1, 64, 104),
)
INTERPRETED = """
import torch
from test_integer_product import CASES, ALONE, product_error, decode_error

count = 0
for scheme in ALONE:
    for case in CASES:
        for dtype, most in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
            error = product_error(case, scheme, dtype)
            assert error <= most, (scheme, case, dtype, error)
            assert decode_error(case, scheme, dtype) == 0, (scheme, case, dtype)
            count += 1
print(count)
"""


def product_error(case: Case, scheme: str, dtype: torch.dtype, device: str = "cpu") -> float:
    """The largest difference of the product from the reference, relative to the largest value; NaN if anything is."""
    given = arguments_of(case, scheme, dtype, device)
    weight = given["codes_NK"], given["scales_RC"], given["zeros_RC"]
    after = given["bias_N"], given["residual_TM"], given["silu_mul"], given["activation"]
    with nan_in_new_tensors():
        found = integer_product.launch(given["x_TK"], *weight, *after, LinearScheme.parse(scheme))
    expected = reference(**given).float()
    return float((found.float() - expected).abs().max() / expected.abs().max())


def decode_error(case: Case, scheme: str, dtype: torch.dtype, device: str = "cpu") -> float:
    given, parsed = arguments_of(case, scheme, dtype, device), LinearScheme.parse(scheme)
    weight = given["codes_NK"], given["scales_RC"], given["zeros_RC"]
    with nan_in_new_tensors():
        found = integer_product.decode_weight(*weight, parsed, dtype)
    expected = decode(weight[0], weight[1], parsed.weight, weight[2]).to(dtype)
    return float((found.float() - expected.float()).abs().max())


def test_triton_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", INTERPRETED)
    assert run.stdout.strip().splitlines()[-1:] == [str(2 * len(ALONE) * len(CASES))], run.stderr[-2000:]


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(integer_product.BITS_OF_128, torch.bfloat16), (integer_product.BITS_OF_1024, torch.float16)],
)
def test_setting_low_bits_adds_a_code(bits: Any, dtype: torch.dtype) -> None:
    """Which the interpreter cannot show in bfloat16."""
    codes = torch.arange(128, dtype=torch.int16)
    values = (codes | bits.value).view(dtype)
    assert torch.equal((values[:, None] - values[None, :]).float(), (codes[:, None] - codes[None, :]).float())


@pytest.mark.product(one_in=4, each=("element",))
@pytest.mark.parametrize("element", ["int4", "int8", "e2m1"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("columns", [32, 128])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 4096), (8, 24576), (32, 24576), (64, 4096), (64, 24576)])
def test_the_product_needs_no_stack_on_hopper(tokens: int, rows: int, columns: int, zeros: bool, element: str) -> None:
    program = compiled(integer_product.choose_tiles(tokens, rows), columns, zeros, element)
    assert stack_bytes(program) <= 8  # of 48 registers, so none is spilled
    assert program.metadata.shared <= 227 << 10


def compiled(tiles: Tiles, columns: int, zeros: bool, element: str = "int4") -> Any:
    zeros, columns = zeros and element != "e2m1", 16 if element == "e2m1" else columns
    constants = {
        "K": 4096, "TILE_ROWS": 1, "TILE_COLUMNS": columns, "ELEMENT": element, "ZERO": 0 if zeros else 8,
        "SILU_MUL": zeros, "ACTIVATION": "silu", "TOKENS": tiles.tokens, "ROWS": tiles.rows,
        "BLOCK_K": 128 if element == "e2m1" else columns, "NUM_STAGES": tiles.num_stages,
        "DEPENDENT_LAUNCH": True, "bias_ptr": None, "residual_ptr": None,
    } | ({} if zeros else {"zeros_ptr": None})  # fmt: skip
    codes = "*i8" if element == "int8" and not zeros else "*u8"
    types = {"codes_ptr": codes, "scales_ptr": "*fp32"} | ({"zeros_ptr": "*u8"} if zeros else {})
    kernel = integer_product.integer_product_kernel
    aligned = ("x_ptr", "x_stride", "codes_ptr", "scales_ptr", "zeros_ptr", "out_ptr")
    return compiled_for_hopper(kernel, constants, types, aligned=aligned, num_warps=tiles.num_warps)


@pytest.mark.parametrize("element", ["int4", "int8", "e2m1"])
def test_decoding_needs_no_stack_on_hopper(element: str) -> None:
    constants = {
        "zeros_ptr": None, "K": 4096, "TILE_ROWS": 1, "TILE_COLUMNS": 128, "ELEMENT": element,
        "ZERO": 8, "ROWS": 4, "BYTES": 512, "DEPENDENT_LAUNCH": True,
    }  # fmt: skip
    types = {"codes_ptr": "*i8" if element == "int8" else "*u8", "scales_ptr": "*fp32"}
    program = compiled_for_hopper(integer_product.decode_kernel, constants, types, num_warps=4)
    assert stack_bytes(program) == 0


NOT_ON_HOPPER = "its weight is no matrix of four-bit integers, or its inputs are rounded"


@pytest.mark.parametrize(
    ("capability", "tokens", "scheme", "kernel"),
    [
        ((9, 0), 64, "int4 1x128", "Triton's product of integers"),
        ((8, 0), 1, "uint4 1x32", "Triton's product of integers"),
        ((9, 0), 1, "uint8 1x32", f"Triton's product of integers: {NOT_ON_HOPPER} (uint8 1x32)"),
        ((9, 0), 65, "int8 1x128", "the product of the decoded weight"),
        ((9, 0), 65, "int4 1x*", "the product of the decoded weight"),
        ((9, 0), 64, "e2m1 1x16", f"Triton's product of integers: {NOT_ON_HOPPER} (e2m1 1x16)"),
        ((9, 0), 65, "e2m1 1x16", "the product of the decoded weight"),
        ((9, 0), 1, "int4 1x48", "plain torch: its scales are of columns that are no multiple of 32 (int4 1x48)"),
        ((7, 5), 1, "int4 1x128", "plain torch: the GPU's compute capability 7.5 has no products of bfloat16"),
    ],
)
def test_each_linear_has_its_kernel(capability: tuple[int, int], tokens: int, scheme: str, kernel: str) -> None:
    parsed = LinearScheme.parse(scheme)
    assert str(quantised_kernels.choose(capability, tokens, 64, 4096, False, False, parsed, torch.bfloat16)) == kernel


@pytest.mark.gpu
@pytest.mark.product(one_in=4, each=("scheme",))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ALONE)
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        Case(1, 4096, 4096, residual=True),
        Case(5, 24576, 4096, silu_mul=True),
        Case(64, 6144, 1024, bias=True),
        Case(300, 4096, 12288),
    ],
    ids=str,
)
def test_kernels_compute_the_reference(case: Case, scheme: str, dtype: torch.dtype) -> None:
    assert_kernels_compute_the_reference(case, scheme, dtype)
