"""Hopper's product of four-bit codes and many tokens: its tiles, compiled without a GPU, and on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hopper import require_hopper
from hopper_compilation import compiled_for_hopper, products_and_groups, stack_bytes
from hypothesis import given
from hypothesis import strategies as st
from quantised_linear_cases import Case, arguments_of, in_words
from small_batch_linear_cases import nan_in_new_tensors

from compiled_engine.kernels import hopper_integer_product_kernel as kernels
from compiled_engine.kernels import hopper_integers as steps
from compiled_engine.kernels import hopper_ring as ring
from compiled_engine.kernels.launch_arguments import PRODUCT_COPYING, computing_registers
from compiled_engine.passes.linear.hopper_integer_product import (
    PARTS,
    IntegerTiles,
    hopper_integer_product,
    integer_product_tiles,
    tiles_with,
)
from compiled_engine.passes.linear.quantised_linear_op import reference

SYMMETRIC, WITH_ZEROS = "int4 1x128", "uint4 1x128"
# Tokens, rows, columns; tokens of a tile and splits: several tiles in both directions, parts of tiles, one block.
CASES = (
    (Case(129, 4096, 4096, residual=True), 256, 4),
    (Case(256, 6144, 4096, bias=True), 128, 1),
    (Case(200, 272, 128, bias=True, silu_mul=True), 128, 1),
    (Case(300, 24576, 1024, silu_mul=True, residual=True), 256, 1),
    (Case(288, 4096, 4096, residual=True, bias=True), 144, 1),
    (Case(300, 2064, 1152, silu_mul=True), 144, 1),
    (Case(300, 1040, 1536), 160, 3),
    (Case(321, 2064, 640, silu_mul=True, bias=True), 160, 1),
    (Case(576, 6144, 2048, silu_mul=True, residual=True), 192, 1),
    (Case(200, 4096, 4096, bias=True), 192, 1),
    (Case(150, 4096, 12288, silu_mul=True), 192, 4),
    (Case(257, 1040, 1536, bias=True, silu_mul=True, activation="gelu"), 256, 3),
    (Case(1000, 4096, 12288), 128, 2),
    (Case(2100, 1040, 640, residual=True, bias=True), 256, 5),
    (Case(40, 144, 256), 128, 2),
)


@given(
    tokens=st.integers(1, 9000),
    rows=st.integers(1, 2000).map(lambda n: 16 * n),
    blocks=st.integers(1, 120),
    gated=st.booleans(),
)
def test_splits_divide_the_blocks_and_stages_hold_two_at_least(
    tokens: int, rows: int, blocks: int, gated: bool
) -> None:
    tiles = integer_product_tiles(tokens, rows, 128 * blocks, gated, 132)
    assert blocks % tiles.splits == 0
    assert tiles.stages >= 4


def test_tiles_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"^tokens is 64; allowed: 128, 144, 160, 192, 256$"):
        IntegerTiles(64, 1, 4)
    with pytest.raises(ValueError, match=r"^stages is 1; allowed: at least 2$"):
        IntegerTiles(128, 1, 1)


@pytest.mark.product(one_in=1000, each=("gated",))
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("tokens", PARTS)
def test_products_overlap_on_hopper_and_need_no_stack(
    tokens: int, splits: int, gated: bool, has_zeros: bool, dtype: str
) -> None:
    program = compiled(tokens, splits, gated, has_zeros, dtype)
    products, groups = products_and_groups(program)
    assert products == 4 * groups  # a group multiplies 64 columns, 16 at a time
    assert stack_bytes(program) == 0
    assert program.metadata.shared <= 227 << 10


def compiled(tokens: int, splits: int, gated: bool, has_zeros: bool, dtype: str) -> Any:
    from triton.experimental.gluon import language as gl

    tiles = tiles_with(tokens, splits, gated)
    part0, part1 = tiles.parts
    shape = [4, 2, 8] if gated else [64]
    rank, outputs = len(shape) + 1, 32 if gated else 64
    constants = {
        "K": 4096, "PART0": part0, "PART1": part1, "STAGES": tiles.stages, "WORD_STAGES": 4, "SPLITS": splits,
        "GATED": gated, "ACTIVATION": "silu", "TOGETHER": 8, "ZERO": 0 if has_zeros else 8,
        "REGISTERS": computing_registers(2, PRODUCT_COPYING),
    }  # fmt: skip
    constants |= {} if has_zeros else {"z_desc": None}
    types = {
        "w_desc": f"tensordesc<i32{[*shape, 16]},{steps.word_layout(rank)}>",
        "s_desc": f"tensordesc<fp32{[1, *shape]},{steps.row_layout(32, rank)}>",
    }
    parts = [(i, part) for i, part in enumerate(tiles.parts) if part]
    constants |= {} if part1 else {"x1_desc": None, "y1_desc": None}
    for i, part in parts:
        types[f"x{i}_desc"] = f"tensordesc<{dtype}{[part, 64]},{ring.shared_layout(16, 2)}>"
    if has_zeros:
        types["z_desc"] = f"tensordesc<i16{[1, *shape]},{steps.row_layout(16, rank)}>"
    if splits > 1:
        constants |= {"y0_desc": None, "y1_desc": None, "bias_ptr": None}
        types["partials_ptr"] = "*fp32"
    else:
        constants |= {"partials_ptr": None}
        layout = gl.NVMMASharedLayout(swizzle_byte_width=2 * outputs, element_bitwidth=16, rank=2)
        for i, part in parts:
            types[f"y{i}_desc"] = f"tensordesc<{dtype}{[min(part, 128), outputs]},{layout}>"
    kernel = kernels.hopper_integer_product_kernel
    return compiled_for_hopper(kernel, constants, types, pointers=f"*{dtype}", num_warps=4)


@pytest.mark.gpu
@pytest.mark.product(one_in=8, each=("case", "tokens", "splits", "scheme"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [SYMMETRIC, WITH_ZEROS])
@pytest.mark.parametrize(("case", "tokens", "splits"), CASES, ids=[f"{case} {t} {s}" for case, t, s in CASES])
def test_the_kernel_computes_the_reference(
    case: Case, tokens: int, splits: int, scheme: str, dtype: torch.dtype
) -> None:
    require_hopper()
    operands = arguments_of(case, scheme, dtype, "cuda")
    expected = reference(**operands).float()
    words = in_words(operands)
    with nan_in_new_tensors():
        found = hopper_integer_product(
            words["x_TK"],
            words["codes_NK"],
            words["scales_RC"],
            words["zeros_RC"],
            words["bias_N"],
            words["residual_TM"],
            case.silu_mul,
            case.activation,
            8 if scheme == SYMMETRIC else 0,
            tiles_with(tokens, splits, case.silu_mul),
        ).float()
    # Gate, up and the result are rounded, each by up to 2^-9 in bfloat16.
    assert (found - expected).norm() <= (6e-3 if case.silu_mul else 4e-3) * expected.norm()
    assert torch.isfinite(found).all()
