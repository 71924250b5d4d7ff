"""Hopper's product of many tokens: compiled for it without a GPU, and on one against the formula in fp64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hopper import require_hopper
from hopper_compilation import compiled_for_hopper, stack_bytes
from small_batch_linear_cases import Case, arguments_of, nan_in_new_tensors
from triton.experimental.gluon.language import NVMMASharedLayout
from tuned_linears import PLAIN

from compiled_engine.engine.warm_up import start_up_batches
from compiled_engine.kernels import hopper_ring as ring
from compiled_engine.kernels.hopper_product_kernel import chunk_of, hopper_product_kernel
from compiled_engine.kernels.launch_arguments import PRODUCT_COPYING, REGISTERS
from compiled_engine.options import EngineOptions
from compiled_engine.passes.framework.profile import MeasuredProduct, load_profile
from compiled_engine.passes.linear import gated_linear, invariant_hopper, silu_mul
from compiled_engine.passes.linear.hopper_product import (
    MANY,
    TOKEN_BUCKETS,
    ProductTiles,
    hopper_product,
    product_tiles,
)
from compiled_engine.resolve.engine import resolve
from compiled_engine.tune.product_tuning import (
    SHARED_MEMORY,
    TOKENS_OF_MANY,
    ends_of,
    product_candidates,
    product_cases,
)

DEVICES = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
# Bytes of a thread's stack: an address, where sums would be hundreds.
MOST_STACK = 16
MEASURED = [(device, product) for device in DEVICES for product in load_profile(device).products]  # type: ignore[union-attr]
# Tiles, tokens, rows of the weight, K, activation or none, dtype: tiles that end in part, one that no token or row
# reaches with its last part, K that ends inside a step, fewer steps than stages.
WAYS = [
    (ProductTiles(2, 64, (256,), 4), 700, 1168, 1000, "silu", torch.bfloat16),
    (ProductTiles(2, 64, (256,), 4), 257, 1168, 1000, None, torch.bfloat16),
    (ProductTiles(2, 128, (128, 64), 3, 12), 1000, 6160, 512, "silu", torch.bfloat16),
    (ProductTiles(2, 128, (128, 64), 3, 4), 129, 1040, 4096, None, torch.float16),
    (ProductTiles(3, 64, (128, 128), 3), 513, 1040, 64, "gelu", torch.bfloat16),
    (ProductTiles(3, 64, (128, 64), 4), 384, 24576, 1024, "gelu_tanh", torch.bfloat16),
    (ProductTiles(2, 64, (128, 16), 5), 288, 6144, 1024, "silu", torch.float16),
    (ProductTiles(3, 64, (128, 32, 16), 4), 530, 1040, 1000, "silu", torch.bfloat16),
    (ProductTiles(2, 64, (64, 32), 6), 7, 200, 1000, None, torch.bfloat16),
]
# At the limits of what can be built, and whether with gate and up.
LIMITS = [
    (ProductTiles(2, 64, (256, 64, 64), 3), False),
    (ProductTiles(2, 64, (256, 128), 2), True),
    (ProductTiles(2, 128, (64, 64, 64), 2), False),
    (ProductTiles(2, 128, (128, 64), 2), False),
    (ProductTiles(3, 128, (128,), 2), True),
    (ProductTiles(3, 64, (128, 64, 64), 2), True),
]


def tiles_of(fields: dict[str, Any]) -> ProductTiles:
    return ProductTiles(**fields | {"parts": tuple(fields["parts"])})


def compiled(tiles: ProductTiles, k: int, gated: bool, scales: tuple[int, int, int] | None = None) -> Any:
    """scales: rows and columns of the weight, and columns of the inputs, that share one; for codes of 8 bits."""
    parts = (*tiles.parts, 0, 0)[:3]
    outputs = tiles.rows // 2 if gated else tiles.rows
    bits = 8 if scales else 16
    element, step, shared = ("fp8e4nv" if scales else "bf16"), ring.step_of(bits), ring.shared_layout(bits, 2)
    written = outputs * 64 // tiles.rows if scales else outputs
    out_shared = NVMMASharedLayout(swizzle_byte_width=min(128, 2 * written), element_bitwidth=16, rank=2)
    constants: dict[str, Any] = {
        "K": k,
        "GROUPS": tiles.groups,
        "ROWS": tiles.rows,
        **{f"PART{i}": part for i, part in enumerate(parts)},
        "STAGES": tiles.stages,
        "GATED": gated,
        "ACTIVATION": "silu",
        "TOGETHER": tiles.together,
        "REGISTERS": tiles.computing_registers(),
    }
    constants |= dict(zip(("TILE_ROWS", "TILE_COLUMNS", "INPUT_COLUMNS"), scales or (1, 0, 0), strict=True))
    if not scales:
        constants |= {"scales_ptr": None, "input_scales_ptr": None, "input_stride": 0, "num_outputs": 0}
    box, gated_shared = f"[{outputs // 8}, 2, 8, {step}]", ring.shared_layout(bits, 4)
    box = f"{box},{gated_shared!r}" if gated else f"[{outputs}, {step}],{shared!r}"
    types = {"w_desc": f"tensordesc<{element}{box}>", "scales_ptr": "*fp32", "input_scales_ptr": "*fp32"}
    for i, part in enumerate(parts):
        if part:
            types[f"x{i}_desc"] = f"tensordesc<{element}[{part}, {step}],{shared!r}>"
            most = part if scales else min(part, chunk_of(tiles.rows, gated))
            types[f"y{i}_desc"] = f"tensordesc<bf16[{most}, {written}],{out_shared!r}>"
        else:
            constants |= {f"x{i}_desc": None, f"y{i}_desc": None}
    aligned = ("scales_ptr", "input_scales_ptr", "input_stride", "num_outputs") if scales else ()
    return compiled_for_hopper(hopper_product_kernel, constants, types, aligned=aligned)


FORMS = {(tiles_of(product.tiles), product.k, product.gated) for _, product in MEASURED}
FORMS |= {(tiles, k, activation is not None) for tiles, _, _, k, activation, _ in WAYS}
FORMS |= {(tiles, 1024, gated) for tiles, gated in LIMITS}
FORMS |= {(tiles, 4096, gated) for gated, costs in invariant_hopper.COSTS.items() for tiles in costs}


@pytest.mark.product(one_in=60)
@pytest.mark.parametrize(("tiles", "k", "gated"), sorted(FORMS, key=str), ids=str)
def test_it_fits(tiles: ProductTiles, k: int, gated: bool) -> None:
    """In shared memory and registers, with products as wide as the parts; results are turned by stmatrix."""
    program = compiled(tiles, k, gated)
    assert program.metadata.shared <= 227 << 10
    assert stack_bytes(program) <= MOST_STACK
    ptx = program.asm["ptx"]
    for part in tiles.parts:
        assert f"wgmma.mma_async.sync.aligned.m64n{part}k16" in ptx
    assert "stmatrix.sync.aligned.m8n8.x4.trans" in ptx
    assert "st.shared.b16" not in ptx


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((1, 64, (128,), 3), "groups is 1; allowed: 2, 3"),
        ((2, 96, (128,), 3), "rows is 96; allowed: 64, 128"),
        ((2, 64, (128,), 1), "stages is 1; allowed: at least 2"),  # a group gives one back when it has the next
        ((2, 64, (128,), 3, 0), "together is 0; allowed: at least 1"),
        ((2, 64, (), 3), "parts is .*; allowed: one to three powers of two, 16 to 256, descending"),
        ((2, 64, (64, 128), 3), "descending"),
        ((2, 64, (96,), 3), "powers of two"),
        ((2, 64, (64, 8), 3), "16 to 256"),
        ((3, 64, (256,), 3), "16 to 128"),
        ((2, 64, (32, 32, 32, 32), 3), "one to three"),
        ((2, 64, (256, 32), 3), r"parts is \(256, 32\); allowed after 256: at least 64"),
        ((2, 64, (256, 16), 3), "allowed after 256"),
        ((2, 128, (128, 128), 3), r"parts is \(128, 128\) of 2 groups of 128 rows; allowed: up to 192 tokens"),
        ((2, 128, (256,), 2), "up to 192 tokens together"),
        ((3, 64, (128, 128, 64), 2), "up to 256 tokens together"),
    ],
)
def test_tiles_that_cannot_be_built_are_an_error(fields: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProductTiles(*fields)


def test_candidates_fit_and_are_for_what_the_engine_asks() -> None:
    cases = product_cases(PLAIN["qwen3-8b", 1])
    assert [case.num_tokens for case in cases] == [*TOKEN_BUCKETS, MANY]
    for case in cases:
        tried = product_candidates(case, 132)
        assert len(tried) > 5
        for tiles in tried:
            stage = (tiles.groups * tiles.rows + tiles.tokens) * 128
            assert stage * tiles.stages < SHARED_MEMORY
            assert (tiles.groups * tiles.computing_registers() + PRODUCT_COPYING) * 128 <= REGISTERS


# Of a weight [24,576, 4,096] on an H100, by tokens of a bucket.
FASTEST = {96: (3, 64, (64, 32)), 128: (3, 64, (64,)), 192: (3, 64, (128, 64)), 256: (2, 64, (128,))}
FASTEST |= {384: (3, 64, (128, 64)), 512: (3, 64, (128, 128)), 1152: (2, 64, (256, 128))}


@pytest.mark.parametrize(("tokens", "fastest"), FASTEST.items())
def test_tiles_that_were_the_fastest_are_candidates(tokens: int, fastest: tuple[int, int, tuple[int, ...]]) -> None:
    case = next(case for case in product_cases(PLAIN["qwen3-8b", 1]) if case.num_tokens == tokens)
    assert fastest in {(tiles.groups, tiles.rows, tiles.parts) for tiles in product_candidates(case, 132)}


def test_buckets_are_measured_at_both_ends() -> None:
    ends = [ends_of(case) for case in product_cases(PLAIN["qwen3-0.6b", 1])]
    assert ends[0] == (65, 96)
    assert ends[-1] == (TOKEN_BUCKETS[-1] + 1, TOKENS_OF_MANY)
    assert all(first == before + 1 for (_, before), (first, _) in pairwise(ends))


def test_a_product_of_an_earlier_profile_is_that_of_its_bucket() -> None:
    """Such a profile does not say where a bucket begins. This one has no product of 129 to 352 tokens."""
    profile = load_profile(DEVICES[0])
    assert profile is not None
    of_8b = [profile.product(tokens, 24576, 4096, True) for tokens in (65, 288, 352, 353, 384, 385, 1024, 1025, 1152)]
    (tiles,) = [product.tiles for product in profile.products if (product.last, product.num_rows) == (384, 24576)]
    assert of_8b == [None, None, None, tiles, tiles, None, None, tiles, tiles]
    many = profile.product(1_000_000, 24576, 4096, True)
    assert many is not None
    assert many["together"] == 12
    assert profile.product(384, 24576, 4096, False) is None


def test_the_warm_up_meets_every_bucket() -> None:
    """Those of earlier profiles too."""
    config = resolve(EngineOptions(device="cpu", mode="compiled", max_num_seqs=256, max_num_batched_tokens=8192))
    shapes = start_up_batches(replace(config, device=torch.device("cuda")))
    met = {next((most for most in TOKEN_BUCKETS if shape.num_tokens <= most), MANY) for shape in shapes}
    assert met == {*TOKEN_BUCKETS, MANY}
    for _, product in MEASURED:
        assert any(product.first <= shape.num_tokens <= product.last for shape in shapes)


@pytest.mark.parametrize(("tokens", "device"), [(64, "cuda"), (4096, "cpu")])
def test_other_batches_and_devices_have_no_tiles(tokens: int, device: str) -> None:
    assert product_tiles(tokens, 24576, 4096, True, torch.bfloat16, torch.device(device)) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("tiles", "tokens", "rows", "k", "activation", "dtype"), WAYS)
def test_it_is_a_linear(
    tiles: ProductTiles, tokens: int, rows: int, k: int, activation: str | None, dtype: torch.dtype
) -> None:
    """Into memory that was NaN; the same bits whatever other tokens there are."""
    require_hopper()
    given = arguments_of(Case(tokens, rows, k, silu_mul=activation is not None), dtype, "cuda")
    arguments = given.weight_NK, activation is not None, activation or "silu", tiles
    with nan_in_new_tensors():
        found = hopper_product(given.x_TK, *arguments)
    expected = torch.nn.functional.linear(given.x_TK.double(), given.weight_NK.double())
    if activation is not None:
        expected = silu_mul.reference(expected, activation)
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 1e-2
    others = torch.cat([given.x_TK, given.x_TK])
    others[tokens // 2 :] = float("nan")
    assert torch.equal(hopper_product(others, *arguments)[: tokens // 2], found[: tokens // 2])


@pytest.mark.gpu
@pytest.mark.product(one_in=3)
@pytest.mark.parametrize(("device", "product"), MEASURED, ids=str)
def test_the_op_launches_what_the_profile_names(device: str, product: MeasuredProduct) -> None:
    """In a graph and replayed: right every time, and bit for bit the same."""
    require_hopper()
    if torch.cuda.get_device_name() != device:
        pytest.skip(f"measured on {device}")
    rows, k = product.num_rows, product.k
    x_TK = torch.randn(product.first + 20, k, dtype=torch.bfloat16, device="cuda")
    weight_NK = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") / k**0.5
    assert product_tiles(len(x_TK), rows, k, True, torch.bfloat16, x_TK.device) == tiles_of(product.tiles)
    expected = silu_mul.reference(torch.nn.functional.linear(x_TK, weight_NK)).float()
    first = gated_linear.launch(x_TK, weight_NK, None)
    assert float((first.float() - expected).abs().max() / expected.abs().max()) < 2e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [gated_linear.launch(x_TK, weight_NK, None) for _ in range(3)]
    for _ in range(3):
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(output, first) for output in outputs)
