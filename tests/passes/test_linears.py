"""Linears as values: transposes, biases, experts, codes; and the values that matrices are multiplied with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_cases import Tensors, graph_of, random_tensors
from torch import fx

from compiled_engine.passes.framework.graph_inputs import is_parameter
from compiled_engine.passes.framework.matching import aten, named
from compiled_engine.passes.framework.op_library import PLAIN, QUANTISED
from compiled_engine.passes.linear.experts_codes import experts_weight
from compiled_engine.passes.linear.linears import (
    Linear,
    emit_linear,
    experts_linear_of,
    linear_of,
    multiplied_values,
    product_of,
    why_no_linear,
)
from compiled_engine.passes.linear.quantised_linear_op import quantised_linear
from compiled_engine.quantisation import LinearScheme


def last(graph: fx.Graph) -> fx.Node:
    (result,) = graph.output_node().all_input_nodes
    return result


def traced(function: Callable[..., Any], weights: Tensors, **arguments: tuple[int, ...]) -> fx.Graph:
    return graph_of(function, random_tensors(**(arguments or {"x": (4, 6)})), weights).graph


@pytest.mark.parametrize(
    ("turn", "is_linear"),
    [
        (aten.t.default, True),
        (lambda w: aten.transpose.int(w, 0, 1), True),
        (lambda w: aten.transpose.int(w, 1, 0), True),
        (lambda w: aten.transpose.int(w, -1, -2), True),
        (lambda w: aten.transpose.int(w, 0, -1), True),
        (lambda w: aten.permute.default(w, [1, 0]), True),
        (lambda w: aten.permute.default(w, [-1, -2]), True),
        (lambda w: aten.permute.default(w, [0, 1]), False),
        (lambda w: aten.transpose.int(w, 0, 0), False),
        (lambda w: aten.transpose.int(w, 1, 1), False),
        (aten.alias.default, False),
        (lambda w: w, False),
    ],
)
def test_a_matrix_is_transposed_by_its_last_dimensions(turn: Callable[[torch.Tensor], Any], is_linear: bool) -> None:
    graph = traced(lambda x, w: (x @ turn(w),), random_tensors(w=(6, 6)))
    x, w = graph.find_nodes(op="placeholder")
    product = last(graph)
    found = linear_of(product)
    assert (found is not None) == is_linear
    assert why_no_linear(product) == (None if is_linear else "the matrix is not a transposed parameter")
    assert list(multiplied_values(graph)) == ([x] if is_linear else [])
    if found is not None:
        assert (found.node, found.x, found.weight, found.bias, found.format) == (product, x, w, None, PLAIN)
        assert found.operand is product.args[1]
        assert (found.is_known, found.parameters, found.quantised) == (True, [w], None)


@pytest.mark.parametrize(
    ("turn", "is_linear"),
    [
        (lambda w: aten.transpose.int(w, 1, 2), True),
        (lambda w: aten.transpose.int(w, -1, -2), True),
        (lambda w: aten.permute.default(w, [0, 2, 1]), True),
        (lambda w: aten.permute.default(w, [0, -1, -2]), True),
        (lambda w: aten.transpose.int(w, 0, 1), False),
        (lambda w: aten.transpose.int(w, 0, 2), False),
        (lambda w: aten.permute.default(w, [1, 0, 2]), False),
        (lambda w: aten.permute.default(w, [2, 1, 0]), False),
        (lambda w: aten.permute.default(w, [1, 2, 0]), False),
    ],
)
def test_so_is_a_matrix_of_each_expert(turn: Callable[[torch.Tensor], Any], is_linear: bool) -> None:
    graph = traced(lambda x, w: (torch.bmm(x, turn(w)),), random_tensors(w=(4, 4, 4)), x=(4, 3, 4))
    x, w = graph.find_nodes(op="placeholder")
    found = experts_linear_of(last(graph))
    assert (found is not None) == is_linear
    assert product_of(last(graph)) == found
    if found is not None:
        assert (found.x, found.weight, found.transposed, found.bias) == (x, w, False, None)
        assert found.operand is last(graph).args[1]


def add_bias(product: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return product + bias.unsqueeze(1)


BIASES: list[tuple[Callable[..., Any], bool]] = [
    (add_bias, True),
    (lambda product, bias: bias.unsqueeze(1) + product, True),
    (lambda product, bias: aten.add.Tensor(product, bias.unsqueeze(1), alpha=2), False),
    (lambda product, bias: product + bias.unsqueeze(0), False),
    (lambda product, bias: product + bias.exp().unsqueeze(1), False),
    (lambda product, bias: product * bias.unsqueeze(1), False),
]


@pytest.mark.parametrize(("added", "is_linear"), BIASES)
def test_a_bias_of_experts_has_a_row_for_each(added: Callable[..., Any], is_linear: bool) -> None:
    weights = random_tensors(w=(3, 3, 4), bias=(3, 3))
    graph = traced(lambda x, w, bias: (added(torch.bmm(x, w.transpose(1, 2)), bias),), weights, x=(3, 3, 4))
    x, w, bias = graph.find_nodes(op="placeholder")
    found = experts_linear_of(last(graph))
    assert (found is not None) == is_linear
    assert product_of(last(graph)) is None  # the sum is no product
    (product,) = graph.find_nodes(op="call_function", target=aten.bmm.default)
    alone = product_of(product)
    assert alone is not None
    assert alone.bias is None
    if found is not None:
        assert (found.x, found.weight, found.transposed, found.bias) == (x, w, False, bias)


def test_a_matrix_of_columns_is_a_linear_of_experts() -> None:
    """As GPT-OSS has them."""
    graph = traced(lambda x, w: (torch.bmm(x, w),), random_tensors(w=(3, 4, 5)), x=(3, 2, 4))
    _, w = graph.find_nodes(op="placeholder")
    found = experts_linear_of(last(graph))
    assert found is not None
    assert (found.weight, found.transposed, found.operand) == (w, True, w)
    assert product_of(last(graph)) == found
    of_values = traced(lambda x, y: (torch.bmm(x, y.transpose(1, 2)),), {}, x=(3, 2, 4), y=(3, 5, 4))
    assert experts_linear_of(last(of_values)) is product_of(last(of_values)) is None


def test_codes_of_experts_are_decoded_before_the_product() -> None:
    def function(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.bmm(x, experts_weight(codes, scales, None, "e4m3 1x*", "float32").transpose(1, 2)),)

    weights = random_tensors(codes=(3, 5, 4), scales=(3, 5, 1))
    weights["codes"] = weights["codes"].to(torch.float8_e4m3fn)
    graph = traced(function, weights, x=(3, 2, 4))
    found = experts_linear_of(last(graph))
    assert found is not None
    assert found.weight.target is experts_weight
    assert product_of(last(graph)) is None


SCHEME = "e4m3 1x*, inputs e4m3 static"


def of_codes(**changes: Any) -> fx.Graph:
    weights = random_tensors(codes=(6, 6), scales=(6, 1), static=(1,), bias=(6,), norm=(6,))
    weights["codes"] = weights["codes"].to(torch.float8_e4m3fn)

    def function(x: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        more = {name: w[value] if isinstance(value, str) else value for name, value in changes.items()}
        more |= {"residual_TM": x} if "residual_TM" in more else {}
        return (quantised_linear(x, w["codes"], w["scales"], None, w["static"], w["bias"], SCHEME, **more),)

    return traced(function, weights)


def test_a_linear_of_codes_has_the_tensors_of_its_weight() -> None:
    graph = of_codes()
    x, codes, scales, static, bias, _ = graph.find_nodes(op="placeholder")
    found = linear_of(last(graph))
    assert found is not None
    assert (found.x, found.weight, found.bias, found.format, found.operand) == (x, codes, bias, QUANTISED, codes)
    assert found.is_known
    assert found.parameters == [codes, scales, static, bias]
    assert found.quantised is not None
    assert found.quantised.scheme == LinearScheme.parse(SCHEME)
    assert found.quantised.parameters == {"scales_RC": scales, "input_scale_1": static}
    with graph.inserting_before(last(graph)):
        again = emit_linear(graph, x, codes, bias, found.quantised)
    assert named(again) == named(last(graph))
    assert list(multiplied_values(graph)) == [x]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"norm_weight_K": "norm"}, "norm_weight_K"),
        ({"residual_TM": None}, "residual_TM"),
        ({"silu_mul": True}, "silu_mul"),
    ],
)
def test_a_linear_of_codes_with_neighbours_is_more_than_a_linear(changes: dict[str, Any], what: str) -> None:
    node = last(of_codes(**changes))
    assert linear_of(node) is None
    assert (why_no_linear(node) or "").startswith(f"it does more than a linear: {what} is ")


def test_plain_linears_are_emitted_with_and_without_a_bias() -> None:
    graph = traced(lambda x, w, b: (torch.nn.functional.linear(x, w, b),), random_tensors(w=(5, 6), b=(5,)))
    x, w, b = graph.find_nodes(op="placeholder")
    for bias in (b, None):
        with graph.inserting_before(graph.output_node()):
            node = emit_linear(graph, x, w, bias)
        found = linear_of(node)
        assert isinstance(found, Linear)
        assert (found.x, found.weight, found.bias) == (x, w, bias)
        assert found.parameters == [w, *([] if bias is None else [bias])]
        assert node.meta["val"].shape == (4, 5)


def test_values_are_counted_with_the_matrices_that_they_are_multiplied_with() -> None:
    """Also matrices that are transposed twice over; not vectors, lookups, matrices of columns, or two matrices."""

    def function(x: torch.Tensor, ids: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x @ w["a"].t()).exp()
        twice = y @ w["b"].t(), y @ w["c"].t(), torch.nn.functional.embedding(ids, w["d"])
        return *twice, x * w["v"], x @ w["columns"], w["a"].t() @ w["a"], w["a"].exp()

    arguments = random_tensors(x=(4, 6)) | {"ids": torch.arange(4)}
    sizes = {"a": (5, 6), "b": (7, 5), "c": (7, 5), "d": (9, 6), "v": (6,), "columns": (6, 8)}
    graph = graph_of(function, arguments, random_tensors(**sizes)).graph
    x = graph.find_nodes(op="placeholder")[0]
    y = graph.find_nodes(op="call_function", target=aten.exp.default)[0]
    assert multiplied_values(graph) == {x: 1, y: 2}
    weights = list(filter(is_parameter, graph.find_nodes(op="placeholder")))
    assert multiplied_values(graph, lambda node: node is weights[1]) == {y: 1}
    assert multiplied_values(graph, lambda node: False) == {}
