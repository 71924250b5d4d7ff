"""Code as ATen: without writes, products as torch can trace them, numbers as values; and the sizes of a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from compiled_engine.graphs.compiler.functional import to_aten, write_out_constants
from compiled_engine.graphs.compiler.record import SymbolRecord, symbols
from compiled_engine.passes.framework.graph_inputs import Source
from compiled_engine.passes.framework.parameter import Parameter

aten = torch.ops.aten


def dynamos_graph(function: Callable[..., Any], *examples: torch.Tensor) -> fx.GraphModule:
    """A graph of functions of torch whose nodes have their values, as Dynamo makes it."""
    module = fx.symbolic_trace(function)
    values: dict[fx.Node, Any] = {}
    given = iter(examples)
    for node in module.graph.nodes:
        arguments, keywords = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(given).clone()
        elif node.op == "call_method":
            values[node] = getattr(arguments[0], node.target)(*arguments[1:], **keywords)
        elif node.op == "call_function":
            values[node] = node.target(*arguments, **keywords)
        if node in values:
            node.meta["example_value"] = values[node]
    return module


def ops_of(module: fx.GraphModule) -> set[str]:
    return {node.target.name() for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}


def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.add_(1)
    return torch.relu(y)


def two_linears(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(torch.nn.functional.linear(x, w), w)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, w)


def product_by_sign(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def turned(length: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.polar(length, angle) * torch.polar(abs=torch.ones_like(angle), angle=angle))


@pytest.mark.parametrize(
    ("function", "shapes", "has", "has_not"),
    [
        (in_place, ((2, 3), (1,)), "aten::add.Tensor", "aten::add_.Tensor"),
        (two_linears, ((1, 5, 4), (4, 4)), "aten::mm", "aten::bmm"),
        (two_linears, ((3, 4), (4, 4)), "aten::mm", "aten::unsqueeze"),
        (two_linears, ((2, 5, 4), (4, 4)), "aten::view", "aten::squeeze.dim"),
        (product, ((2, 3, 1), (2, 1, 4)), "aten::mul.Tensor", "aten::bmm"),
        (product_by_sign, ((3, 1), (1, 4)), "aten::mul.Tensor", "aten::mm"),
        (product, ((2, 3, 2), (2, 2, 4)), "aten::bmm", "aten::mul.Tensor"),
        (product, ((3, 4), (4,)), "aten::mv", "aten::mul.Tensor"),
        (turned, ((3, 4), (3, 4)), "aten::view_as_complex", "aten::polar"),
    ],
)
def test_code_becomes_the_same_without_what_cannot_be_traced(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], has: str, has_not: str
) -> None:
    examples = [torch.randn(shape) for shape in shapes]
    module = to_aten(dynamos_graph(function, *examples), examples)
    assert has in ops_of(module)
    assert has_not not in ops_of(module)
    given = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(module(*given), function(*given))


def test_single_numbers_become_values_and_tables_stay() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    number, table = graph.get_attr("number"), graph.get_attr("table")
    for node in (number, table):
        node.meta["val"] = node.target
    total = graph.call_function(operator.mul, (graph.call_function(operator.add, (x, number)), table))
    graph.output((total,))
    constants = {"number": torch.tensor(2.5, dtype=torch.float64), "table": torch.tensor([3.0])}
    module = fx.GraphModule(constants, graph)
    write_out_constants(module)
    module.recompile()
    assert [node.target for node in module.graph.find_nodes(op="get_attr")] == ["table"]
    (full,) = module.graph.find_nodes(op="call_function", target=aten.full.default)
    assert (full.args, full.kwargs["dtype"]) == (([], 2.5), torch.float64)
    assert full.meta == {"val": "number"}
    assert module(torch.ones(1, dtype=torch.float64))[0].tolist() == [10.5]


def test_a_size_has_its_symbol_its_range_and_all_its_places() -> None:
    """As far as the graph has the arguments: an argument that no code reads has no symbol."""
    graph = fx.Graph()
    sources = {
        "x": (Source("argument", "x_TD"), torch.empty(7, 4)),
        "y": (Source("argument", "y_RT"), torch.empty(5, 7)),
        "w": (Parameter("unread_T", (9,), "float32"), torch.empty(9)),
        "n": (Source("size", "x_TD", 0), 7),
    }
    for name, (source, value) in sources.items():
        graph.placeholder(name).meta |= {"source": source, "val": value}
    declared = {
        ("unread_T", 0): ("tokens", 1, 64),
        ("x_TD", 0): ("tokens", 1, 64),
        ("y_RT", 0): ("requests", 1, 8),
        ("y_RT", 1): ("tokens", 1, 64),
    }
    assert symbols(graph, declared) == (
        SymbolRecord("7", "tokens", 1, 64, ("x_TD.shape[0]", "y_RT.shape[1]")),
        SymbolRecord("5", "requests", 1, 8, ("y_RT.shape[0]",)),
    )
