"""The C++ kernels of small batches on a CPU: linears with their neighbours, and what comes before attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_batch_linear_cases import Arguments, Case, arguments_of, error, nan_in_new_tensors
from test_rope_kv_write_op import FORMS, SHAPES, expected_of, in_form, random_arguments

from compiled_engine.attention.backends.cpp_backend import HEAD_DIMS, rotate_and_write
from compiled_engine.attention.inputs import Rotation
from compiled_engine.passes.linear import small_batch_linear_cpu
from compiled_engine.passes.linear.small_batch_linear_op import on_cpu

# Whole and partial tiles of tokens and rows, one and several blocks of columns.
CASES = [
    Case(1, 17, 16),
    Case(2, 48, 1040, norm=True, bias=True),
    Case(3, 64, 48, silu_mul=True, norm=True),
    Case(4, 96, 32, silu_mul=True, norm=True, bias=True, gemma=True),
    Case(6, 70, 2064, residual=True),
    Case(33, 256, 96, norm=True, residual=True),
    Case(64, 22, 80, norm=True, bias=True, residual=True, gemma=True),
]


def launched(given: Arguments) -> torch.Tensor | None:
    activation = given.activation if given.silu_mul else None
    values = given.x_TK, given.weight_NK, given.bias_N, given.norm_weight_K, given.eps, given.residual_TM
    return small_batch_linear_cpu.kernel_launch(*values, activation, given.norm_offset)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear(case: Case) -> None:
    given = arguments_of(case, torch.float32)
    with nan_in_new_tensors():
        out_TM = launched(given)
    assert out_TM is not None
    assert error(out_TM, given) < 1e-6
    assert torch.equal(out_TM, on_cpu(*given.values()))  # type: ignore[arg-type]


def test_a_token_has_the_same_bits_beside_others_and_with_more_threads(threads_put_back: None) -> None:
    given = arguments_of(Case(11, 192, 1072, norm=True, silu_mul=True), torch.float32)
    torch.set_num_threads(1)
    one_by_one = [launched(replace(given, x_TK=given.x_TK[i : i + 1])) for i in range(11)]
    torch.set_num_threads(3)
    together = launched(given)
    assert together is not None
    assert torch.equal(together, torch.cat([row for row in one_by_one if row is not None]))


@pytest.fixture
def threads_put_back() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(2, 32, 72), torch.float32),
        (Case(65, 32, 16), torch.float32),
        (Case(2, 48, 16, silu_mul=True), torch.float32),
        (Case(2, 64, 16, silu_mul=True, residual=True), torch.float32),
        (Case(2, 32, 16), torch.bfloat16),
    ],
    ids=str,
)
def test_linears_that_the_kernel_does_not_know_are_the_references(case: Case, dtype: torch.dtype) -> None:
    given = arguments_of(case, dtype)
    assert launched(given) is None
    assert error(on_cpu(*given.values()), given) < (1e-6 if dtype == torch.float32 else 0.02)  # type: ignore[arg-type]


@pytest.mark.product(one_in=1000, each=("form",))
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("form", [*FORMS, *SHAPES], ids=str)
def test_rotation_and_write(form: Any, normed: bool) -> None:
    given = in_form if len(form) == 3 else random_arguments
    arguments, guarded = given(form, torch.float32, normed)  # type: ignore[operator]
    q, k, v, cache, slots, _, *rotation = arguments
    expected = expected_of(arguments, guarded)
    rotated = rotate_and_write(q, k, v, Rotation(*rotation), cache, slots)
    if q.shape[-1] > HEAD_DIMS[-1]:
        assert rotated is None
        return
    assert rotated is not None
    torch.testing.assert_close((rotated, guarded), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_bfloat16_is_left_to_others() -> None:
    (q, k, v, cache, slots, _, *rotation), guarded = random_arguments(SHAPES[0], torch.bfloat16, True)
    assert rotate_and_write(q, k, v, Rotation(*rotation), cache, slots) is None
    assert guarded.isnan().all()
