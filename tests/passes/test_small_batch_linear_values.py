"""The op small_batch_linear computes its formula: reference, interpreted kernels, kernels on a GPU, for any shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreting_process import interpret
from small_batch_linear_cases import Case, arguments_of, error, large_float16, nan_in_new_tensors

from compiled_engine.passes.linear.small_batch_linear_op import MAX_TILES, choose_tiles, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
OPTIONS = [
    {"norm": norm, "bias": bias, "silu_mul": silu_mul, "residual": residual}
    for norm, bias, silu_mul, residual in product((False, True), repeat=4)
    if not (silu_mul and residual)
]
SHAPES = [(1, 70, 96), (1, 64, 1024), (3, 70, 96), (7, 96, 2048), (17, 48, 512), (40, 32, 136), (64, 64, 128)]
LARGE_SHAPES = [(1, 4096, 1024), (8, 1024, 3072), (16, 1024, 3072), (40, 1024, 2048), (64, 2048, 1024), (100, 64, 136)]

# One split each: what counts the splits is a CUDA stream's.
INTERPRETED = """
from dataclasses import replace

import torch
from small_batch_linear_cases import Case, arguments_of, error, large_float16, nan_in_new_tensors
from test_small_batch_linear_values import OPTIONS, SHAPES
from compiled_engine.passes.linear.small_batch_linear_op import choose_tiles, launch

torch.set_num_threads(1)
for number, shape in enumerate(SHAPES):
    # Half of the options for each shape, so that all are tried for one token and for several.
    for options in OPTIONS[number % 2 :: 2]:
        case = Case(*shape, **options)
        given = arguments_of(case, torch.float32)
        for tiles in {choose_tiles(*shape, case.silu_mul, dtype) for dtype in (torch.float32, torch.bfloat16)}:
            with nan_in_new_tensors():
                out = launch(*given.values(), replace(tiles, split_k=1))
            assert error(out, given) < 1e-5, f"{case} with {tiles} is off by {error(out, given)}"
given = large_float16()
tiles = choose_tiles(4, 64, 896, False, torch.float16)
for norm_inside in (False, True):
    out = launch(*given.values(), replace(tiles, split_k=1, norm_inside=norm_inside))
    assert error(out, given) < 3e-3, f"large values: off by {error(out, given)}"
print("right")
"""


def op(*arguments: object) -> torch.Tensor:
    return torch.ops.compiled_engine.small_batch_linear(*arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for options in OPTIONS:
        arguments = arguments_of(Case(*shape, **options), dtype)
        out, by_torch = op(*arguments.values()), reference(*arguments.values())  # type: ignore[arg-type]
        # On a CPU the op is C++ where there is a kernel for it.
        torch.testing.assert_close(out, by_torch, rtol=1e-4, atol=1e-4)
        assert out.dtype == dtype
        assert error(out, arguments) < TOLERANCES[dtype], options


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_torch_accepts_the_op(options: dict[str, bool]) -> None:
    arguments = arguments_of(Case(3, 70, 96, **options), torch.float32).values()
    default = torch.ops.compiled_engine.small_batch_linear.default
    torch.library.opcheck(default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_kernels_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", INTERPRETED)
    assert run.stdout.strip() == "right", run.stderr[-2000:]


@settings(max_examples=300)
@given(
    num_tokens=st.integers(1, 300),
    num_rows=st.integers(1, 100_000).map(lambda half: 2 * half),
    k=st.integers(1, 40_000),
    silu_mul=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(["", "NVIDIA H200", "a device that nobody has measured"]),
)
def test_there_are_tiles_for_every_shape(
    num_tokens: int, num_rows: int, k: int, silu_mul: bool, dtype: torch.dtype, device: str
) -> None:
    """Sizes that Triton takes; the kernel of a single token for one only; no more splits than can be counted."""
    tiles = choose_tiles(num_tokens, num_rows, k, silu_mul, dtype, device)
    for size in (tiles.tokens, tiles.rows, tiles.block_k, tiles.num_warps):
        assert size.bit_count() == 1
    assert tiles.tokens > 1 or num_tokens == 1
    assert tiles.split_k >= 1
    if tiles.split_k > 1:
        assert not silu_mul
        assert -(-num_rows // tiles.rows) * -(-num_tokens // tiles.tokens) <= MAX_TILES


@pytest.mark.gpu
@pytest.mark.product(one_in=9, each=("shape",))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + LARGE_SHAPES, ids=str)
def test_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Right, and bit for bit the same a second time; a row does not depend on the others."""
    for options in OPTIONS:
        arguments = arguments_of(Case(*shape, **options), dtype, "cuda")
        with nan_in_new_tensors():
            out, again = (op(*arguments.values()) for _ in range(2))
        assert error(out, arguments) < TOLERANCES[dtype], options
        assert torch.equal(out, again), options
        beside_nan_TK = torch.full_like(arguments.x_TK, float("nan"))
        beside_nan_TK[-1] = arguments.x_TK[-1]
        assert torch.equal(out[-1], op(*replace(arguments, x_TK=beside_nan_TK).values())[-1]), options


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_large_values_in_float16_on_a_gpu(num_tokens: int) -> None:
    given = large_float16("cuda")
    given = replace(given, x_TK=given.x_TK[:num_tokens])
    assert error(op(*given.values()), given) < TOLERANCES[torch.float16]
