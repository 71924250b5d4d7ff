"""Kernels that rotate and write into KV caches of 8 bits, and the whole table of attention cases in the interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from attention_cases import (
    CASES,
    CODED_CASES,
    SOME_CODED_CASES,
    Case,
    decodes,
    interpreted,
    near_cache,
    outcome,
    same_cache,
)
from interpreting_process import interpret
from test_rope_attend import arguments_of as attend_arguments
from test_rope_attend import difference
from test_rope_kv_write_op import FORMS, SHAPES, in_form, random_arguments

from compiled_engine.kv_format import CODED, FP8, cache_dtype, head_width
from compiled_engine.passes.rope import rope_kv_write_kernel
from compiled_engine.passes.rope.rope_kv_write import rope_kv_write

# Of the table: see LIMITS in test_attention.py.
REFUSED = {"triton": ("head size 20", "mixed, block size 24"), "torch": ()}
NAMES = [elements.name for elements in CODED]


def over_codes(arguments: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """The arguments of rope_kv_write with a cache of 8 bits, whose blocks hold garbage."""
    q, k, v, cache, slots, _, *rotation = arguments
    dtype = cache_dtype(name, q.dtype)
    shape = (*cache.shape[:-1], head_width(dtype, cache.shape[-1]))
    garbage = torch.full(shape, 0xFF, dtype=torch.uint8, device=q.device).view(dtype)
    scales_2K = torch.linspace(0.25, 2, 2 * cache.shape[3], device=q.device).view(2, -1) if name == FP8 else None
    return q, k, v, garbage, slots, scales_2K, *rotation


def written_otherwise(arguments: tuple[Any, ...], name: str) -> str | None:
    """What the kernel does otherwise than the reference on a CPU; None where it does the same."""
    launched = over_codes(arguments, name)
    by_rule = [x.cpu() if isinstance(x, torch.Tensor) else x for x in over_codes(arguments, name)]
    q_THd, expected_THd = rope_kv_write_kernel.launch(*launched), rope_kv_write(*by_rule)
    tolerance = 1e-5 if q_THd.dtype is torch.float32 else 3e-2
    if not torch.allclose(q_THd.cpu().float(), expected_THd.float(), rtol=tolerance, atol=tolerance):
        return "the rotated queries differ"
    near = near_cache if arguments[6] is not None else same_cache  # norms add squares in any order
    return None if near(launched[3].cpu(), by_rule[3]) else "the cache differs"


Compared = Callable[[str, torch.dtype, str], str | None]


def of_shape(shape: tuple[int, int, int, int], normed: bool, name: str, dtype: torch.dtype, device: str) -> str | None:
    return written_otherwise(random_arguments(shape, dtype, normed, device)[0], name)


def of_form(form: tuple[Any, ...], name: str, dtype: torch.dtype, device: str) -> str | None:
    return written_otherwise(in_form(form, dtype, False, device)[0], name)


def attended(case: Case, name: str, dtype: torch.dtype, device: str) -> str | None:
    return difference(attend_arguments(replace(case, storage=name), dtype, device, normed=True))


def compared(some: bool) -> dict[str, Compared]:
    """By kernel and shape, what finds the difference for a format, a type and a device. some: a few of the shapes."""
    found: dict[str, Compared] = {}
    for shape in ((33, 3, 1, 64), (5, 4, 2, 80)) if some else SHAPES:
        for normed in (True, False):
            found[f"write, {shape}, {normed}"] = partial(of_shape, shape, normed)
    for form in FORMS[:1] if some else FORMS:
        found[f"write, {form}"] = partial(of_form, form)
    for case in (
        Case("decodes", decodes(1, 33, 150, 300)),
        Case("window", (*decodes(5, 90, 300), *decodes(0)), sliding_window=20),
        Case("sinks", decodes(300, 40), num_heads=8, sinks=True, head_dim=80, soft_cap=5.0),
    )[: 2 if some else 3]:
        found[f"attend, {case.name}"] = partial(attended, case)
    return found


def check_interpreted(some: bool) -> None:
    """Run by the next tests in a process whose Triton interprets."""
    torch.set_num_threads(1)
    dtypes = (torch.float32,) if some else (torch.float32, torch.float16)
    found: dict[str, Any] = {
        f"{key}, {name}, {dtype}": value
        for key, compare in compared(some).items()
        for name in NAMES
        for dtype in dtypes
        if (value := compare(name, dtype, "cpu"))
    }
    few = [
        case for case in SOME_CODED_CASES if case.name.split(": ", 1)[1] in ("one token", "decodes", "window, mixed")
    ]
    for dtype in (torch.float32, torch.float16):
        for case in interpreted(*(few if some else CODED_CASES)):
            expected = "refused" if case.name.split(": ", 1)[1] in REFUSED["triton"] else "right"
            if not (result := outcome("triton", case, "cpu", dtype)).startswith(expected):
                found[f"{case.name}, {dtype}"] = result
    print(json.dumps(found))


@pytest.mark.parametrize(
    "some", [True, pytest.param(False, marks=pytest.mark.product(one_in=1000))], ids=["some", "all"]
)
def test_the_kernels_interpreted(some: bool, request: pytest.FixtureRequest) -> None:
    if not some and not request.config.getoption("--all"):
        pytest.skip("the whole table takes minutes: --all")
    script = f"import test_coded_rope; test_coded_rope.check_interpreted({some})"
    run = interpret(__file__, "-c", script)
    assert run.stdout.strip() == "{}", run.stdout[-2000:] + run.stderr[-2000:]


EACH = compared(some=False)


@pytest.mark.gpu
@pytest.mark.product(one_in=8, each=("key",))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", EACH)
def test_rotated_and_written_on_cuda(key: str, name: str, dtype: torch.dtype) -> None:
    assert EACH[key](name, dtype, "cuda") is None


# What has to do with the cache runs with a format and a type at least, which the seed chooses; of the rest, which the
# table over plain caches has too, some are drawn.
SOME_NAMES = {case.name.split(": ", 1)[1] for case in SOME_CODED_CASES}
OF_TABLE = [
    pytest.param(case, backend, id=f"{case.name}-{backend}", marks=mark)
    for case in CASES
    for backend in ("torch", "triton")
    for mark in [
        pytest.mark.product(one_in=100, each=("backend", "case"))
        if case.name in SOME_NAMES
        else pytest.mark.product(one_in=16)
    ]
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("case", "backend"), OF_TABLE)
def test_the_table_on_cuda(case: Case, backend: str, name: str, dtype: torch.dtype) -> None:
    """The table of attention cases over caches of 8 bits. Every combination compiles kernels of its own."""
    expected = "refused: " if case.name in REFUSED[backend] else "right"
    assert outcome(backend, replace(case, storage=name), "cuda", dtype).startswith(expected)
