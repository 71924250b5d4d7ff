"""Hopper's product of codes with tokens on the left: compiled without a GPU, and on one against the reference."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hopper_compilation import compiled_for_hopper, stack_bytes
from quantised_linear_cases import BY_BLOCKS, BY_ROWS, Case, arguments_of
from small_batch_linear_cases import nan_in_new_tensors
from triton.experimental.gluon.language import NVMMASharedLayout

from compiled_engine.kernels import hopper_ring as ring
from compiled_engine.kernels.hopper_codes_kernel import hopper_codes_kernel
from compiled_engine.kernels.launch_arguments import PRODUCT_COPYING, computing_registers
from compiled_engine.passes.linear import round_inputs
from compiled_engine.passes.linear.hopper_codes import (
    COSTS,
    TOKEN_COUNTS,
    CodesTiles,
    codes_tiles,
    hopper_codes,
    why_not_on_the_left,
)
from compiled_engine.passes.linear.quantised_kernels import scaling_of
from compiled_engine.passes.linear.quantised_linear_op import reference
from compiled_engine.quantisation import LinearScheme

# The largest tiles, whose sums leave no registers for scales of blocks, and smaller ones.
LARGEST, *SMALLER = COSTS[False]
# Bytes of a thread's stack: under Triton 3.9 some registers at the end of the largest gated tiles, under 3.6 none.
MOST_STACK = 192


def compiled(tiles: CodesTiles, k: int, gated: bool, tile_rows: int, tile_columns: int) -> Any:
    outputs = tiles.rows // 2 if gated else tiles.rows
    shared, out_shared = (
        ring.shared_layout(8, 2),
        NVMMASharedLayout(swizzle_byte_width=min(128, 2 * outputs), element_bitwidth=16, rank=2),
    )
    constants: dict[str, Any] = {
        "K": k,
        "GROUP_TOKENS": tiles.tokens,
        "ROWS": tiles.rows,
        "STAGES": tiles.stages,
        "GATED": gated,
        "ACTIVATION": "silu",
        "TOGETHER": tiles.together,
        "REGISTERS": computing_registers(2, PRODUCT_COPYING),
        "TILE_ROWS": tile_rows,
        "TILE_COLUMNS": tile_columns,
    }
    box = f"[{outputs // 8}, 2, 8, 128],{ring.shared_layout(8, 4)!r}" if gated else f"[{tiles.rows}, 128],{shared!r}"
    types = {"w_desc": f"tensordesc<fp8e4nv{box}>", "x_desc": f"tensordesc<fp8e4nv[{tiles.tokens}, 128],{shared!r}>"}
    types |= {"y_desc": f"tensordesc<bf16[64, {outputs}],{out_shared!r}>"}
    types |= {"scales_ptr": "*fp32", "input_scales_ptr": "*fp32"}
    aligned = ("scales_ptr", "input_scales_ptr", "input_stride", "num_outputs")
    return compiled_for_hopper(hopper_codes_kernel, constants, types, aligned=aligned)


@pytest.mark.parametrize(
    ("tiles", "gated", "scales"),
    [
        pytest.param(LARGEST, False, (1, 0), marks=pytest.mark.product(one_in=1000)),
        (LARGEST, True, (1, 0)),
        (SMALLER[0], False, (128, 128)),
        pytest.param(SMALLER[0], True, (128, 128), marks=pytest.mark.product(one_in=1000)),
        pytest.param(SMALLER[1], True, (1, 0), marks=pytest.mark.product(one_in=1000)),
    ],
)
def test_it_fits(tiles: CodesTiles, gated: bool, scales: tuple[int, int]) -> None:
    """In shared memory and registers; before the wait the kernel touches the weight alone."""
    program = compiled(tiles, 4096, gated, *scales)
    assert program.metadata.shared <= 227 << 10
    assert stack_bytes(program) <= MOST_STACK
    ptx = program.asm["ptx"]
    assert f"m64n{tiles.rows}k32.f32.e4m3.e4m3" in ptx
    copy = re.compile(r"cp\.async\.bulk\.tensor\.(\d)d.*?\], \[(%rd\d+)")
    ahead = next(copies for part in ptx.split("griddepcontrol.wait") if (copies := copy.findall(part)))
    assert len({descriptor for _, descriptor in ahead}) == 1


def test_tiles_leave_few_multiprocessors_idle() -> None:
    def tiles(num_tokens: int, num_rows: int, has_blocks: bool = False) -> CodesTiles:
        return codes_tiles(num_tokens, num_rows, has_blocks, 132)

    assert tiles(8192, 24576) == tiles(512, 24576) == tiles(512, 6144) == LARGEST
    assert tiles(256, 24576) == tiles(512, 4096) == SMALLER[0]
    assert tiles(256, 4096) == tiles(128, 4096) == SMALLER[1]
    assert tiles(8192, 24576, has_blocks=True) == SMALLER[0]


@pytest.mark.parametrize("has_blocks", [False, True])
def test_the_warm_up_has_all_tiles(has_blocks: bool) -> None:
    for num_rows in (1024, 1536, 2048, 3072, 4096, 5120, 6144, 10240, 24576, 57344):
        every = {codes_tiles(tokens, num_rows, has_blocks, 132) for tokens in range(65, 8193)}
        assert every == {codes_tiles(tokens, num_rows, has_blocks, 132) for tokens in (*TOKEN_COUNTS[1:], 8192)}


def test_it_says_what_it_does_not_take() -> None:
    def obstacle(scheme: str, rows: int = 4096, gated: bool = False) -> str | None:
        return why_not_on_the_left(rows, gated, LinearScheme.parse(scheme))

    assert obstacle(BY_ROWS) is obstacle(BY_BLOCKS) is obstacle(BY_BLOCKS, gated=True) is None
    assert "different columns" in (obstacle("e4m3 1x*, inputs e4m3 1x128") or "")
    assert "several scales" in (obstacle("e4m3 64x128, inputs e4m3 1x128") or "")
    assert "several scales" in (obstacle(BY_BLOCKS, 4096 + 64, gated=True) or "")


# Tokens and rows that leave tiles in part, K that ends inside a step, fewer steps than stages, one tile and many.
CASES = (
    Case(130, 1168, 1040, silu_mul=True),
    Case(300, 4096, 4096),
    Case(700, 6144, 1024),
    Case(257, 24576, 512, silu_mul=True, activation="gelu_tanh"),
    Case(1, 256, 128),
    Case(1000, 6152, 1040),
)


@pytest.mark.gpu
@pytest.mark.product(one_in=8, each=("case", "tiles", "scheme"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [BY_ROWS, BY_BLOCKS])
@pytest.mark.parametrize("tiles", [LARGEST, *SMALLER], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_computes_the_reference(case: Case, tiles: CodesTiles, scheme: str, dtype: torch.dtype) -> None:
    """Into memory that was NaN, twice the same."""
    parsed = LinearScheme.parse(scheme)
    if why_not_on_the_left(case.num_rows, case.silu_mul, parsed) is not None:
        pytest.skip("the kernel does not take it")
    given = arguments_of(case, scheme, dtype, "cuda")
    assert parsed.inputs is not None
    codes_TK, inputs_CT = round_inputs.launch(given["x_TK"], parsed.inputs, None)
    rounded = {"x_TK": codes_TK, "input_scales_CT": inputs_CT, "dtype": str(dtype).removeprefix("torch.")}
    expected = reference(**given | rounded).float()
    scaling = scaling_of(given["scales_RC"], inputs_CT, parsed)
    found = []
    for _ in range(2):
        with nan_in_new_tensors():
            of_codes = codes_TK, given["codes_NK"], case.silu_mul, case.activation
            found.append(hopper_codes(*of_codes, scaling, dtype, tiles))
    assert torch.equal(*found)
    tolerance = 2.0 ** (-7 if dtype == torch.bfloat16 else -9) * float(expected.abs().max())
    assert float((found[0].float() - expected).abs().max()) <= tolerance
