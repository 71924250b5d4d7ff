"""Hopper's linear with four-bit codes: the order of its codes, its tiles, compiled without a GPU, and on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hopper_compilation import compiled_for_hopper, stack_bytes
from hypothesis import given
from hypothesis import strategies as st
from interpreting_process import interpret
from quantised_linear_cases import Case, arguments_of, assert_kernels_compute_the_reference, in_words
from small_batch_linear_cases import nan_in_new_tensors

from compiled_engine.kernels import hopper_integers as steps
from compiled_engine.kernels import hopper_linear_kernel as ring
from compiled_engine.passes.framework.rounding import decode, from_words, to_words, unpack
from compiled_engine.passes.linear import integer_product
from compiled_engine.passes.linear.hopper_integers import integer_tiles, stage_bytes, why_not_in_words
from compiled_engine.passes.linear.hopper_linear import SHARED_MEMORY, TOKEN_BUCKETS
from compiled_engine.passes.linear.quantised_kernels import choose
from compiled_engine.passes.linear.quantised_linear_op import reference
from compiled_engine.passes.linear.split_sums import sum_splits
from compiled_engine.quantisation import LinearScheme

SYMMETRIC, WITH_ZEROS = "int4 1x128", "uint4 1x128"
# Tokens, rows and columns of the codes: of models, a last tile in part, one block, no split that divides K.
CASES = (
    Case(1, 4096, 4096, residual=True),
    Case(8, 6144, 4096),
    Case(3, 48, 128, bias=True, silu_mul=True),
    Case(7, 1040, 1408, bias=True, residual=True),
    Case(16, 4096, 12288),
    Case(33, 2064, 2048, silu_mul=True, residual=True, activation="gelu_tanh"),
    Case(64, 24576, 4096, silu_mul=True),
    Case(60, 272, 3072, bias=True),
    Case(128, 4096, 1024, residual=True, silu_mul=True, activation="gelu"),
    Case(100, 1024, 12288),
    Case(300, 1040, 640, bias=True),
    Case(600, 24576, 4096, silu_mul=True, residual=True),
)
INTERPRETED = """
from test_hopper_integers import decode_error, splits_error

for scheme in ("int4 1x128", "uint4 1x128"):
    assert decode_error(scheme) == 0, scheme
for gated in (False, True):
    assert splits_error(gated) <= 1e-6, gated
print("compared")
"""


@given(rows=st.integers(1, 5), blocks=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_words_hold_every_sixteenth_column_of_a_block(rows: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, 64 * blocks), generator=generator, dtype=torch.uint8)
    words, singly = to_words(codes), unpack(codes, LinearScheme.parse(SYMMETRIC).weight)
    assert words.shape == (rows, 16 * blocks)
    assert words.dtype == torch.int32
    for bits in range(8):
        found = (words >> 4 * bits & 15).view(rows, blocks, 16)
        assert torch.equal(found, singly.view(rows, blocks, 8, 16)[:, :, bits].int())
    assert torch.equal(from_words(words), codes)


@pytest.mark.parametrize("scheme", [SYMMETRIC, WITH_ZEROS])
def test_the_reference_reads_both_orders(scheme: str) -> None:
    operands = arguments_of(Case(5, 48, 256, bias=True, silu_mul=True), scheme, torch.float32)
    assert torch.equal(reference(**in_words(operands)), reference(**operands))


def decode_error(scheme: str) -> float:
    operands = arguments_of(Case(1, 72, 384), scheme, torch.float16)
    words = in_words(operands)
    weight = words["codes_NK"], words["scales_RC"], words["zeros_RC"]
    with nan_in_new_tensors():
        found = integer_product.decode_words(*weight, 8 if scheme == SYMMETRIC else 0, torch.float16)
    rounding = LinearScheme.parse(scheme).weight
    expected = decode(operands["codes_NK"], operands["scales_RC"], rounding, operands["zeros_RC"])
    return float((found.float() - expected.half().float()).abs().max())


def splits_error(gated: bool) -> float:
    generator = torch.Generator().manual_seed(0)
    partials = torch.randn(3, 5, 600, generator=generator)
    bias, outputs = torch.randn(600, generator=generator), 300 if gated else 600
    residual = torch.randn(5, outputs, generator=generator)
    with nan_in_new_tensors():
        found = torch.empty(5, outputs)
    sum_splits(partials, bias, residual, gated, "silu", found)
    expected = partials.sum(0) + bias
    if gated:
        expected = torch.nn.functional.silu(expected[:, :300]) * expected[:, 300:]
    expected += residual
    return float((found - expected).abs().max() / expected.abs().max())


def test_triton_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", INTERPRETED)
    assert run.stdout.strip().splitlines()[-1:] == ["compared"], run.stderr[-2000:]


@given(
    tokens=st.integers(1, 128),
    rows=st.integers(1, 2000).map(lambda n: 16 * n),
    blocks=st.integers(1, 120),
    gated=st.booleans(),
    has_zeros=st.booleans(),
)
def test_tiles_fit_the_multiprocessor_and_divide_the_columns(
    tokens: int, rows: int, blocks: int, gated: bool, has_zeros: bool
) -> None:
    tiles, splits = integer_tiles(tokens, rows, 128 * blocks, gated, has_zeros, 132)
    assert blocks % (splits * tiles.parts * tiles.products) == 0
    assert tokens <= tiles.tokens
    assert tiles.parts * tiles.tokens <= 128
    assert tiles.parts <= (2 if gated else 4)
    assert 1 <= tiles.stages <= blocks // (splits * tiles.parts * tiles.products)
    assert tiles.stages * stage_bytes(tiles, has_zeros) + tiles.ending_bytes(gated) <= SHARED_MEMORY


@pytest.mark.product(one_in=16)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", TOKEN_BUCKETS)
def test_the_kernel_needs_no_stack_on_hopper(tokens: int, gated: bool, has_zeros: bool, dtype: str) -> None:
    program = compiled(tokens, gated, has_zeros, dtype)
    assert stack_bytes(program) == 0
    assert program.metadata.shared <= 227 << 10


def compiled(num_tokens: int, gated: bool, has_zeros: bool, dtype: str) -> Any:
    rows, k = (24576, 4096) if gated else (4096, 12288)
    tiles, splits = integer_tiles(num_tokens, rows, k, gated, has_zeros, 132)
    boxes = tiles.parts * tiles.products
    shape = [boxes, 4 // tiles.parts, 2, 8] if gated else [boxes, 64 // tiles.parts]
    rank = len(shape)
    constants = {
        "bias_ptr": None, "residual_ptr": None, "K": k, "GROUPS": tiles.groups, "TOKENS": tiles.tokens,
        "STAGES": tiles.stages, "PARTS": tiles.parts, "PRODUCTS": tiles.products, "GATED": gated,
        "ACTIVATION": "silu", "REGISTERS": tiles.computing_registers(), "scales_ptr": None, "input_scales_ptr": None,
        "input_stride": 0, "TILE_ROWS": 1, "TILE_COLUMNS": 0, "INPUT_COLUMNS": 0, "ZERO": 0 if has_zeros else 8,
        "SPLITS": splits,
    } | ({} if has_zeros else {"z_desc": None})  # fmt: skip
    types = {
        "w_desc": f"tensordesc<i32{[*shape, 16]},{steps.word_layout(rank + 1)}>",
        "x_desc": f"tensordesc<{dtype}{[2, boxes, tiles.tokens, 64]},{ring.shared_layout(16, 4)}>",
        "s_desc": f"tensordesc<fp32{shape},{steps.row_layout(32, rank)}>",
    }
    if has_zeros:
        types["z_desc"] = f"tensordesc<i16{shape},{steps.row_layout(16, rank)}>"
    if splits > 1:
        types["out_ptr"] = "*fp32"
    limit = {"maxnreg": tiles.registers} if tiles.registers else {}
    kernel = ring.hopper_linear_kernel
    return compiled_for_hopper(kernel, constants, types, pointers=f"*{dtype}", num_warps=4, **limit)


@pytest.mark.parametrize(
    ("rows", "k", "scheme", "dtype", "reason"),
    [
        (4096, 4096, SYMMETRIC, torch.bfloat16, None),
        (4096, 4096, WITH_ZEROS, torch.float16, None),
        (4096, 4096, "int4 1x64", torch.bfloat16, "its scales are not of 128 columns of a row (int4 1x64)"),
        (4096, 4096, "int4 1x*", torch.bfloat16, "its scales are not of 128 columns of a row (int4 1x*)"),
        (4104, 4096, SYMMETRIC, torch.bfloat16, "its sizes [4104, 4096] are no multiples of 16 and 128"),
        (4096, 2880, SYMMETRIC, torch.bfloat16, "its sizes [4096, 2880] are no multiples of 16 and 128"),
        (4096, 4096, SYMMETRIC, torch.float32, "its results are float32"),
    ],
)
def test_what_the_kernel_supports(rows: int, k: int, scheme: str, dtype: torch.dtype, reason: str | None) -> None:
    assert why_not_in_words(rows, k, LinearScheme.parse(scheme), dtype) == reason


def test_the_order_of_the_codes_decides_the_kernel() -> None:
    parsed = LinearScheme.parse(SYMMETRIC)
    common = 4096, 4096, False, False, parsed, torch.bfloat16
    assert str(choose((9, 0), 128, *common, True)) == "Hopper's linear of integers"
    assert str(choose((9, 0), 129, *common, True)) == "Hopper's product of integers"
    assert str(choose((9, 0), 8192, *common, True)) == "the product of the decoded weight"
    assert str(choose((9, 0), 8, *common, False)) == "Triton's product of integers"


@pytest.mark.gpu
@pytest.mark.product(one_in=2, each=("case",))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [SYMMETRIC, WITH_ZEROS])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_compute_the_reference(case: Case, scheme: str, dtype: torch.dtype) -> None:
    assert_kernels_compute_the_reference(case, scheme, dtype, change=in_words)
