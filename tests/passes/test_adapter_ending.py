"""Linears of small batches that end with adapters, and the kernels before them, against plain torch."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
from interpreter import interpreting, loops_to_a_loaded_bound
from small_batch_linear_cases import EPS
from test_adapter_add import Case, arguments_of
from test_small_batch_linear_op import WAYS, compiled_for_hopper

from compiled_engine.kernels.compile_ahead import KernelWorkers, compiled_by
from compiled_engine.passes.linear import adapter_add, adapter_shrink, small_batch_linear_op
from compiled_engine.passes.linear.adapter_ending import slot_tile
from compiled_engine.passes.linear.silu_mul import reference as silu_mul
from compiled_engine.passes.linear.small_batch_linear_op import Tiles
from compiled_engine.passes.norm import rms_norm

# Ways through the linear's kernels with the neighbours that a linear may have.
KINDS: list[frozenset[str]] = [
    frozenset(),
    frozenset({"norm"}),
    frozenset({"residual", "bias"}),
    frozenset({"norm", "silu"}),
]
ONE = [Case(1, 96, (40, 24, 8), 3, 8), Case(1, 600, (33,), 2, 40)]
FEW = [Case(7, 96, (40, 24, 8), 3, 8), Case(20, 72, (34, 34), 9, 20), Case(20, 40, (20, 16), 2, 136)]
LARGE = [
    Case(1, 4096, (4096, 1024, 1024), 8, 16),
    Case(8, 4096, (4096, 1024, 1024), 8, 16),
    Case(8, 4096, (12288, 12288), 8, 64),
    Case(33, 12288, (4096,), 8, 16),
    Case(64, 4096, (12288, 12288), 8, 16),
]
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 3e-2}

INTERPRETED = """
import torch
from test_adapter_ending import cases, check
for case, kind, tiles in cases(one=True):
    check(case, kind, tiles, torch.float32, "cpu")
print("right")
"""


def cases(*, one: bool = False) -> list[tuple[Case, frozenset[str], Tiles]]:
    """Each way with each kind, or with one of them, with a case of its number of tokens."""
    found = []
    for number, tiles in enumerate(WAYS.values()):
        fitting = ONE if tiles.tokens == 1 else FEW
        for index, kind in enumerate(KINDS):
            if one and (number + index) % len(KINDS):
                continue
            case = fitting[(number + index) % len(fitting)]
            if "silu" in kind:
                case = case._replace(sizes=(36, 36))
            found.append((case, kind, tiles))
    return found


def check(case: Case, kind: frozenset[str], tiles: Tiles | None, dtype: torch.dtype, device: str) -> None:
    """The op of the shrink, then that of the linear, beside a linear, adapters and its neighbours one by one."""
    y, x, a, b, ranks, slots, sizes = arguments_of(case, dtype, device)
    generator = torch.Generator().manual_seed(case.k)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)  # noqa: E731
    num_rows = sum(case.sizes)
    weight = normal(num_rows, case.k) / case.k**0.5
    bias = normal(num_rows) if "bias" in kind else None
    residual = y if "residual" in kind else None
    norm_weight = 1 + 0.2 * normal(case.k) if "norm" in kind else None
    of_shrink = x, a, ranks, slots
    if device == "cuda":
        torch.full((64, case.tokens, case.k), float("nan"), device=device)  # the next allocations find NaN
    if norm_weight is None:
        normed, z = x, adapter_shrink.launch(*of_shrink)
    else:
        normed, z = adapter_shrink.launch_normed(*of_shrink, norm_weight, EPS)
        torch.testing.assert_close(normed, rms_norm.reference(x, norm_weight, EPS), rtol=1e-2, atol=1e-2)
    others = bias, None, 0.0, residual, "silu" in kind, "silu", 0.0, False
    found = small_batch_linear_op.launch(normed, weight, *others, z, b, ranks, slots, sizes, tiles=tiles)
    wide = [None if t is None else t.float() for t in (normed, a, b, weight, bias, residual)]
    normed, a, b, weight, bias, residual = wide  # type: ignore[assignment]
    expected = torch.nn.functional.linear(normed, weight, bias)
    expected = adapter_add.reference(expected, normed, a, b, ranks, slots, sizes)
    if "silu" in kind:
        expected = silu_mul(expected)
    if residual is not None:
        expected = expected + residual
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_references_of_both_ops_are_that_of_one() -> None:
    for case in (*ONE, *FEW):
        y, x, a, b, ranks, slots, sizes = arguments_of(case, torch.float32, "cpu")
        norm_weight = torch.linspace(0.5, 1.5, case.k)
        normed, z = adapter_shrink.normed_reference(x, a, ranks, slots, norm_weight, EPS)
        weight = torch.linspace(-1, 1, case.k).repeat(sum(case.sizes), 1)
        before = normed, weight, None, None, 0.0, y, False
        found = small_batch_linear_op.reference(*before, "silu", 0.0, False, z, b, ranks, slots, sizes)
        expected = adapter_add.reference(normed @ weight.t(), normed, a, b, ranks, slots, sizes) + y
        torch.testing.assert_close(found, expected, rtol=3e-5, atol=3e-5)


@loops_to_a_loaded_bound
def test_every_way_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=interpreting(__file__), capture_output=True, text=True, check=False
    )
    assert done.stdout == "right\n", done.stderr[-3000:]


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize(("tokens", "num_kernels"), [(1, 2), (8, 2), (32, 3), (64, 3)])
def test_kernels_compile_for_hopper(hopper: Path, tokens: int, num_kernels: int) -> None:
    """The norm is a kernel of its own for many tokens alone."""
    case = Case(tokens, 1024 + 16 * tokens, (512, 512), 8, 16)
    _, x, a, b, ranks, slots, sizes = arguments_of(case, torch.bfloat16, "cpu")
    weight, norm_weight = x.new_empty(1024, case.k), x.new_empty(case.k)
    with ThreadPoolExecutor(2) as threads, compiled_by(KernelWorkers(0, None), threads) as kernels:
        normed, z = adapter_shrink.launch_normed(x, a, ranks, slots, norm_weight, EPS)
        others = None, None, 0.0, None, True, "silu", 0.0, False
        small_batch_linear_op.launch(normed, weight, *others, z, b, ranks, slots, sizes)
        assert [loading.result() is not None for loading in kernels.load()] == [True] * num_kernels


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_b_is_under_way_before_the_wait(tokens: int) -> None:
    """Slots are read first: they, B and ranks do not change within a step."""
    tiles = small_batch_linear_op.choose_tiles(tokens, 24576, 4096, True, torch.bfloat16, "NVIDIA H200")
    ranks, slots = slot_tile(16, 8)
    constants = {"RANK": 16, "BEGINS": (0, 12288), "ENDS": (12288, 24576), "SLOTS": 8, "SPLITS": 8, "BLOCK_R": ranks}
    block = {} if tokens == 1 else {"BLOCK_S": slots}
    program = compiled_for_hopper(tiles, 24576, 4096, False, True, **constants, **block)
    before, _ = re.split(r"griddepcontrol\.wait", program.asm["ptx"])
    assert "st.global" not in before
    assert program.metadata.shared <= 227 << 10
    if tokens > 1:
        without = compiled_for_hopper(tiles, 24576, 4096, False, True)
        asked, others = (each.count("cp.async.bulk.prefetch") for each in (before, without.asm["ptx"]))
        assert asked > others


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_way_on_a_gpu(dtype: torch.dtype) -> None:
    for case, kind, tiles in cases():
        check(case, kind, tiles, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=sorted)
@pytest.mark.parametrize("case", LARGE)
def test_chosen_tiles_on_a_gpu(case: Case, kind: frozenset[str]) -> None:
    if "silu" not in kind or len(case.sizes) == 2:
        check(case, kind, None, torch.bfloat16, "cuda")
