"""The kernels that add adapters against their plain-torch reference, on random shapes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from hopper_compilation import compiled_for_hopper
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret

from compiled_engine.engine.warm_up import start_up_batches
from compiled_engine.kernels.compile_ahead import KernelWorkers, compiled_by
from compiled_engine.options import EngineOptions
from compiled_engine.passes.linear.adapter_add import TOKEN_COUNTS, launch, reference
from compiled_engine.passes.linear.adapter_operands import Operands
from compiled_engine.passes.linear.adapter_tile_kernels import (
    Tiles,
    add_by_tile,
    choose_tiles,
    expand_kernel,
    shrink_kernel,
)
from compiled_engine.passes.linear.adapter_token_kernels import add_by_token, expand_token_kernel, shrink_token_kernel
from compiled_engine.resolve.engine import resolve


class Case(NamedTuple):
    """Tokens; columns; rows of each member; slots; largest rank."""

    tokens: int
    k: int
    sizes: tuple[int, ...]
    slots: int
    rank: int


CASES = [
    Case(1, 48, (40,), 1, 4),
    Case(5, 600, (48, 16, 16), 3, 8),
    Case(17, 96, (70, 70), 4, 16),
    Case(70, 130, (33,), 2, 20),
    Case(66, 64, (130, 24, 8, 8), 3, 64),
    Case(9, 1100, (300, 260), 3, 24),
    Case(150, 40, (24, 8), 1, 8),
    Case(7, 64, (130, 24, 8, 8), 3, 64),
]
LARGE = [
    Case(1, 4096, (4096, 1024, 1024), 8, 16),
    Case(300, 4096, (12288, 12288), 8, 64),
    Case(64, 12288, (4096,), 8, 16),
    Case(1030, 4096, (4096, 1024, 1024), 8, 32),
]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

INTERPRETED = """
import torch
from test_adapter_add import CASES, check, check_alone
for case in CASES:
    check(case, torch.float32, "cpu")
for case in (CASES[1], CASES[2]):  # of few tokens, and of tiles
    check_alone(case, torch.float32, "cpu")
print("right")
"""


def arguments_of(case: Case, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """Of the op. Some tokens have no adapter, ranks differ, and what no adapter uses is zero."""
    generator = torch.Generator().manual_seed(case.tokens)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    members, total = len(case.sizes), sum(case.sizes)
    ranks = torch.randint(0, case.rank + 1, (case.slots, members), generator=generator, dtype=torch.int32)
    ranks[0] = case.rank
    slots = torch.randint(-1, case.slots, (case.tokens,), generator=generator, dtype=torch.int32)
    slots[0] = 0
    a = normal(case.slots, members, case.rank, case.k) / case.k**0.5
    b = normal(case.slots, total, case.rank) / case.rank**0.5
    unused = torch.arange(case.rank) >= ranks.unsqueeze(2)
    a[unused] = 0.0
    b[unused.repeat_interleave(torch.tensor(case.sizes), 1)] = 0.0
    y, x = normal(case.tokens, total), normal(case.tokens, case.k)
    tensors = (y, x, a.flatten(1, 2), b)
    return (*(t.to(device, dtype) for t in tensors), ranks.to(device), slots.to(device), list(case.sizes))


def check(case: Case, dtype: torch.dtype, device: str) -> None:
    """Check all tiles that any number of tokens has; in the interpreter those of the case's tokens and of many, in any
    dtype, and the kernels of few tokens where tokens are few. What no adapter uses, and new memory, is NaN."""
    arguments = arguments_of(case, dtype, device)
    y, _, a, b, ranks, slots, sizes = arguments
    expected = reference(
        *(t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in arguments)
    )
    unused = torch.arange(case.rank, device=device) >= ranks.unsqueeze(2)
    a.unflatten(1, unused.shape[1:])[unused] = float("nan")
    b[unused.repeat_interleave(torch.tensor(sizes, device=device), 1)] = float("nan")
    many = TOKEN_COUNTS[-1] + 1
    counts, dtypes = ((*TOKEN_COUNTS, many), {dtype}) if device == "cuda" else ((case.tokens, many), TOLERANCES)
    sizes_of = case.k, a.shape[1], case.rank, case.slots
    tiles = {choose_tiles(count, *sizes_of, each) for count, each in product(counts, dtypes)}
    by_token = (add_by_token,) if device == "cuda" else ()  # which is what `launch` does for few tokens
    for add in (launch, *by_token, *(partial(add_by_tile, tiles=each) for each in tiles)):
        if device == "cuda":
            for size in (y.shape, (64, *y.shape)):  # the next allocations find NaN
                torch.full(size, float("nan"), device=device)
        found = add(*arguments) if add is launch else add(Operands(*arguments))
        torch.testing.assert_close(found.float(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
        assert torch.equal(found[slots < 0], y[slots < 0])


def test_reference_is_the_definition() -> None:
    for case in CASES:
        y, x, a, b, ranks, slots, sizes = arguments_of(case, torch.float32, "cpu")
        expected = y.clone()
        for token, slot in enumerate(slots.tolist()):
            for member, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
                rank = int(ranks[slot, member]) if slot >= 0 else 0
                a_RK = a[slot, member * case.rank :][:rank]
                expected[token, end - size : end] += b[slot, end - size : end, :rank] @ (a_RK @ x[token])
        torch.testing.assert_close(reference(y, x, a, b, ranks, slots, sizes), expected, rtol=2e-5, atol=2e-5)


def check_alone(case: Case, dtype: torch.dtype, device: str) -> None:
    """Check that nothing of an adapter whose values are NaN or infinite, and of its tokens' inputs, reaches other
    tokens: the reference, and the kernels where they run."""
    arguments = arguments_of(case, dtype, device)
    y, x, a, b, _, slots, _ = arguments
    adds = (reference,) if device == "cpu" and not triton.knobs.runtime.interpret else (reference, launch)
    others = slots != 0
    for add in adds:
        expected = add(*arguments)[others]
        for bad in (float("nan"), float("inf")):
            spoilt = x.clone()
            spoilt[~others] = bad
            found = add(y, spoilt, *(torch.where(_is_first(each), bad, each) for each in (a, b)), *arguments[4:])
            assert torch.equal(found[others], expected)
            assert not found[~others].isfinite().any()


def _is_first(of_slots: torch.Tensor) -> torch.Tensor:
    return (torch.arange(len(of_slots), device=of_slots.device) == 0).view(-1, 1, 1)


def test_an_adapter_that_is_not_finite_reaches_its_own_tokens_alone() -> None:
    for case in CASES:
        check_alone(case, torch.float32, "cpu")


@loops_to_a_loaded_bound
def test_kernels_in_the_interpreter() -> None:
    done = interpret(__file__, "-c", INTERPRETED)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for_hopper(dtype: str) -> None:
    pointers = {"x_ptr": f"*{dtype}", "a_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "b_ptr": f"*{dtype}"}
    pointers |= {"out_ptr": f"*{dtype}", "z_ptr": "*fp32", "ranks_ptr": "*i32", "slots_ptr": "*i32"}
    merged = {"N": 6144, "BEGINS": (0, 4096, 5120), "ENDS": (4096, 5120, 6144), "FIRST_TILES": (0, 32, 40)}
    tile = 64 if dtype == "bf16" else 32
    shrink = {"K": 4096, "MEMBERS": 3, "TURNS": 8, "SPLIT_COLUMNS": 512, "COLUMNS_AHEAD": 512, "NUM_STAGES": 3}
    expand = {"TURNS": 9, "NUM_SPLITS": 8, "NUM_BLOCKS": 1, "AHEAD": True, "BLOCK_N": 128}
    kernels: list[tuple[Any, bool, dict[str, Any]]] = [
        (shrink_kernel, True, shrink | {"WINDOW": 64, "BLOCK_T": 16, "BLOCK_R": tile, "BLOCK_K": tile}),
        (expand_kernel, True, merged | expand | {"WINDOW": 64, "BLOCK_T": 16, "BLOCK_R": 16}),
        (shrink_token_kernel, False, {"K": 4096, "MEMBERS": 3, "BLOCK_R": 16, "BLOCK_K": 512}),
        (expand_token_kernel, False, merged | {"NUM_SPLITS": 24, "BLOCK_S": 32, "BLOCK_N": 128, "BLOCK_R": 16}),
    ]
    for kernel, on_tensor_cores, own in kernels:
        constants = {"RANK": 16, "DEPENDENT_LAUNCH": True} | own
        program = compiled_for_hopper(kernel, constants, pointers, aligned=())
        assert ("mma" in program.asm["ptx"]) == (on_tensor_cores and dtype == "bf16")


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
def test_launches_are_those_of_the_kernels(hopper: Path) -> None:
    with ThreadPoolExecutor(2) as threads, compiled_by(KernelWorkers(0, None), threads) as kernels:
        launch(*arguments_of(CASES[1], torch.bfloat16, "cpu"))
        assert [loading.result() is not None for loading in kernels.load()] == [True, True]


def test_the_warm_up_meets_every_way_to_add() -> None:
    """Those of few and of many tokens, and all tiles, whatever passes there are."""

    def way_of(tokens: int) -> tuple[bool, Tiles]:
        return tokens <= TOKEN_COUNTS[0], choose_tiles(tokens, 4096, 48, 16, 8, torch.bfloat16)

    config = resolve(EngineOptions(device="cpu", mode="compiled", passes=(), enable_lora=True, max_num_seqs=4))
    shapes = start_up_batches(replace(config, device=torch.device("cuda")))
    assert {way_of(shape.num_tokens) for shape in shapes[1:]} == {way_of(tokens) for tokens in range(1, 1000)}


@pytest.mark.gpu
@pytest.mark.product(one_in=8, each=("case",))
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES + LARGE)
def test_kernels_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, "cuda")
    check_alone(case, dtype, "cuda")
