"""The linear of batch-invariant engines: right, and the same bits for a row whatever the number of rows."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
import triton
from hopper_compilation import compiled_for_hopper, stack_bytes
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret

from compiled_engine.passes.linear import invariant_hopper
from compiled_engine.passes.linear.hopper_linear import SHARED_MEMORY, undivided_tiles
from compiled_engine.passes.linear.invariant_linear import invariant_linear, launch, reference
from compiled_engine.passes.linear.invariant_product import (
    MOST_SPREAD,
    TOKEN_BUCKETS,
    invariant_product_kernel,
    part_of,
    tile_of,
)


class Shape(NamedTuple):
    rows: int
    columns: int
    bias: bool = False
    activation: str | None = None


# One part and several, columns that fill no step, rows that fill no tile.
SMALL = (Shape(40, 80), Shape(100, 1104, True), Shape(64, 1072, True, "silu"), Shape(96, 48, False, "gelu_tanh"))
# The linears of Qwen3-8B and of Qwen3-0.6B.
LARGE = (
    *(Shape(6144, 4096), Shape(4096, 4096, True), Shape(24576, 4096, False, "silu"), Shape(4096, 12288)),
    *(Shape(151936, 4096), Shape(4096, 1024), Shape(1024, 3072), Shape(1000, 1000, True)),
)


def check_bits(shape: Shape, counts: tuple[int, ...], most: int, device: str, dtype: torch.dtype) -> None:
    """Assert that rows of a large product have the same bits in products of these numbers of rows."""
    generator = torch.Generator().manual_seed(shape.rows)
    weight = torch.randn(shape.rows, shape.columns, generator=generator).div(shape.columns**0.5).to(device, dtype)
    bias = torch.randn(shape.rows, generator=generator).to(device, dtype) if shape.bias else None
    x = torch.randn(most, shape.columns + 16, generator=generator).to(device, dtype)[:, : shape.columns]
    multiply = launch if triton.knobs.runtime.interpret else invariant_linear
    whole = multiply(x, weight, bias, shape.activation)
    assert whole.isfinite().all()
    tolerance = 5e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole, reference(x, weight, bias, shape.activation), rtol=tolerance, atol=tolerance)
    draw = random.Random(shape.columns)
    for count in counts:
        first = draw.randint(0, most - count)
        found = multiply(x[first : first + count], weight, bias, shape.activation)
        assert torch.equal(found, whole[first : first + count]), (shape, count)


def check_interpreted() -> None:
    for shape in SMALL:
        check_bits(shape, (1, 17, MOST_SPREAD), MOST_SPREAD + 3, "cpu", torch.float32)
    print("right")


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_a_row_has_the_same_bits_in_every_product(shape: Shape) -> None:
    check_bits(shape, (1, 2, 3, 5, 64, 65, 130), 150, "cpu", torch.float32)


@loops_to_a_loaded_bound
def test_kernel_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", "from test_invariant_linear import check_interpreted; check_interpreted()")
    assert run.stdout == "right\n", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SMALL, *LARGE], ids=str)
def test_on_cuda(shape: Shape, dtype: torch.dtype) -> None:
    counts = {1, 2, 7, 65, 100, 500, MOST_SPREAD + 1, *TOKEN_BUCKETS, *invariant_hopper.TOKEN_COUNTS}
    check_bits(shape, tuple(counts), 1030, "cuda", dtype)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(4096, 4096), (6144, 1024), (24576, 4096), (5120, 320), (151936, 64)])
def test_tiles_on_hopper_add_in_one_order_and_fit(rows: int, columns: int, gated: bool) -> None:
    """Parts would add in another order. Tiles fill whole steps, and their ring buffer fits the shared memory."""
    for count in range(1, invariant_hopper.FEW[-1] + 1):
        few = undivided_tiles(count, rows, columns, gated, 132)
        assert (few.parts, columns % few.columns) == (1, 0)
        assert few.tokens >= count
        assert few.stages * few.stage_bytes + few.ending_bytes(gated) <= SHARED_MEMORY
    # What the start compiles and compares, at these counts, is what any count has.
    compared = {invariant_hopper.many_tiles(count, rows, gated, 132) for count in invariant_hopper.TOKEN_COUNTS[4:]}
    assert {invariant_hopper.many_tiles(count, rows, gated, 132) for count in range(65, 8193)} == compared


def test_weights_that_hoppers_kernels_leave_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer does not depend on tokens: kernels of both kinds would give other bits."""
    monkeypatch.setattr(invariant_hopper, "is_hopper", lambda device: True)
    weight, bias = torch.empty(4096, 128, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    assert invariant_hopper.is_served(weight, None, False)
    for other, its_bias, gated in (
        *((weight, bias, False), (weight[:2048], None, False), (weight.float(), None, False)),
        *((weight[:, :96].contiguous(), None, False), (weight[:, :64], None, False), (weight[:4088], None, True)),
    ):
        assert not invariant_hopper.is_served(other, its_bias, gated)


@pytest.mark.gpu
def test_the_library_gives_other_bits_for_other_numbers_of_rows() -> None:
    """Without this the mode would be for nothing."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, weight = (
        torch.randn(rows, 4096, generator=generator, device="cuda", dtype=torch.bfloat16) for rows in (2048, 4096)
    )
    whole = torch.nn.functional.linear(x, weight)
    counts = (1, 8, 33, 64, 200)
    assert any(not torch.equal(torch.nn.functional.linear(x[:count], weight), whole[:count]) for count in counts)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("num_tokens", [1, 17, 64, 65, 1000])
@pytest.mark.parametrize(("rows", "gated"), [(2048, False), (2048, True), (4096, False), (24576, True)])
@pytest.mark.parametrize("element", ["bf16", "fp32"])
@pytest.mark.parametrize("hopper", [True, False])
def test_kernel_compiles_for_hopper(hopper: bool, element: str, rows: int, gated: bool, num_tokens: int) -> None:
    """One part and several. Tiles of other cards fit their shared memory, and compile too."""
    columns = 4096
    part = part_of(rows, columns)
    parts = -(-columns // part)
    spread = parts > 1 and num_tokens <= MOST_SPREAD
    tile = tile_of(num_tokens, rows, parts, 2 if element == "bf16" else 4, hopper)
    constants: dict[str, Any] = {"N": rows, "K": columns, "PART": part, "ROWS": tile.rows}
    constants |= {"USED": tile.used, "TOKENS": tile.tokens, "BLOCK_K": tile.columns}
    constants |= {"SILU_MUL": gated and not spread, "ACTIVATION": "silu", "DEPENDENT_LAUNCH": True}
    constants |= {"bias_ptr": None} | ({} if spread else {"partials_ptr": None})
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    types = {"partials_ptr": "*fp32"}
    program = compiled_for_hopper(invariant_product_kernel, constants, types, pointers=f"*{element}", **options)
    assert program.metadata.shared <= (227 if hopper else 99) << 10
    assert stack_bytes(program) <= 64
    if element == "bf16":  # the same instruction for every number of tokens, but for the number of its columns
        assert f"wgmma.mma_async.sync.aligned.m64n{tile.tokens}k16" in program.asm["ptx"]
        assert "mma.sync" not in program.asm["ptx"]
