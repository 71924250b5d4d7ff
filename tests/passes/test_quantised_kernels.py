"""The kernels of quantised linears: Triton's under its interpreter, all compiled for Hopper, which needs no GPU, and on
one against the reference, also in a CUDA graph.

The interpreter loads, multiplies and converts e4m3 exactly, but rounds to it without a carry into the exponent: inputs
there lie on the grid, and rounding itself is compared on a GPU.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hopper_compilation import compiled_for_hopper, stack_bytes
from interpreting_process import interpret
from quantised_linear_cases import BY_BLOCKS, BY_ROWS, SCHEMES, Case, arguments_of, assert_kernels_compute_the_reference
from small_batch_linear_cases import nan_in_new_tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiled_engine.passes.framework.rounding import decode, spread
from compiled_engine.passes.framework.rounding import round_inputs as rounded_by_torch
from compiled_engine.passes.linear import quantised_product, round_inputs
from compiled_engine.passes.linear.hopper_linear import TOKEN_BUCKETS
from compiled_engine.passes.linear.hopper_quantised import (
    PRODUCT_TILES,
    quantised_tiles,
)
from compiled_engine.passes.linear.quantised_kernels import (
    HOPPER_CODES,
    HOPPER_LINEAR,
    HOPPER_PRODUCT,
    LIBRARY,
    TORCH,
    TRITON,
    choose,
    describe_kernels,
    scaling_of,
)
from compiled_engine.passes.linear.quantised_linear_op import reference
from compiled_engine.quantisation import LinearScheme, Rounding

# Tokens, rows, columns: tiles that end in part, more tokens than a tile, a step that ends beyond K, one of either.
CASES = (
    Case(3, 72, 192, bias=True),
    Case(17, 136, 320, silu_mul=True, residual=True, activation="gelu_tanh"),
    Case(70, 200, 256, residual=True),
    Case(1, 64, 104),
)
# The linears of Qwen3-8B: rows, columns, silu * up.
SHAPES = ((6144, 4096, False), (4096, 4096, False), (24576, 4096, True), (4096, 12288, False))
MULTIPROCESSORS = 132

INTERPRETED = """
import torch
from test_quantised_kernels import CASES, FUSED, SCHEMES, check_fused, interpreted_error

from compiled_engine.passes.linear import round_inputs
from compiled_engine.quantisation import Rounding

count = 0
for fused in FUSED:
    for rounding in ("e4m3 1x*", "e4m3 1x32", "e4m3 static", "int8 1x*", "int8 1x32", "int8 static"):
        check_fused(fused, rounding, 5, 96, torch.float32, "cpu")
        count += 1
few_tokens, round_inputs.FEW_TOKENS = round_inputs.FEW_TOKENS, 4
for num_tokens in (2, 5):
    x_TK = torch.ones(num_tokens, 96)
    x_TK[0, 3] = float("nan")
    codes_TK, scales_CT = round_inputs.launch(x_TK, Rounding.parse("int8 1x*"), None)
    values_TK = codes_TK.float() * scales_CT.t()
    assert values_TK[0].isnan().all() and not values_TK[1:].isnan().any()
for k in (96, 3072, 3075):
    for rounding in ("e4m3 1x*", "e4m3 1x32", "e4m3 1x4096", "e4m3 static", "int8 1x*", "int8 static"):
        check_fused({}, rounding, 5, k, torch.float16, "cpu")
        count += 1
    check_fused({"activation": "silu"}, "e4m3 1x*", 5, k, torch.float16, "cpu")
    count += 1
round_inputs.FEW_TOKENS = few_tokens
for scheme in SCHEMES:
    for case in CASES:
        for dtype, most in ((torch.float32, 2e-6), (torch.float16, 1e-3)):
            error = interpreted_error(case, scheme, dtype)
            assert error <= most, (scheme, case, dtype, error)
            count += 1
print(count)
"""


def interpreted_error(case: Case, scheme: str, dtype: torch.dtype) -> float:
    """The largest difference of Triton's product from the reference, relative to the largest value; NaN if anything
    is. Rounded inputs are compared bit for bit."""
    given, parsed = arguments_of(case, scheme, dtype), LinearScheme.parse(scheme)
    x_TK, scales_CT = given["x_TK"], None
    with nan_in_new_tensors():
        if parsed.inputs is not None:
            codes_TK, scales = rounded_by_torch(x_TK, parsed.inputs, given["input_scale_1"])
            x_TK, scales_CT = round_inputs.launch(x_TK, parsed.inputs, given["input_scale_1"])
            assert torch.equal(x_TK.float(), codes_TK.float())
            assert torch.equal(scales_CT, scales.t().expand(scales_CT.shape))
        scaling = scaling_of(given["scales_RC"], scales_CT, parsed)
        after = given["bias_N"], given["residual_TM"], given["silu_mul"], given["activation"]
        step = quantised_product.step_of(parsed)
        found = quantised_product.launch(x_TK, given["codes_NK"], scaling, *after, step, dtype)
    expected = reference(**given).float()
    return float((found.float() - expected).abs().max() / expected.abs().max())


# What a kernel computes before it rounds: names and values of arguments, a number standing for a vector around it.
FUSED: tuple[dict[str, Any], ...] = (
    {"norm": {"eps": 1e-5}},
    {"norm": {"eps": 1e-5, "offset": 1.0, "wide": True}},
    {"activation": "silu"},
    {"activation": "gelu_tanh"},
    {"sum": {"eps": 1e-5}},
    {"sum": {"eps": 1e-5, "offset": 1.0, "wide": True}, "inner": True},
)


def check_fused(fused: dict[str, Any], rounding: str, num_tokens: int, k: int, dtype: torch.dtype, device: str) -> None:
    """Into memory that was NaN: scales and codes are the reference's but for an ulp before the rounding, which moves a
    value by a code; the sum is the same."""
    generator = torch.Generator().manual_seed(num_tokens)
    parsed, activation = Rounding.parse(rounding), fused.get("activation", "")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x_TK, residual_TK = normal(num_tokens, 2 * k if activation else k), normal(num_tokens, k)
    static = torch.full((1,), 0.01, device=device) if parsed.static else None
    weight_K, inner_K = 1 + 0.2 * normal(k), 1 + 0.2 * normal(k) if fused.get("inner") else None
    neighbour: float | torch.Tensor = 0.0
    with nan_in_new_tensors():
        if "sum" in fused:
            eps, offset, wide = ({"eps": 0.0, "offset": 0.0, "wide": False} | fused["sum"]).values()
            given = x_TK, residual_TK, weight_K, static, rounding, eps, offset, wide, inner_K
            found, expected = round_inputs.sum_launch(*given), round_inputs.sum_reference(*given)
            ulp = torch.finfo(dtype).eps * float(expected[2].abs().max())  # the inner norm may round to its neighbour
            torch.testing.assert_close(found[2], expected[2], rtol=0.0, atol=ulp)
            # Where x and the residual cancel, an ulp of the sum is many codes of the normalised value.
            gain_T1 = expected[2].float().square().mean(-1, keepdim=True).rsqrt()
            neighbour = ulp * gain_T1 * (weight_K.float() + offset).abs() if inner_K is not None else 0.0
        else:
            eps, offset, wide = ({"eps": 0.0, "offset": 0.0, "wide": False} | fused.get("norm", {})).values()
            norm = weight_K if "norm" in fused else None, eps, offset, wide, activation
            found = round_inputs.launch(x_TK, parsed, static, *norm)
            expected = round_inputs.reference(x_TK, static, rounding, *norm)
    torch.testing.assert_close(found[1], expected[1], rtol=2 * torch.finfo(dtype).eps, atol=0.0)
    assert found[0].dtype == expected[0].dtype
    values, wanted = (
        decode(codes, scales.t(), parsed) for codes, scales in ((found[0], found[1]), (expected[0], expected[1]))
    )
    smallest = 2.0**-9 * spread(expected[1].t(), parsed, num_tokens, k)
    off = (values - wanted).abs()
    if parsed.is_integer:
        one = spread(expected[1].t(), parsed, num_tokens, k)
        assert (off <= 1.01 * one + wanted.abs() * 2.0**-6 + neighbour).all()
        assert float((off > one / 2).float().mean()) < 0.05
        return
    # The interpreter rounds without a carry into the exponent.
    carried = (expected[0].view(torch.uint8) & 7 == 0) & (device == "cpu")
    assert (carried | (off <= wanted.abs() / 7 + smallest + neighbour)).all()
    assert float((~carried & (off > wanted.abs() / 50 + smallest / 2)).float().mean()) < 0.05


@pytest.mark.parametrize("scheme", [BY_ROWS, BY_BLOCKS])
@pytest.mark.parametrize("num_tokens", [1, 17, 130])
def test_every_row_of_scales_has_room_for_whole_tiles(scheme: str, num_tokens: int) -> None:
    """Kernels read the scales of a whole tile, also those of tokens that are not there."""
    rounding = LinearScheme.parse(scheme).inputs
    assert rounding is not None
    codes_TK = torch.empty((num_tokens, 320), dtype=rounding.dtype)
    scales_CT = round_inputs.empty_scales(codes_TK, rounding)
    whole_tiles = -(-num_tokens // round_inputs.MOST_TILE) * round_inputs.MOST_TILE
    assert scales_CT.stride(0) == whole_tiles
    assert scales_CT.untyped_storage().nbytes() == scales_CT.shape[0] * whole_tiles * scales_CT.itemsize


@pytest.mark.parametrize("rounding", ["e4m3 1x*", "e4m3 1x128"])
def test_scales_of_a_trace_have_the_tokens_of_their_inputs(rounding: str) -> None:
    """Their number is a symbol, and no op makes another one of it, which later passes could not place."""
    symbols = ShapeEnv()
    with FakeTensorMode(shape_env=symbols):
        with symbols.ignore_fresh_unbacked_symbols():
            x_TK = torch.empty(symbols.create_unbacked_symint(), 256)
        codes_TK, scales_CT = round_inputs.fake_codes(x_TK, rounding)
        assert str(codes_TK.shape[0]) == str(scales_CT.shape[1]) == str(x_TK.shape[0])
    assert not symbols.pending_fresh_unbacked_symbols


def test_triton_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", INTERPRETED)
    expected = 2 * len(SCHEMES) * len(CASES) + 6 * len(FUSED) + 3 * 7
    assert run.stdout.strip().splitlines()[-1:] == [str(expected)], run.stderr[-2000:]


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("scales", [(1, 0, 0), (128, 128, 128)])
@pytest.mark.parametrize(
    ("tokens", "rows", "k", "gated"),
    [
        (1, *SHAPES[0]),
        (64, *SHAPES[0]),
        (64, *SHAPES[3]),
        (8, *SHAPES[2]),
        (64, *SHAPES[2]),
        (128, *SHAPES[1]),
        (128, *SHAPES[2]),
    ],
)
def test_tiles_of_the_rule_fit(tokens: int, rows: int, k: int, gated: bool, scales: tuple[int, int, int]) -> None:
    """In shared memory and registers; before the wait the kernel touches the weight alone."""
    from test_hopper_linear import compiled

    tiles = quantised_tiles(tokens, rows, k, gated, MULTIPROCESSORS)
    program = compiled(tiles, k, gated, bias=gated, residual=not gated, scales=scales)
    assert program.metadata.shared <= 227 << 10
    assert stack_bytes(program) == 0
    ptx = program.asm["ptx"]
    assert f"m64n{tiles.parts * tiles.tokens}k32.f32.e4m3.e4m3" in ptx
    copy = re.compile(r"cp\.async\.bulk\.tensor\.(\d)d.*?\], \[(%rd\d+)")
    ahead = next(copies for part in ptx.split("griddepcontrol.wait") if (copies := copy.findall(part)))
    assert len({descriptor for _, descriptor in ahead}) == 1
    # All of a group of warps must have read a stage before it is given back.
    ordered = re.findall(r"bar\.sync|wgmma\.mma_async|mbarrier\.arrive\.shared::cta\.b64 _", ptx)
    arrivals = {ordered[i - 1] for i, op in enumerate(ordered) if op.startswith("mbarrier.arrive")}
    assert arrivals == {"bar.sync"}


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("gated", [False, True])
def test_products_of_the_rule_fit(gated: bool) -> None:
    from test_hopper_product import compiled

    program = compiled(PRODUCT_TILES, 4096, gated, scales=(128, 128, 128))
    assert program.metadata.shared <= 227 << 10
    assert stack_bytes(program) == 0
    assert "m64n128k32.f32.e4m3.e4m3" in program.asm["ptx"]


@pytest.mark.product(one_in=3, each=("columns",))
@pytest.mark.parametrize("columns", [0, 32])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 4096), (8, 24576), (64, 4096), (512, 24576)])
def test_integers_are_multiplied_as_integers_without_a_stack(tokens: int, rows: int, columns: int) -> None:
    """Scales of whole rows of weight and inputs, or of 64 columns of the weight and `columns` of the inputs."""
    tiles = quantised_product.choose_tiles(tokens, rows, True)
    constants = {
        "K": 4096, "TILE_ROWS": 1, "TILE_COLUMNS": 2 * columns or 4096, "INPUT_COLUMNS": columns or 4096,
        "SILU_MUL": False, "ACTIVATION": "silu", "TOKENS": tiles.tokens, "ROWS": tiles.rows,
        "BLOCK_K": columns or 128, "ROWS_FIRST": tiles.tokens < quantised_product.TOKENS_FIRST,
        "NUM_STAGES": tiles.num_stages, "DEPENDENT_LAUNCH": True, "bias_ptr": None, "residual_ptr": None,
    }  # fmt: skip
    types = {"x_ptr": "*i8", "codes_ptr": "*i8", "scales_ptr": "*fp32", "input_scales_ptr": "*fp32"}
    kernel, aligned = quantised_product.quantised_product_kernel, (*types, "out_ptr", "x_stride", "input_stride")
    program = compiled_for_hopper(kernel, constants, types, aligned=aligned, num_warps=tiles.num_warps)
    assert "s32.s8.s8" in program.asm["ptx"]
    assert stack_bytes(program) == 0


@pytest.mark.parametrize(("rows", "k", "gated"), [*SHAPES, (4104, 1040, False), (8, 16, False)])
def test_tiles_of_the_rule_fit_into_shared_memory(rows: int, k: int, gated: bool) -> None:
    for tokens in TOKEN_BUCKETS:
        tiles = quantised_tiles(tokens, rows, k, gated, MULTIPROCESSORS)
        assert tiles.tokens == max(8, tokens)
        stage = (64 * tiles.groups + tiles.parts * tiles.tokens) * tiles.products * 128
        assert stage * tiles.stages <= 226 << 10
        assert tiles.parts * tiles.products == 1 or k % (128 * tiles.parts * tiles.products) == 0


def test_each_linear_has_its_kernel_with_a_reason() -> None:
    def kernel(scheme: str, tokens: int, k: int = 256, rows: int = 128, **more: Any) -> str:
        given = {"capability": (9, 0), "silu_mul": False, "bias": False, "dtype": torch.bfloat16} | more
        return str(choose(num_tokens=tokens, num_rows=rows, k=k, scheme=LinearScheme.parse(scheme), **given))

    assert {kernel(scheme, tokens) for scheme in (BY_ROWS, BY_BLOCKS) for tokens in (1, 64)} == {HOPPER_LINEAR}
    assert {kernel(scheme, tokens) for scheme in (BY_ROWS, BY_BLOCKS) for tokens in (65, 8192)} == {HOPPER_CODES}
    assert kernel(BY_ROWS, 65, bias=True) == kernel("e4m3 8x128, inputs e4m3 1x128", 65) == HOPPER_LINEAR
    assert kernel("e4m3 8x128, inputs e4m3 1x128", 129).startswith(f"{HOPPER_PRODUCT}: tiles of 128 rows")
    assert kernel(BY_ROWS, 129, bias=True) == LIBRARY
    assert kernel(BY_ROWS, 129, capability=(8, 9)) == kernel(BY_ROWS, 129, capability=(10, 0)) == LIBRARY
    assert kernel(BY_BLOCKS, 8192, bias=True) == f"{TRITON}: it has a bias"
    assert kernel(BY_BLOCKS, 1, k=72, rows=20).startswith(f"{TRITON}: its sizes [20, 72]")
    assert "results are float32" in kernel(BY_ROWS, 1, dtype=torch.float32)
    assert "not rounded" in kernel("e4m3 1x*", 1)
    assert "64 columns" not in kernel("e4m3 1x64, inputs e4m3 1x64", 1)
    assert kernel("e4m3 1x64, inputs e4m3 1x64", 1).startswith(f"{TRITON}: its scales are not of 128 columns")
    assert kernel("e4m3 8x40, inputs e4m3 1x40", 1).startswith(f"{TORCH}: its scales are of columns")
    assert kernel(BY_ROWS, 1, capability=(10, 0)) == TRITON
    assert kernel(BY_ROWS, 1, capability=(8, 0)).startswith(f"{TORCH}: the GPU's compute capability 8.0")
    integers = "int8 1x*, inputs int8 1x*"
    assert kernel(integers, 1) == kernel(integers, 8192) == f"{TRITON}: its codes are int8"
    assert kernel(integers, 8192, capability=(8, 0)) == TRITON
    assert kernel(integers, 1, capability=(7, 5)).startswith(f"{TORCH}: the GPU's compute capability 7.5")


@pytest.mark.parametrize(
    ("scheme", "capability", "expected"),
    [
        (
            "int4 1x128",
            (9, 0),
            "up to 128 tokens: Hopper's linear of integers; more: Hopper's product of integers; "
            "thousands: the product of the decoded weight",
        ),
        (
            "uint4 1x64",
            (9, 0),
            "up to 64 tokens: Triton's product of integers: its scales are not of 128 columns of a row (uint4 1x64); "
            "more: the product of the decoded weight",
        ),
        ("int4 1x32", (8, 0), "up to 64 tokens: Triton's product of integers; more: the product of the decoded weight"),
        (BY_ROWS, (9, 0), "up to 64 tokens: Hopper's linear; more: Hopper's product of codes"),
        (BY_ROWS, (8, 9), "up to 128 tokens: Triton's product; more: torch._scaled_mm"),
        ("int8 1x*, inputs int8 1x*", (8, 0), "any number of tokens: Triton's product"),
    ],
)
def test_the_report_names_kernels_and_why_they_are_not_the_fast_ones(
    scheme: str, capability: tuple[int, int], expected: str
) -> None:
    parsed = LinearScheme.parse(scheme)
    assert describe_kernels(capability, 4096, 4096, False, parsed, torch.bfloat16) == expected


# Beside those of the interpreter, shapes that Hopper's kernels take: rows that leave the last tile in part, K that ends
# inside a step, several parts of K, and more tokens than any tile.
ON_HOPPER = (
    Case(1, 4096, 4096, residual=True),
    Case(1, 24576, 4096, silu_mul=True),
    Case(5, 1032, 1024, bias=True),
    Case(13, 2064, 1040, silu_mul=True, bias=True, activation="gelu"),
    Case(40, 4104, 1040, residual=True, bias=True),
    Case(64, 6144, 1024),
    Case(128, 2000, 4096, residual=True),
    Case(128, 6160, 1024, silu_mul=True),
    Case(257, 1168, 1040, silu_mul=True),
    Case(700, 6152, 1024, residual=True),
    Case(1000, 24576, 512, silu_mul=True),
)


@pytest.mark.gpu
@pytest.mark.product(one_in=8, each=("scheme",))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("case", [*CASES, *ON_HOPPER], ids=str)
def test_kernels_compute_the_reference(case: Case, scheme: str, dtype: torch.dtype) -> None:
    assert_kernels_compute_the_reference(case, scheme, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if "inputs" in scheme])
def test_inputs_are_rounded_by_the_formula(scheme: str, dtype: torch.dtype) -> None:
    """Bit for bit, over many magnitudes; NaN stays NaN, but for a static scale of integers."""
    rounding = LinearScheme.parse(scheme).inputs
    assert rounding is not None
    generator = torch.Generator().manual_seed(0)
    for num_tokens, k in ((1, 64), (7, 1000), (33, 4096), (130, 12288), (1025, 1000), (1030, 12288), (1100, 3072)):
        x_TK = (
            torch.randn((num_tokens, k), generator=generator) * torch.randn((num_tokens, 1), generator=generator).exp()
        )
        x_TK[num_tokens // 2, : k // 2] = 0
        x_TK = x_TK.to("cuda", dtype)
        static = torch.full((1,), 0.003, device="cuda") if rounding.static else None
        with nan_in_new_tensors():
            codes_TK, scales_CT = round_inputs.launch(x_TK, rounding, static)
        expected_TK, expected = rounded_by_torch(x_TK, rounding, static)
        assert torch.equal(scales_CT, expected.t().expand(scales_CT.shape))
        assert torch.equal(codes_TK.view(torch.uint8), expected_TK.view(torch.uint8))
    x_TK[0, 3] = float("nan")
    codes_TK, scales_CT = round_inputs.launch(x_TK, rounding, static)
    found_TK = decode(codes_TK, scales_CT.t(), rounding._replace(static=False, rows=1))
    assert found_TK[0, 3].isnan() or (rounding.is_integer and rounding.static)


@pytest.mark.gpu
@pytest.mark.product(one_in=8, each=("fused", "rounding"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", ["e4m3 1x*", "e4m3 1x128", "e4m3 static"])
@pytest.mark.parametrize("fused", FUSED, ids=str)
def test_rounding_behind_what_comes_before(fused: dict[str, Any], rounding: str, dtype: torch.dtype) -> None:
    for num_tokens, k in ((1, 64), (7, 1000), (33, 4096), (130, 12288), (1025, 1000), (1030, 12288), (1100, 3072)):
        check_fused(fused, rounding, num_tokens, k, dtype, "cuda")
