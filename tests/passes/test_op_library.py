"""Declarations of ops: what generated Python calls in an op's place gives what the op gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_engine.passes.framework.op_library import (
    LinearArguments,
    OpDeclaration,
    declaration_of,
    declare_op,
    define_op,
    implementation,
    references,
)
from compiled_engine.passes.linear import adapter_add, gated_linear, silu_mul, small_batch_linear_op
from compiled_engine.passes.norm import residual_rms_norm, rms_norm

aten = torch.ops.aten
X, Y, B = torch.arange(12.0).view(3, 4), torch.arange(20.0).view(4, 5), torch.arange(5.0)
# Arguments of each op of ATen that is declared, and whether it is called directly, launches anything, or is a view.
ATEN: dict[Any, tuple[tuple[Any, ...], bool, bool, bool]] = {
    aten.mm.default: ((X, Y), True, True, False),
    aten.addmm.default: ((B, X, Y), True, True, False),
    aten.embedding.default: ((X, torch.tensor([2, 0])), True, True, False),
    aten.empty_like.default: ((X,), True, False, False),
    aten.add.Tensor: ((X, X), False, True, False),
    aten.cat.default: (([X, X], 1), False, True, False),
    aten.view.default: ((X, [4, 3]), True, False, True),
    aten.view.dtype: ((X, torch.int32), True, False, True),
    aten.t.default: ((X,), True, False, True),
    aten.transpose.int: ((X, 0, 1), True, False, True),
    aten.reshape.default: ((X, [2, 6]), True, False, True),
    aten.unsqueeze.default: ((X, 1), True, False, True),
    aten.squeeze.default: ((X[:1],), True, False, True),
    aten.squeeze.dim: ((X[:1], 0), True, False, True),
    aten.squeeze.dims: ((X[:1], [0]), True, False, True),
    aten.slice.Tensor: ((X, 1, 1, 3), True, False, True),
    aten.split.Tensor: ((X, 2, 1), True, False, True),
    aten.split.sizes: ((X, [1, 3], 1), True, False, True),
    aten.split_with_sizes.default: ((X, [1, 3], 1), True, False, True),
}


@pytest.mark.parametrize("op", ATEN, ids=str)
def test_calls_of_declared_ops(op: Any) -> None:
    arguments, direct, launches, is_view = ATEN[op]
    declared = declaration_of(op)
    assert (declared.direct, declared.launches) == (direct, launches)
    assert declared.direct != declared.lone
    called, expected = implementation(op, "cpu")(*arguments), op(*arguments)
    parts = (called, expected) if isinstance(called, list | tuple) else ([called], [expected])
    for one, other in zip(*parts, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        if op is not aten.empty_like.default:
            assert torch.equal(one, other)
        assert (one.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()) == is_view


def test_linears_of_aten_name_their_arguments() -> None:
    for op, arguments in ((aten.mm.default, (X, Y)), (aten.addmm.default, (B, X, Y))):
        linear = declaration_of(op).linear
        assert linear is not None
        given = dict(zip((argument.name for argument in op._schema.arguments), arguments, strict=False))
        weight = given[linear.weight] if linear.transposed else given[linear.weight].t()
        product = given[linear.x] @ weight
        torch.testing.assert_close(op(*arguments), product if linear.bias is None else product + given[linear.bias])
        defaults = {each.name: each.default_value for each in op._schema.arguments if each.has_default_value()}
        assert dict(linear.alone) == {name: value for name, value in defaults.items() if name in ("alpha", "beta")}


def test_a_defined_op_computes_what_it_was_given_for_each_device() -> None:
    def cpu(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    def cuda(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        raise AssertionError

    linear = LinearArguments("x", "x")
    op = define_op(
        "tests_scaled(Tensor x, float factor=2.0) -> Tensor",
        cpu=cpu,
        cuda=cuda,
        fake=lambda x, factor=2.0: x.new_empty(x.shape, dtype=torch.float64),
        reference=cuda,
        linear=linear,
    )
    assert op is torch.ops.compiled_engine.tests_scaled.default
    assert torch.equal(op(X), 2 * X)
    assert op(X.to("meta")).dtype == torch.float64
    assert (implementation(op, "cpu"), implementation(op, "cuda")) == (cpu, cuda)
    assert declaration_of(op) == OpDeclaration(direct=True, linear=linear, reference=cuda)
    assert references()[op] is cuda
    with pytest.raises(ValueError, match=r"op is compiled_engine.tests_scaled.default, which is declared as"):
        declare_op(op, OpDeclaration(direct=True, linear=linear))


def test_a_fake_has_the_arguments_that_it_names() -> None:
    def rows(x: torch.Tensor, num_rows: int = 1, dtype: torch.dtype | None = None) -> torch.Tensor:
        return x.new_zeros((num_rows, x.shape[1]), dtype=dtype)

    schemas = ("(Tensor x, int num_rows=1, ScalarType? dtype=None) -> Tensor",) * 2
    fakes = (lambda num_rows, x: x.new_empty((num_rows, x.shape[1])), lambda y, *others: y.new_empty((7, 7)))
    by_name, by_place = (
        define_op(f"tests_rows_{number}{schema}", cpu=rows, cuda=rows, fake=fake)
        for number, (schema, fake) in enumerate(zip(schemas, fakes, strict=True))
    )
    meta = torch.empty(3, 5, device="meta")
    assert [by_name(meta).shape, by_name(meta, 2).shape, by_name(meta, num_rows=4).shape] == [(1, 5), (2, 5), (4, 5)]
    assert by_place(meta, 2).shape == (7, 7)


def test_what_was_never_declared_is_empty_and_its_own_implementation() -> None:
    assert declaration_of(aten.exp.default) == declaration_of(torch.exp) == declaration_of("exp") == OpDeclaration()
    assert implementation(aten.exp.default, "cpu") is aten.exp.default
    assert aten.exp.default not in references()
    empty = OpDeclaration()
    assert (empty.direct, empty.launches, empty.lone, empty.linear, empty.call) == (False, True, False, None, None)


@pytest.mark.parametrize(
    ("op", "module"),
    [
        (adapter_add.adapter_add, adapter_add),
        (gated_linear.gated_linear, gated_linear),
        (residual_rms_norm.residual_rms_norm, residual_rms_norm),
        (rms_norm.rms_norm, rms_norm),
        (silu_mul.silu_mul, silu_mul),
        (small_batch_linear_op.small_batch_linear, small_batch_linear_op),
    ],
    ids=str,
)
def test_ops_have_kernels_for_gpus_and_plain_torch_besides(op: Any, module: Any) -> None:
    assert references().get(op, implementation(op, "cpu")) is module.reference
    assert implementation(op, "cuda") is module.launch
