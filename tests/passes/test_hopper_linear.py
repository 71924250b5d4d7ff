"""Hopper's linear for up to 128 tokens: compiled for it without a GPU, and on one against the formula in fp64."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hopper import require_hopper
from hopper_compilation import compiled_for_hopper, stack_bytes
from small_batch_linear_cases import Case, arguments_of, error, nan_in_new_tensors
from tuned_linears import PLAIN

from compiled_engine.kernels import hopper_linear_kernel as ring
from compiled_engine.kernels.hopper_linear_kernel import hopper_linear_kernel
from compiled_engine.passes.framework.profile import load_profile
from compiled_engine.passes.linear import gated_linear, silu_mul, small_batch_linear_op
from compiled_engine.passes.linear.hopper_linear import (
    TOKEN_BUCKETS,
    HopperTiles,
    hopper_linear,
    hopper_tiles,
    tiles_for,
)
from compiled_engine.tune.hopper_tuning import hopper_candidates, hopper_cases
from compiled_engine.tune.linears import at_each

DEVICES = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
SMALL = HopperTiles(1, 64, 8)
# Tiles, tokens, rows of the weight, K, activation or none, dtype: rows that leave the last tile in part, K that ends
# inside a step, fewer steps than stages.
WAYS = [
    (SMALL, 40, 4104, 1000, None, torch.bfloat16),
    (SMALL, 64, 6160, 1000, "silu", torch.bfloat16),
    (SMALL, 64, 6160, 1000, "gelu", torch.bfloat16),
    (SMALL, 64, 6160, 1000, "gelu_tanh", torch.float16),
    (HopperTiles(1, 64, 8, 128), 50, 6144, 1024, None, torch.float16),
    (HopperTiles(2, 128, 5), 128, 1040, 128, "silu", torch.bfloat16),
    (HopperTiles(3, 64, 6), 33, 24576, 4096, "silu", torch.bfloat16),
    (HopperTiles(3, 128, 5), 127, 2000, 4096, "silu", torch.bfloat16),
    (HopperTiles(1, 8, 4, 64), 1, 200, 1000, None, torch.bfloat16),
    (HopperTiles(1, 8, 11, 64, parts=2), 7, 4096, 4096, None, torch.bfloat16),
    (HopperTiles(1, 8, 5, 64, parts=2, products=2), 5, 4096, 12288, None, torch.bfloat16),
    (HopperTiles(3, 8, 4, 64, parts=2), 8, 6160, 1024, "silu", torch.bfloat16),
    (HopperTiles(3, 16, 2, 64, products=2), 13, 1040, 1024, "gelu", torch.bfloat16),
    (HopperTiles(2, 32, 3, 96, parts=4), 31, 1000, 3072, None, torch.float16),
    (HopperTiles(1, 8, 5, 64, parts=2, products=4), 8, 1040, 1024, "silu", torch.bfloat16),
]
MEASURED = [
    (device, key, tiles)
    for device in DEVICES
    for key, tiles in load_profile(device).hopper_tiles.items()  # type: ignore[union-attr]
]
# Shapes that no profile has, near measured ones, some of Llama, Gemma and Phi: tokens, rows, K, gated.
NEAR = [
    (8, 5120, 17920, False),
    (13, 6400, 2048, False),
    (32, 2560, 10240, False),
    (48, 7680, 5120, False),
    (64, 2560, 20480, False),
    (64, 28672, 4096, True),
    (50, 35840, 5120, True),
    (61, 9728, 896, True),
    (64, 128256, 4096, False),
    (100, 28672, 4096, True),
]


def compiled(
    tiles: HopperTiles, k: int, gated: bool, bias: bool, residual: bool, scales: tuple[int, int, int] | None = None
) -> Any:
    """scales: rows and columns of the weight, and columns of the inputs, that share one; for codes of 8 bits."""
    bits = 8 if scales else 16
    element, step = ("fp8e4nv" if scales else "bf16"), ring.step_of(bits)
    parts, boxes, shared = tiles.parts, tiles.parts * tiles.products, ring.shared_layout(bits, 3)
    plain = f"[{boxes}, {ring.ROWS.value // parts}, {step}],{shared!r}"
    box = f"[{boxes}, {ring.BLOCKS.value // parts}, 2, {ring.BLOCK.value}, {step}]"
    blocks = f"{box},{ring.shared_layout(bits, 5)!r}"
    constants: dict[str, Any] = {
        "K": k,
        "GROUPS": tiles.groups,
        "TOKENS": tiles.tokens,
        "STAGES": tiles.stages,
        "PARTS": parts,
        "PRODUCTS": tiles.products,
        "GATED": gated,
        "ACTIVATION": "silu",
        "REGISTERS": tiles.computing_registers(),
    }
    constants |= dict(zip(("TILE_ROWS", "TILE_COLUMNS", "INPUT_COLUMNS"), scales or (1, 0, 0), strict=True))
    given: dict[str, Any] = {"bias_ptr": bias, "residual_ptr": residual}
    given |= {"scales_ptr": scales, "input_scales_ptr": scales, "s_desc": False, "z_desc": False}
    constants |= {"ZERO": 0, "SPLITS": 1}
    constants |= {name: None for name, value in given.items() if not value}
    types = {
        "w_desc": f"tensordesc<{element}{blocks if gated else plain}>",
        "x_desc": f"tensordesc<{element}[{boxes}, {tiles.tokens}, {step}],{shared!r}>",
        "scales_ptr": "*fp32",
        "input_scales_ptr": "*fp32",
    }
    sizes = ("num_outputs", "input_stride")
    aligned = [name for name in hopper_linear_kernel.arg_names if name.endswith("_ptr") or name in sizes]
    options = {"maxnreg": tiles.registers} if tiles.registers else {}
    return compiled_for_hopper(hopper_linear_kernel, constants, types, aligned=aligned, **options)


@pytest.mark.product(one_in=24)
@pytest.mark.parametrize(("device", "key", "tiles"), MEASURED, ids=str)
def test_what_the_profile_names_fits(device: str, key: tuple[int, int, int, bool], tiles: dict[str, int]) -> None:
    """In shared memory and registers; before the wait it touches the weight alone."""
    tokens, _, k, gated = key
    program = compiled(HopperTiles(**tiles), k, gated, bias=gated, residual=not gated)
    assert HopperTiles(**tiles).tokens == max(8, tokens)
    assert program.metadata.shared <= 227 << 10
    assert stack_bytes(program) == 0
    ptx = program.asm["ptx"]
    parts = tiles.get("parts", 1)
    assert f"wgmma.mma_async.sync.aligned.m64n{parts * max(8, tokens)}k16" in ptx
    # Two waits, of which the one at the end may stand first.
    copy = re.compile(r"cp\.async\.bulk\.tensor\.(\d)d.*?\], \[(%rd\d+)")
    ahead = next(copies for part in ptx.split("griddepcontrol.wait") if (copies := copy.findall(part)))
    assert len(ahead) <= tiles["stages"] * tiles["groups"]
    assert {rank for rank, _ in ahead} == {"5" if gated else "3"}
    assert len({descriptor for _, descriptor in ahead}) == 1


def near_forms() -> list[tuple[HopperTiles, int, bool]]:
    """Tiles, K and whether there are gate and up, of shapes near those of a profile: one of each kind of tiles."""
    found: dict[tuple[HopperTiles, bool], int] = {}
    rows = (896, 1536, 2560, 3072, 4608, 5120, 7680, 9728, 11008, 16384, 20480, 22016, 28672, 35840, 128256)
    columns = (896, 1536, 2560, 3072, 4608, 5120, 9728, 12800, 14336, 17920)
    for device, tokens, row, k, gated in product(DEVICES, TOKEN_BUCKETS, rows, columns, (False, True)):
        profile = load_profile(device)
        assert profile is not None
        tiles = tiles_for(profile, tokens, row, k, gated, num_sms=132)
        if tiles is not None:
            found[replace(tiles, stages=0), gated] = k
    return [(tiles, k, gated) for (tiles, gated), k in found.items()]


@pytest.mark.product(one_in=24)
@pytest.mark.parametrize(("tiles", "k", "gated"), near_forms(), ids=str)
def test_tiles_of_a_near_shape_are_compiled(tiles: HopperTiles, k: int, gated: bool) -> None:
    """With the registers that they name, and without a stack."""
    program = compiled(replace(tiles, stages=2), k, gated, bias=gated, residual=not gated)
    assert stack_bytes(program) == 0


def test_candidates_fit_and_are_for_what_the_engine_asks() -> None:
    linears = PLAIN["qwen3-8b", 1]
    cases = hopper_cases(linears)
    small = at_each(linears, (1, 8, 16, 32, 64))
    assert {*cases} == {*small, *at_each([linears[2]], [128])} - {linears[-1]}
    for case in cases:
        tried = hopper_candidates(case)
        assert tried
        for tiles in tried:
            stage = (64 * tiles.groups + tiles.parts * tiles.tokens) * tiles.products * 128
            results = tiles.groups * tiles.tokens * (64 if case.silu_mul else 128) // tiles.parts
            assert case.num_tokens <= tiles.tokens
            assert case.k % (64 * tiles.parts * tiles.products) == 0
            assert stage * tiles.stages + results <= 227 << 10


@pytest.mark.parametrize(("tokens", "device"), [(129, "cuda"), (64, "cpu"), (8, "cpu")])
def test_other_batches_and_devices_have_no_tiles(tokens: int, device: str) -> None:
    assert hopper_tiles(tokens, 6144, 1024, True, torch.bfloat16, torch.device(device)) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("tiles", "tokens", "rows", "k", "activation", "dtype"), WAYS)
def test_it_is_a_linear(
    tiles: HopperTiles, tokens: int, rows: int, k: int, activation: str | None, dtype: torch.dtype
) -> None:
    """With a bias and a residual, into memory that was NaN; the same bits whatever other tokens there are."""
    require_hopper()
    case = Case(tokens, rows, k, bias=True, silu_mul=activation is not None, residual=True)
    given = arguments_of(case, dtype, "cuda")
    assert given.bias_N is not None
    assert given.residual_TM is not None
    arguments = given.weight_NK, given.bias_N, activation is not None, activation or "silu", tiles, given.residual_TM
    with nan_in_new_tensors():
        found = hopper_linear(given.x_TK, *arguments)
    expected = torch.nn.functional.linear(given.x_TK.double(), given.weight_NK.double(), given.bias_N.double())
    if activation is not None:
        expected = silu_mul.reference(expected, activation)
    expected += given.residual_TM
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 1e-2
    others = given.x_TK.clone()
    others[tokens // 2 :] = float("nan")
    assert torch.equal(hopper_linear(others, *arguments)[: tokens // 2], found[: tokens // 2])


@pytest.mark.gpu
@pytest.mark.product(one_in=4)
@pytest.mark.parametrize(("device", "key", "tiles"), MEASURED, ids=str)
def test_the_ops_launch_what_the_profile_names(
    device: str, key: tuple[int, int, int, bool], tiles: dict[str, int]
) -> None:
    """Chained in a graph and replayed: right every time, and bit for bit the same."""
    require_hopper()
    if torch.cuda.get_device_name() != device:
        pytest.skip(f"measured on {device}")
    tokens, rows, k, gated = key
    small = tokens <= small_batch_linear_op.TOKEN_BUCKETS[-1]
    case = Case(tokens - tokens // 7, rows, k, norm=small, silu_mul=gated, residual=small and not gated)
    given = arguments_of(case, torch.bfloat16, "cuda")
    assert hopper_tiles(case.num_tokens, rows, k, gated, torch.bfloat16, given.x_TK.device) == HopperTiles(**tiles)

    def run() -> torch.Tensor:
        if small:
            return small_batch_linear_op.launch(*given.values())  # type: ignore[arg-type]
        return gated_linear.launch(given.x_TK, given.weight_NK, None)

    first = run()
    assert error(first, given) < 2e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [run() for _ in range(4)]
    for _ in range(3):
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(output, first) for output in outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", NEAR, ids=str)
def test_shapes_that_were_not_measured(shape: tuple[int, int, int, bool]) -> None:
    """Into memory that was NaN."""
    require_hopper()
    tokens, rows, k, gated = shape
    small = tokens <= small_batch_linear_op.TOKEN_BUCKETS[-1]
    case = Case(tokens, rows, k, norm=small, silu_mul=gated, residual=small and not gated)
    given = arguments_of(case, torch.bfloat16, "cuda")
    with nan_in_new_tensors():
        if small:
            found = small_batch_linear_op.launch(*given.values())  # type: ignore[arg-type]
        else:
            found = gated_linear.launch(given.x_TK, given.weight_NK, None)
    assert error(found, given) < 2e-2
