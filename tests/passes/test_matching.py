"""What passes read and write calls with: arguments by name, casts, users, factors, sizes, and rewriting in one go."""

from __future__ import annotations

import operator

import pytest
import torch
from pass_cases import graph_of, random_tensors
from torch import fx

from compiled_engine.passes.framework.matching import (
    aten,
    change,
    emit,
    emit_item,
    emit_named,
    factors,
    fake_mode_of,
    is_call,
    named,
    only_user,
    other_factor,
    through_cast,
    user_through_cast,
)

NORM = torch.ops.compiled_engine.rms_norm.default


def normed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (NORM(x, w, 1e-5, wide=True),)


def graph_with_norm() -> tuple[fx.Graph, fx.Node]:
    graph = graph_of(normed, random_tensors(x=(4, 8)), random_tensors(w=(8,))).graph
    return graph, graph.find_nodes(op="call_function", target=NORM)[0]


def test_arguments_have_names_and_defaults() -> None:
    graph, norm = graph_with_norm()
    x, w = graph.find_nodes(op="placeholder")
    assert named(norm) == {"x_TD": x, "weight_D": w, "eps": 1e-5, "offset": 0.0, "wide": True}
    change(norm, eps=0.5, offset=1.0)
    assert (norm.args, norm.kwargs) == ((x, w, 0.5, 1.0, True), {})
    norm.args, norm.kwargs = (x,), {"weight_D": w, "eps": 2.0, "wide": False}
    assert named(norm) == {"x_TD": x, "weight_D": w, "eps": 2.0, "offset": 0.0, "wide": False}


def test_a_call_is_emitted_with_its_value() -> None:
    graph, norm = graph_with_norm()
    x, w = graph.find_nodes(op="placeholder")
    with graph.inserting_before(norm):
        new = emit_named(graph, NORM, {"weight_D": w, "x_TD": x, "eps": 3.0, "unknown": 4})
        halves = emit(graph, aten.split_with_sizes.default, new, [3, 5], -1)
        second = emit_item(graph, halves, 1)
        with pytest.raises(KeyError, match="eps"):
            emit_named(graph, NORM, {"weight_D": w, "x_TD": x})
    assert new.args == (x, w, 3.0, 0.0, False)
    assert (new.meta["val"].shape, second.meta["val"].shape) == ((4, 8), (4, 5))
    assert (second.target, second.args) == (operator.getitem, (halves, 1))
    assert fake_mode_of([1, {"a": new.meta["val"]}]) is x.meta["val"].fake_mode


def test_casts_are_looked_through_and_other_conversions_are_not() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cast = aten._to_copy.default(x, dtype=torch.float64)
        moved = aten._to_copy.default(x, dtype=torch.float64, memory_format=torch.preserve_format)
        return cast.exp().sin(), moved.sin(), x.exp().cos()

    graph = graph_of(function, random_tensors(x=(4, 8)), {}).graph
    (x,) = graph.find_nodes(op="placeholder")
    cast, moved = graph.find_nodes(op="call_function", target=aten._to_copy.default)
    exp, other_exp = graph.find_nodes(op="call_function", target=aten.exp.default)
    assert through_cast(cast) is x
    assert through_cast(moved) is moved
    assert through_cast(exp) is exp
    assert through_cast(3) == 3
    assert only_user(x) is None
    assert only_user(cast) is exp
    assert user_through_cast(x) is None
    assert user_through_cast(other_exp) is only_user(other_exp)
    with graph.inserting_after(exp):
        again = emit(graph, aten._to_copy.default, exp)
    assert only_user(exp) is None
    exp.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    assert user_through_cast(exp) is only_user(again)
    assert is_call(only_user(again), aten.cos.default, aten.sin.default)
    assert not is_call(x, aten.exp.default)
    assert not is_call(None, aten.exp.default)


def test_factors_come_in_both_orders() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = aten._to_copy.default(y, dtype=torch.float64)
        return x * y, x * wide, x * 2, x + y

    graph = graph_of(function, random_tensors(x=(4, 8), y=(4, 8)), {}).graph
    x, y = graph.find_nodes(op="placeholder")
    product, cast, scaled = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    (total,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert factors(product) == [(x, y), (y, x)]
    assert factors(scaled) == factors(total) == factors(x) == factors(None) == []
    assert (other_factor(product, x), other_factor(product, y)) == (y, x)
    assert other_factor(cast, y) is x
    assert other_factor(cast, cast.args[1]) is x
    product.args = (y, x)
    assert (other_factor(product, x), other_factor(product, y)) == (y, x)
