"""Hopper's linear for 33 to 128 tokens: compiled for it without a GPU, and on one against the formula in fp64."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from small_batch_linear_cases import Case, arguments_of, error, nan_in_new_tensors
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from compiled_engine.config import ModelConfig
from compiled_engine.options import EngineOptions
from compiled_engine.passes import gated_linear_op, hopper_linear_kernel, silu_mul, small_batch_linear_op
from compiled_engine.passes.hopper_linear import HopperTiles, hopper_linear, hopper_tiles
from compiled_engine.passes.profile import load_profile
from compiled_engine.resolve.engine import resolve
from compiled_engine.tune.hopper_tuning import hopper_candidates, hopper_cases

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DEVICE = "NVIDIA H200"
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
]
MEASURED = load_profile(DEVICE).hopper_tiles  # type: ignore[union-attr]


def compiled(tiles: HopperTiles, k: int, gated: bool, bias: bool) -> Any:
    kernels = hopper_linear_kernel
    kernel = getattr(kernels.hopper_linear_kernel, "jit_function", kernels.hopper_linear_kernel)
    plain = f"[{kernels.ROWS.value}, {kernels.STEP.value}],{kernels.SHARED.value!r}"
    blocks = f"[{kernels.BLOCKS.value}, 2, {kernels.BLOCK.value}, {kernels.STEP.value}],{kernels.BLOCKS_SHARED.value!r}"
    constants: dict[str, Any] = {
        "K": k,
        "GROUPS": tiles.groups,
        "TOKENS": tiles.tokens,
        "STAGES": tiles.stages,
        "GATED": gated,
        "ACTIVATION": "silu",
        "REGISTERS": tiles.computing_registers(),
    } | ({} if bias else {"bias_ptr": None})
    types = {
        "w_desc": f"tensordesc<bf16{blocks if gated else plain}>",
        "x_desc": f"tensordesc<bf16[{tiles.tokens}, {kernels.STEP.value}],{kernels.SHARED.value!r}>",
        "num_tokens": "i32",
        "num_outputs": "i32",
    } | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*bf16") for name in kernel.arg_names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name == "num_outputs"]
    source = GluonASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 4, "launch_pdl": True} | ({"maxnreg": tiles.registers} if tiles.registers else {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(("key", "tiles"), MEASURED.items(), ids=str)
def test_what_the_profile_names_fits(key: tuple[int, int, int, bool], tiles: dict[str, int], tmp_path: Path) -> None:
    """In shared memory and registers; before the wait it touches the weight alone."""
    tokens, _, k, gated = key
    program = compiled(HopperTiles(**tiles), k, gated, bias=gated)
    assert HopperTiles(**tiles).tokens == tokens
    assert program.metadata.shared <= 227 << 10
    path = tmp_path / "kernel.cubin"
    path.write_bytes(program.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    assert int(re.search(r"STACK:(\d+)", usage.stdout)[1]) == 0  # type: ignore[index]
    ptx = program.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n{tokens}k16" in ptx
    copies = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d|(griddepcontrol\.wait)", ptx)
    ahead = [rank for rank, _ in copies[: next(i for i, (_, wait) in enumerate(copies) if wait)]]
    assert 1 <= len(ahead) <= tiles["stages"] * tiles["groups"]
    assert set(ahead) == {"4" if gated else "2"}


def test_candidates_fit_and_are_for_what_the_engine_asks() -> None:
    config = resolve(EngineOptions(device="cpu")).model
    model: ModelConfig = replace(
        config, hidden_size=4096, intermediate_size=12288, num_heads=32, num_kv_heads=8, head_dim=128
    )
    cases = hopper_cases(model)
    assert {(case.name, case.num_tokens) for case in cases} == {
        ("qkv", 64),
        ("gate_up", 64),
        ("gate_up", 128),
        ("head", 64),
    }
    for case in cases:
        for tiles in hopper_candidates(case):
            stage = (64 * tiles.groups + tiles.tokens) * 128
            results = tiles.groups * tiles.tokens * (64 if case.silu_mul else 128)
            assert case.num_tokens <= tiles.tokens
            assert stage * tiles.stages + results <= 227 << 10


@pytest.mark.parametrize(("tokens", "device"), [(32, "cuda"), (129, "cuda"), (64, "cpu")])
def test_other_batches_and_devices_have_no_tiles(tokens: int, device: str) -> None:
    assert hopper_tiles(tokens, 6144, 1024, True, torch.bfloat16, torch.device(device)) is None


def _hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for compute capability 9")


@pytest.mark.gpu
@pytest.mark.parametrize(("tiles", "tokens", "rows", "k", "activation", "dtype"), WAYS)
def test_it_is_a_linear(
    tiles: HopperTiles, tokens: int, rows: int, k: int, activation: str | None, dtype: torch.dtype
) -> None:
    """With a bias, into memory that was NaN; the same bits whatever other tokens there are."""
    _hopper()
    given = arguments_of(Case(tokens, rows, k, bias=True, silu_mul=activation is not None), dtype, "cuda")
    assert given.bias_N is not None
    arguments = given.weight_NK, given.bias_N, activation is not None, activation or "silu", tiles
    with nan_in_new_tensors():
        found = hopper_linear(given.x_TK, *arguments)
    expected = torch.nn.functional.linear(given.x_TK.double(), given.weight_NK.double(), given.bias_N.double())
    if activation is not None:
        expected = silu_mul.reference(expected, activation)
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 1e-2
    others = given.x_TK.clone()
    others[tokens // 2 :] = float("nan")
    assert torch.equal(hopper_linear(others, *arguments)[: tokens // 2], found[: tokens // 2])


@pytest.mark.gpu
@pytest.mark.parametrize(("key", "tiles"), MEASURED.items(), ids=str)
def test_the_ops_launch_what_the_profile_names(key: tuple[int, int, int, bool], tiles: dict[str, int]) -> None:
    """Chained in a graph and replayed: right every time, and bit for bit the same."""
    _hopper()
    if torch.cuda.get_device_name() != DEVICE:
        pytest.skip(f"measured on {DEVICE}")
    tokens, rows, k, gated = key
    case = Case(tokens - 9, rows, k, norm=tokens <= 64, silu_mul=gated)
    given = arguments_of(case, torch.bfloat16, "cuda")
    assert hopper_tiles(case.num_tokens, rows, k, gated, torch.bfloat16, given.x_TK.device) == HopperTiles(**tiles)

    def run() -> torch.Tensor:
        if tokens <= 64:
            return small_batch_linear_op.launch(*given.values())  # type: ignore[arg-type]
        return gated_linear_op.launch(given.x_TK, given.weight_NK, None)

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
