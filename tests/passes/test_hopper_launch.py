"""The launches of Hopper's kernels of linears: from what they give, a kernel in plain torch computes the linear."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace

import hypothesis
import hypothesis.strategies
import pytest
import torch
from quantised_linear_cases import BY_BLOCKS, BY_ROWS
from quantised_linear_cases import Case as CodesCase
from quantised_linear_cases import arguments_of as codes_arguments_of
from scripted_hopper import MULTIPROCESSORS, scripted_hopper
from small_batch_linear_cases import Case, arguments_of, error, nan_in_new_tensors

from compiled_engine.kernels import hopper_codes_kernel, hopper_linear_kernel, hopper_product_kernel
from compiled_engine.passes.framework.profile import load_profile
from compiled_engine.passes.linear import round_inputs
from compiled_engine.passes.linear.hopper_codes import CodesTiles, codes_tiles, hopper_codes, why_not_on_the_left
from compiled_engine.passes.linear.hopper_linear import (
    TOKEN_BUCKETS,
    HopperTiles,
    hopper_linear,
    hopper_tiles,
    multiprocessors,
    rows_for_boxes,
    tiles_by_rule,
    tiles_for,
)
from compiled_engine.passes.linear.hopper_product import ProductTiles, hopper_product, product_tiles
from compiled_engine.passes.linear.quantised_kernels import scaling_of
from compiled_engine.passes.linear.quantised_linear_op import reference
from compiled_engine.quantisation import LinearScheme

pytestmark = pytest.mark.usefixtures("one_thread")

# Tiles, tokens, rows, K: tiles that end in part, K that ends inside a step, several parts and products of K.
LINEARS = [
    (HopperTiles(1, 8, 4), 7, 80, 200),
    (HopperTiles(2, 16, 3), 16, 208, 128),
    (HopperTiles(3, 8, 4, 64, parts=2), 5, 272, 256),
    (HopperTiles(1, 8, 2, products=2), 3, 80, 256),
    (HopperTiles(1, 16, 2, parts=2, products=2), 9, 144, 512),
]
PRODUCTS = [
    (ProductTiles(2, 64, (64,), 2), 70, 208, 200),
    (ProductTiles(2, 64, (32, 16), 2), 100, 272, 128),
    (ProductTiles(3, 64, (64, 32, 16), 2), 130, 208, 64),
    (ProductTiles(2, 128, (128,), 2), 130, 272, 72),
    (ProductTiles(2, 64, (256,), 2), 300, 144, 64),
]
DEVICE, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
# Python functions of a launch, without the kernel's own.
MOST_CALLS = {"linear": 15, "codes": 16, "product": 22, "inputs": 13}
KINDS = [
    {},
    {"bias": True, "residual": True},
    {"silu_mul": True},
    {"silu_mul": True, "bias": True, "gemma": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("tiles", "tokens", "rows", "k"), LINEARS, ids=str)
def test_a_launch_for_few_tokens_is_the_linear(
    tiles: HopperTiles, tokens: int, rows: int, k: int, kind: dict[str, bool]
) -> None:
    given = arguments_of(Case(tokens, rows, k, **kind), torch.bfloat16)
    before = given.weight_NK, given.bias_N, given.silu_mul, given.activation
    with scripted_hopper() as scripted, nan_in_new_tensors():
        found = hopper_linear(given.x_TK, *before, tiles, given.residual_TM)
    assert found.dtype == torch.bfloat16
    assert error(found, given) < 1e-2
    ((_, _, options),) = scripted.calls
    assert options["maxnreg"] == (tiles.registers or None)
    assert options["REGISTERS"] == tiles.computing_registers()
    assert (options["STAGES"], options["num_warps"], options["launch_pdl"]) == (tiles.stages, 4, True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("tiles", "tokens", "rows", "k"), PRODUCTS, ids=str)
def test_a_launch_for_many_tokens_is_the_linear(
    tiles: ProductTiles, tokens: int, rows: int, k: int, gated: bool
) -> None:
    given = arguments_of(Case(tokens, rows, k, silu_mul=gated), torch.float16)
    with scripted_hopper() as scripted, nan_in_new_tensors():
        found = hopper_product(given.x_TK, given.weight_NK, gated, "silu", tiles)
    assert found.dtype == torch.float16
    assert error(found, given) < 2e-3
    ((_, _, options),) = scripted.calls
    assert options["REGISTERS"] == tiles.computing_registers()
    assert (options["STAGES"], options["TOGETHER"]) == (tiles.stages, tiles.together)


def test_a_launch_has_no_more_programs_than_tiles_or_multiprocessors() -> None:
    tiles = ProductTiles(2, 64, (64,), 2)
    for tokens, rows, programs in ((64, 128, 1), (65, 129 + 7, 4), (64, 128 * 140, 132)):
        with scripted_hopper() as scripted:
            x_TK, weight_NK = torch.ones(tokens, 16).half(), torch.ones(rows, 16).half()
            hopper_product(x_TK, weight_NK, False, "silu", tiles)
        ((_, grid, _),) = scripted.calls
        assert grid == (programs,)


ROWS = ("dense", "columns of a wider one", "uneven rows", "turned", "every second column", "a shifted beginning")


@pytest.mark.parametrize("given", ROWS)
def test_rows_are_copied_where_boxes_of_them_cannot_be(given: str) -> None:
    """Boxes need dense rows that begin at multiples of 16 bytes."""
    wide = torch.arange(24 * 24, dtype=torch.float16).view(24, 24)
    x_TK = {
        "dense": wide,
        "columns of a wider one": wide[:, :16],
        "uneven rows": torch.arange(20 * 20, dtype=torch.float16).view(20, 20)[:, :16],
        "turned": wide.t(),
        "every second column": wide[:, :16:2],
        "a shifted beginning": wide[:, 4:20],
    }[given]
    rows = rows_for_boxes(x_TK)
    assert torch.equal(rows, x_TK)
    assert (rows is x_TK) == (given in ("dense", "columns of a wider one"))
    assert rows.stride(1) == 1
    assert rows.stride(0) * rows.element_size() % 16 == 0
    assert rows.data_ptr() % 16 == 0


def test_gate_and_up_in_four_parts_are_refused() -> None:
    given = arguments_of(Case(8, 64, 512, silu_mul=True), torch.bfloat16)
    for parts in (2, 4):
        tiles = HopperTiles(1, 8, 2, parts=parts)
        with scripted_hopper():
            if parts == 2:
                assert error(hopper_linear(given.x_TK, given.weight_NK, None, True, "silu", tiles), given) < 1e-2
            else:
                with pytest.raises(ValueError, match="parts is 4; allowed for gate and up: 1 or 2"):
                    hopper_linear(given.x_TK, given.weight_NK, None, True, "silu", tiles)
    plain = arguments_of(Case(8, 64, 512), torch.bfloat16)
    with scripted_hopper():
        found = hopper_linear(plain.x_TK, plain.weight_NK, None, False, "silu", HopperTiles(1, 8, 2, parts=4))
    assert error(found, plain) < 1e-2


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, tuple[int, int]], None]]:
    """Sets the name and the capability of the GPU that torch is asked for."""

    def is_there(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        clear()

    def clear() -> None:
        for cached in (hopper_tiles, product_tiles, multiprocessors):
            cached.cache_clear()

    yield is_there
    clear()


def test_tiles_are_those_that_were_measured_on_the_device(gpu: Callable[[str, tuple[int, int]], None]) -> None:
    gpu(DEVICE, (9, 0))
    profile, cuda = load_profile(DEVICE), torch.device("cuda")
    assert profile is not None
    for (bucket, rows, k, gated), fields in profile.hopper_tiles.items():
        first = 1 + max((tokens for tokens in TOKEN_BUCKETS if tokens < bucket), default=0)
        for tokens in {first, bucket}:
            for dtype in (torch.bfloat16, torch.float16):
                assert hopper_tiles(tokens, rows, k, gated, dtype, cuda) == HopperTiles(**fields)
    for product in profile.products:
        shape = product.num_rows, product.k, product.gated
        found = product_tiles(product.last, *shape, torch.bfloat16, cuda)
        assert found is not None
        assert vars(found) == product.tiles | {"parts": tuple(product.tiles["parts"]), "together": found.together}


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "device"),
    [
        (DEVICE, (9, 0), torch.float32, "cuda"),
        (DEVICE, (9, 0), torch.bfloat16, "cpu"),
        (DEVICE, (8, 9), torch.bfloat16, "cuda"),
        (DEVICE, (10, 9), torch.bfloat16, "cuda"),
    ],
    ids=str,
)
def test_other_devices_and_types_have_no_tiles(
    gpu: Callable[[str, tuple[int, int]], None],
    name: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    device: str,
) -> None:
    gpu(name, capability)
    profile = load_profile(DEVICE)
    assert profile is not None
    for tokens, rows, k, gated in profile.hopper_tiles:
        assert hopper_tiles(tokens, rows, k, gated, dtype, torch.device(device)) is None
    for product in profile.products:
        shape = product.num_rows, product.k, product.gated
        assert product_tiles(product.last, *shape, dtype, torch.device(device)) is None


def test_a_hopper_gpu_that_nobody_has_measured_has_tiles_by_the_rule(
    gpu: Callable[[str, tuple[int, int]], None],
) -> None:
    gpu("a GPU that nobody has measured", (9, 0))
    cuda = torch.device("cuda")
    for tokens, rows, k, gated in ((1, 24576, 4096, True), (64, 4096, 12288, False), (8, 5120, 2048, False)):
        assert hopper_tiles(tokens, rows, k, gated, torch.float16, cuda) == tiles_by_rule(tokens, rows, k, gated, 132)
        assert hopper_tiles(tokens, rows, k, gated, torch.float32, cuda) is None
        assert product_tiles(tokens, rows, k, gated, torch.float16, cuda) is None


def test_the_rule_is_for_what_no_measurement_is_near_to(gpu: Callable[[str, tuple[int, int]], None]) -> None:
    """A measured shape for which another kernel was faster keeps it; a near one may have Hopper's kernel."""
    gpu(DEVICE, (9, 0))
    profile, cuda = load_profile(DEVICE), torch.device("cuda")
    assert profile is not None
    measured = [
        (tokens, rows, k, gated)
        for tokens, rows, k, gated in profile.tiles
        if (tokens, rows, k, gated) not in profile.hopper_tiles and rows >= 2048 and tokens <= 64
    ]
    assert measured
    assert not any(hopper_tiles(*shape, torch.bfloat16, cuda) for shape in measured)
    assert tiles_for(profile, 64, 5120, 17408, False, 132) is None
    assert hopper_tiles(64, 5120, 17408, False, torch.bfloat16, cuda) == HopperTiles(1, 64, 6, 128, 1, 2)


@pytest.mark.parametrize(
    ("tokens", "rows", "k", "gated", "has_tiles"),
    [
        (1, 16384, 5376, False, True),
        (1, 5120, 17408, False, False),  # two fifths of the multiprocessors would be idle
        (8, 5120, 17408, False, False),
        (8, 5120, 2048, False, True),  # few columns
        (1, 5120, 2048, False, False),
        (33, 5120, 17408, False, True),  # more tokens
        (65, 16384, 5376, False, False),
        (8, 1024, 2048, False, False),
        (64, 16384, 5400, False, False),
        (64, 16392, 5376, True, False),
    ],
)
def test_the_rule_chooses_by_what_is_busy(tokens: int, rows: int, k: int, gated: bool, has_tiles: bool) -> None:
    assert (tiles_by_rule(tokens, rows, k, gated, 132) is not None) == has_tiles


def near_tiles(device: str, tokens: int, rows: int, k: int, gated: bool) -> HopperTiles | None:
    profile = load_profile(device)
    assert profile is not None
    return tiles_for(profile, tokens, rows, k, gated, num_sms=132)


@hypothesis.given(
    device=hypothesis.strategies.sampled_from((DEVICE, H100)),
    tokens=hypothesis.strategies.sampled_from(TOKEN_BUCKETS),
    rows=hypothesis.strategies.integers(100, 40_000).map(lambda value: 16 * value // 2),
    steps=hypothesis.strategies.integers(8, 400),
    gated=hypothesis.strategies.booleans(),
)
def test_tiles_of_a_near_shape_fit(device: str, tokens: int, rows: int, steps: int, gated: bool) -> None:
    """In the shared memory, rows and columns; not much fewer multiprocessors are busy than where they were measured."""
    k = 32 * steps
    tiles = near_tiles(device, tokens, rows, k, gated)
    if tiles is None:
        return
    assert tokens <= tiles.tokens
    assert tiles.stages * tiles.stage_bytes + tiles.ending_bytes(gated) <= 227 << 10
    assert 1 <= tiles.stages <= k // tiles.columns
    assert k % tiles.columns == 0
    assert tiles.parts * tiles.tokens <= 128
    assert rows % (16 if gated else 8) == 0
    assert tiles.parts <= (2 if gated else 4)
    # With so few registers the assembler fails, except for tiles that were measured so.
    measured = [HopperTiles(**each) for each in load_profile(device).hopper_tiles.values()]  # type: ignore[union-attr]
    assert tiles.parts * tiles.tokens <= 32 or tiles.registers != 64 or tiles in measured
    assert tiles.share_of_busy(rows, 132) >= 0.25


@pytest.mark.parametrize(
    ("tokens", "rows", "k", "gated", "expected"),
    [
        (16, 6400, 2048, False, HopperTiles(1, 16, 10, 64, 1, 2)),  # as for 6144 x 2048
        (64, 28672, 4096, True, HopperTiles(2, 64, 4, 0, 1, 2)),  # three groups would leave two fifths of it idle
        (8, 5120, 17920, False, HopperTiles(1, 8, 8, 64, 4, 2)),  # with half of the rows for a program
        (64, 2560, 20480, False, HopperTiles(1, 64, 8, 128, 2, 1)),  # where such a program would have too many columns
        (8, 4096, 1088, False, None),  # the kernel for small batches is faster for 4096 x 1024
        (16, 6144, 2080, False, None),  # K is no multiple of its columns
        (16, 8, 2048, False, None),
    ],
)
def test_a_shape_that_was_not_measured_has_tiles_of_the_nearest(
    tokens: int, rows: int, k: int, gated: bool, expected: HopperTiles | None
) -> None:
    assert near_tiles(H100, tokens, rows, k, gated) == expected


def test_what_is_far_from_all_that_was_measured_has_no_tiles(gpu: Callable[[str, tuple[int, int]], None]) -> None:
    gpu(DEVICE, (9, 0))
    cuda = torch.device("cuda")
    for tokens in (1, 64, 128, 129, 4096):
        assert hopper_tiles(tokens, 24, 40, False, torch.bfloat16, cuda) is None
        assert product_tiles(tokens, 24, 40, False, torch.bfloat16, cuda) is None


def test_multiprocessors_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    properties = SimpleNamespace(multi_processor_count=17)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or properties)
    assert [multiprocessors(torch.device("cuda", 77)) for _ in range(2)] == [17, 17]
    assert asked == [torch.device("cuda", 77)]


def test_computing_threads_share_the_registers_of_a_launch() -> None:
    for groups in (1, 2, 3):
        every = HopperTiles(groups, 8, 2).computing_registers()
        for registers in (64, 96, 128):
            few = HopperTiles(groups, 8, 2, registers).computing_registers()
            assert few <= every
            assert few % 8 == 0
            # The copying group has 40 of each thread.
            assert groups * few + 40 <= (groups + 1) * registers < groups * (few + 8) + 40 or few == every


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scheme", [BY_ROWS, BY_BLOCKS, "e4m3 64x128, inputs e4m3 1x128"])
@pytest.mark.parametrize("tiles", [CodesTiles(128, 64, 2), CodesTiles(64, 128, 3, 5), None], ids=str)
def test_a_launch_of_codes_is_the_linear(tiles: CodesTiles | None, scheme: str, gated: bool) -> None:
    case, parsed = CodesCase(200, 272 if scheme == BY_ROWS else 256, 208, silu_mul=gated), LinearScheme.parse(scheme)
    if why_not_on_the_left(case.num_rows, gated, parsed) is not None:
        assert scheme not in (BY_ROWS, BY_BLOCKS)
        assert not gated
        return
    given = codes_arguments_of(case, scheme, torch.bfloat16)
    assert parsed.inputs is not None
    codes_TK, inputs_CT = round_inputs.by_formula(given["x_TK"], parsed.inputs, None)
    rounded = {"x_TK": codes_TK, "input_scales_CT": inputs_CT, "dtype": "bfloat16"}
    expected = reference(**given | rounded).float()
    scaling = scaling_of(given["scales_RC"], inputs_CT, parsed)
    with scripted_hopper() as scripted, nan_in_new_tensors():
        of_codes = codes_TK, given["codes_NK"], gated, "silu"
        found = hopper_codes(*of_codes, scaling, torch.bfloat16, tiles)
    assert float((found.float() - expected).abs().max() / expected.abs().max()) < 1e-2
    ((_, grid, options),) = scripted.calls
    tiles = tiles or codes_tiles(200, case.num_rows, scheme != BY_ROWS, MULTIPROCESSORS)
    count = -(-200 // (2 * tiles.tokens)) * -(-case.num_rows // tiles.rows)
    assert grid == (min(MULTIPROCESSORS, count),)
    names = ("GROUP_TOKENS", "ROWS", "STAGES", "TOGETHER", "num_warps", "launch_pdl")
    assert [options[name] for name in names] == [tiles.tokens, tiles.rows, tiles.stages, tiles.together, 4, True]
    # Two groups that compute and one that copies, with 24 registers for each of its threads.
    assert 128 * (2 * options["REGISTERS"] + 24) <= 1 << 16 < 128 * (2 * (options["REGISTERS"] + 8) + 24)


class NoKernel:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


def calls_of(function: Callable[[], object]) -> int:
    """Python functions that it calls, itself included, once what it keeps is there."""
    function()
    count = 0

    def profiled(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profiled)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("gated", [False, True])
def test_a_launch_costs_the_host_few_calls(gated: bool) -> None:
    """Boxes and their layouts are made once, and no descriptor is checked again: a start launches many thousands."""
    case = CodesCase(200, 256, 256, silu_mul=gated)
    given, scheme = codes_arguments_of(case, BY_ROWS, torch.bfloat16), LinearScheme.parse(BY_ROWS)
    assert scheme.inputs is not None
    codes_TK, inputs_CT = round_inputs.by_formula(given["x_TK"], scheme.inputs, None)
    scaling, weight_NK = scaling_of(given["scales_RC"], inputs_CT, scheme), given["codes_NK"]
    tiles, products = CodesTiles(128, 64, 2), ProductTiles(2, 64, (64, 32), 2)
    few = HopperTiles(1, 8, 2)
    with scripted_hopper(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_inputs, "round_inputs_kernel", NoKernel())
        for module, name in (
            (hopper_linear_kernel, "hopper_linear_kernel"),
            (hopper_product_kernel, "hopper_product_kernel"),
            (hopper_codes_kernel, "hopper_codes_kernel"),
        ):
            patch.setattr(module, name, NoKernel())
        by_rows = scaling, torch.bfloat16
        x_TK, plain_NK = given["x_TK"], torch.zeros(256, 256, dtype=torch.bfloat16)
        counts = {
            "linear": calls_of(
                lambda: hopper_linear(codes_TK[:8], weight_NK, None, gated, "silu", few, None, *by_rows)
            ),
            "codes": calls_of(lambda: hopper_codes(codes_TK, weight_NK, gated, "silu", *by_rows, tiles)),
            "product": calls_of(lambda: hopper_product(x_TK, plain_NK, gated, "silu", products)),
            "inputs": calls_of(lambda: round_inputs.launch(x_TK, scheme.inputs, None)),
        }
    assert {name: count <= MOST_CALLS[name] for name, count in counts.items()} == dict.fromkeys(MOST_CALLS, True), (
        counts
    )
