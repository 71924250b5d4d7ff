"""Pieces: constants and sizes in their JSON, generated Python, and where graphs are split."""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiled_engine.graphs.compiler.compile_piece import divided_shape
from compiled_engine.graphs.compiler.direct_piece import direct_source, is_direct, load_direct, op_named
from compiled_engine.graphs.compiler.piece import UnknownTarget, piece_from_json, piece_to_json
from compiled_engine.graphs.compiler.plan import Carried
from compiled_engine.graphs.compiler.split import SplitError, make_plan, split
from compiled_engine.passes.framework.graph_inputs import Source
from compiled_engine.passes.framework.graph_pass import GraphPass, SplittingOp
from compiled_engine.passes.registry import register_pass, unregister_pass

aten = torch.ops.aten
CPU = torch.device("cpu")
Symbols = list[torch.SymInt]


def symbols_of(*ranges: tuple[int, int]) -> tuple[ShapeEnv, Symbols]:
    shape_env = ShapeEnv()
    found = []
    for low, high in ranges:
        with shape_env.ignore_fresh_unbacked_symbols():
            found.append(shape_env.create_unbacked_symint())
        shape_env.constrain_symbol_range(found[-1].node.expr, low, high)
    return shape_env, found


def graph_of(values: list[Any], body: Callable[..., Any], mode: FakeTensorMode | None = None) -> fx.GraphModule:
    """A graph with these values as inputs, each node with its fake value. body(call, *inputs): what it returns."""
    graph, known = fx.Graph(), {}
    mode = mode or FakeTensorMode()

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        real_args, real_kwargs = fx.map_arg((args, kwargs), known.__getitem__)
        with mode:
            known[node] = target(*real_args, **real_kwargs)
        node.meta["val"] = known[node]
        return node

    inputs = []
    for number, value in enumerate(values):
        node = graph.placeholder(f"x{number}")
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        known[node] = mode.from_tensor(value) if is_real else value
        node.meta |= {"val": known[node], "source": Source("argument", f"x{number}")}
        inputs.append(node)
    graph.output(tuple(body(call, *inputs)))
    return fx.GraphModule({}, graph)


# JSON


def test_constants_of_every_kind_come_back() -> None:
    def body(call: Any, x: fx.Node) -> list[fx.Node]:
        copied = call(aten._to_copy.default, x, dtype=torch.bfloat16, layout=torch.strided, device=CPU)
        cloned = call(aten.clone.default, x, memory_format=torch.contiguous_format)
        full = call(aten.full.default, [2, 3], 1.5, dtype=torch.float32, device=CPU, pin_memory=False)
        indexed = call(aten.index.Tensor, x, [None, call(aten.arange.default, 3)])
        parts = call(aten.split_with_sizes.default, x, [1, 2], -1)
        return [copied, cloned, full, indexed, call(operator.getitem, parts, 1)]

    piece = graph_of([torch.empty(2, 3)], body)
    text = piece_to_json(piece)
    for constant in ("torch.bfloat16", "torch.strided", "torch.contiguous_format"):
        assert json.dumps({"torch": constant}) in text
    assert text.count(json.dumps({"device": "cpu"})) == 2
    again, (fake,), _ = piece_from_json(text)
    assert piece_to_json(again) == text
    assert (fake.dtype, tuple(fake.shape), fake.device) == (torch.float32, (2, 3), CPU)
    x = torch.randn(2, 3)
    for found, expected in zip(again(x), piece(x), strict=True):
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)


def test_inputs_keep_dtype_stride_and_sizes_with_their_ranges() -> None:
    """Sizes are numbered by first use, so that layers with other symbols have the same text."""
    texts = []
    for spare in (0, 2):
        shape_env, (*_, rows, columns) = symbols_of(*[(1, 7)] * spare, (1, 64), (2, 9))
        with FakeTensorMode(shape_env=shape_env):
            x = torch.empty_strided((rows, columns), (2 * columns, 1), dtype=torch.bfloat16)
            ids = torch.empty(columns * 4, dtype=torch.int64)
        graph = fx.Graph()
        nodes = [graph.placeholder(name) for name in "abcd"]
        for node, value in zip(nodes, (columns, x, ids, rows + 3), strict=True):
            node.meta["val"] = value
        graph.output((nodes[1],))
        texts.append(piece_to_json(fx.GraphModule({}, graph)))
    assert texts[0] == texts[1]
    data = json.loads(texts[0])
    assert data["symbols"] == {"n0": [2, 9], "n1": [1, 64]}
    described = [node[1] for node in data["nodes"][:4]]
    assert described[0] == {"size": "n0"}
    assert (described[1]["shape"], described[1]["stride"], described[1]["dtype"]) == (
        *(["n1", "n0"], ["2*n0", 1], "torch.bfloat16"),
    )
    assert described[3] == {"size": "n1 + 3"}
    _, (size, x, ids, more), shape_env = piece_from_json(texts[0])
    assert (x.dtype, ids.dtype) == (torch.bfloat16, torch.int64)
    assert (x.shape[1].node.expr, ids.shape[0].node.expr) == (size.node.expr, 4 * size.node.expr)
    assert x.stride()[0].node.expr == 2 * size.node.expr
    assert more.node.expr == x.shape[0].node.expr + 3
    bounds = {str(known): shape_env.var_to_range[known] for known in (size.node.expr, x.shape[0].node.expr)}
    assert [(int(bound.lower), int(bound.upper)) for bound in bounds.values()] == [(2, 9), (1, 64)]


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        *((operator.add, (7, 2), 9), (operator.sub, (7, 2), 5), (operator.mul, (7, 2), 14)),
        *((operator.floordiv, (7, 2), 3), (operator.mod, (7, 2), 1), (operator.neg, (7,), -7)),
        *((operator.eq, (7, 2), False), (operator.ne, (7, 2), True), (operator.lt, (7, 2), False)),
        *((operator.le, (2, 2), True), (operator.gt, (7, 2), True), (operator.ge, (2, 7), False)),
        *((torch.sym_max, (7, 2), 7), (torch.sym_min, (7, 2), 2), (torch.sym_not, (True,), False)),
        *((torch.sym_int, (7.5,), 7), (torch.sym_float, (7,), 7.0)),
        *((math.ceil, (7.5,), 8), (math.floor, (7.5,), 7), (math.trunc, (-7.5,), -7)),
    ],
)
def test_arithmetic_on_sizes_comes_back(
    function: Callable[..., Any], arguments: tuple[Any, ...], expected: object
) -> None:
    piece = graph_of(list(arguments), lambda call, *nodes: [call(function, *nodes)])
    for node in piece.graph.find_nodes(op="placeholder"):
        node.meta["val"] = 3  # only whole numbers are sizes
    again, fakes, _ = piece_from_json(piece_to_json(piece))
    assert fakes == [3] * len(arguments)
    assert again(*arguments) == (expected,)


@pytest.mark.parametrize("constant", [1j, {1, 2}])
def test_a_constant_without_json_is_named(constant: object) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    graph.output((graph.call_function(aten.add.Tensor, (x, constant)),))
    with pytest.raises(UnknownTarget, match=f"a constant of type {type(constant).__name__}"):
        piece_to_json(fx.GraphModule({}, graph))


def test_a_node_that_is_no_call_of_a_function_is_named() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    graph.output((graph.call_method("relu", (x,)),))
    with pytest.raises(UnknownTarget, match="is a call_method"):
        piece_to_json(fx.GraphModule({}, graph))


# Generated Python


def test_python_of_a_piece_drops_each_value_behind_its_last_use_and_keeps_what_it_returns() -> None:
    def body(call: Any, x: fx.Node, w: fx.Node, unread: fx.Node) -> list[fx.Node]:
        turned = call(aten.t.default, w)
        product = call(aten.mm.default, x, turned)
        return [call(aten.view.default, product, [6]), product, call(aten.mm.default, x, turned)]

    text = piece_to_json(graph_of([torch.empty(2, 4), torch.empty(3, 4), torch.empty(1)], body))
    assert is_direct(text)
    assert direct_source(text).splitlines() == [
        "def piece(v0, v1, v2):",
        "    v3 = op__aten__t__default(v1)",
        "    del v1",
        "    v4 = op__aten__mm__default(v0, v3)",
        "    v5 = op__aten__view__default(v4, [6])",
        "    v6 = op__aten__mm__default(v0, v3)",
        "    del v3, v0",
        "    return (v5, v4, v6,)",
    ]
    x, w = torch.randn(2, 4), torch.randn(3, 4)
    expected = x @ w.t()
    for found, shape in zip(load_direct(direct_source(text), "cpu")(x, w, x), ((6,), (2, 3), (2, 3)), strict=True):
        torch.testing.assert_close(found, expected.view(shape))


def test_values_that_are_given_by_name_are_kept_until_then() -> None:
    nodes = [
        *(["input", {"size": 2}], ["input", {"size": 2}]),
        ["aten::view.default", [{"node": 0}, [6]], {"dict": {}}],
        ["aten::view.default", [{"node": 2}], {"dict": {"size": [{"node": 1}, 3], "other": {"node": 0}}}],
        ["output", [{"node": 3}]],
    ]
    assert direct_source(json.dumps({"symbols": {}, "nodes": nodes})).splitlines() == [
        "def piece(v0, v1):",
        "    v2 = op__aten__view__default(v0, [6])",
        "    v3 = op__aten__view__default(v2, size=[v1, 3], other=v0)",
        "    del v0, v1, v2",
        "    return (v3,)",
    ]


def test_arithmetic_on_sizes_needs_the_compiler() -> None:
    piece = graph_of([3, torch.empty(6)], lambda call, n, x: [call(aten.view.default, x, [call(operator.mul, n, 2)])])
    assert not is_direct(piece_to_json(piece))


@pytest.mark.parametrize(
    ("target", "name"),
    [(aten.mm.default, "op__aten__mm__default"), (aten.mul.Tensor, "op__aten__mul__Tensor")],
)
def test_the_name_of_an_op_in_python_leads_to_it(target: Any, name: str) -> None:
    assert op_named(name) is target


def scaled_twice(call: Any, ids: fx.Node, w: fx.Node) -> list[fx.Node]:
    return [call(aten.mul.Tensor, call(aten.mul.Tensor, call(aten.embedding.default, w, ids), 2.0), 3.0)]


def scaled_sum(call: Any, ids: fx.Node, w: fx.Node) -> list[fx.Node]:
    return [call(aten.add.Tensor, call(aten.mul.Tensor, call(aten.embedding.default, w, ids), 2.0), 1.0)]


def scaled_weight(call: Any, ids: fx.Node, w: fx.Node) -> list[fx.Node]:
    return [call(aten.embedding.default, call(aten.mul.Tensor, w, 2.0), ids)]


@pytest.mark.parametrize("body", [scaled_twice, scaled_sum, scaled_weight])
def test_more_than_one_thing_to_fuse_needs_the_compiler(body: Callable[..., Any]) -> None:
    text = piece_to_json(graph_of([torch.zeros(3, dtype=torch.int64), torch.empty(8, 4)], body))
    assert not is_direct(text)


# Where graphs are split


@torch.library.custom_op("tests::marks", mutates_args=("x",))
def marks(x: torch.Tensor, scale: float) -> None:
    """Stand for an attention."""


@torch.library.custom_op("tests::counts", mutates_args=("x",))
def counts(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Stand for an op that writes and returns."""
    return x.clone()


@counts.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture
def _splits() -> Any:
    class Splits(GraphPass):
        name = "splits_here"
        splitting_ops = (
            SplittingOp("tests::marks", lambda x, scale: None, attends=True),
            SplittingOp("tests::counts", lambda x, scale: x.clone()),
        )

    register_pass(Splits())
    yield
    unregister_pass("splits_here")


MARKS, COUNTS = torch.ops.tests.marks.default, torch.ops.tests.counts.default


def layers(call: Any, x: fx.Node, w: fx.Node) -> list[fx.Node]:
    first = call(aten.mm.default, x, w)
    kept = call(aten.relu.default, first)
    call(MARKS, first, 0.5)
    second = call(aten.mm.default, first, w)
    call(MARKS, second, 0.25)
    third = call(aten.add.Tensor, second, kept)
    return [third, kept]


@pytest.mark.usefixtures("_splits")
def test_pieces_lie_between_splitting_ops_and_equal_ones_are_one() -> None:
    shape_env, (rows,) = symbols_of((2, 64))
    with FakeTensorMode(shape_env=shape_env) as mode:
        x = torch.empty(rows, 4)
        weight = torch.empty(4, 4)
    graph = graph_of([x, weight], layers, mode).graph
    steps = split(graph)
    assert [step.op for step in steps] == [None, "tests::marks", None, "tests::marks", None]
    assert [len(step.outputs) for step in steps] == [2, 0, 1, 0, 1]
    plan, unique = make_plan(graph, steps, ("x0",))
    assert plan.arguments == ("x0", "x1")  # what a pass asks for comes behind
    assert [step.piece is None for step in plan.steps] == [step.op is not None for step in steps]
    assert len(unique) == 3
    # The inputs are values 0 and 1; a piece takes its inputs in the order of their first use.
    assert [(step.arguments, step.results) for step in plan.steps] == [
        (({"value": 0}, {"value": 1}), (2, 3)),
        (({"value": 2}, {"constant": 0.5}), ()),
        (({"value": 2}, {"value": 1}), (4,)),
        (({"value": 4}, {"constant": 0.25}), ()),
        (({"value": 4}, {"value": 3}), (5,)),
    ]
    assert plan.outputs == (5, 3)
    assert plan.carried == (*(Carried(value, "float32", (4,)) for value in (2, 3, 4)),)


@pytest.mark.usefixtures("_splits")
def test_a_splitting_op_may_return_what_is_read_and_takes_no_keywords() -> None:
    read = graph_of([torch.empty(2, 4)], lambda call, x: [call(COUNTS, x, 0.5)])
    assert [len(step.outputs) for step in split(read.graph)] == [1]
    unread = graph_of([torch.empty(2, 4)], lambda call, x: [call(COUNTS, x, 0.5), x][1:])
    assert [len(step.outputs) for step in split(unread.graph)] == [0]
    keyword = graph_of([torch.empty(2, 4)], lambda call, x: [call(COUNTS, x, scale=0.5)])
    with pytest.raises(SplitError, match="tests::counts is called with keywords"):
        split(keyword.graph)


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize(("op", "is_carried"), [(MARKS, True), (COUNTS, False)])
def test_only_what_outlives_an_attention_is_carried(op: Any, is_carried: bool) -> None:
    shape_env, (rows,) = symbols_of((2, 64))
    with FakeTensorMode(shape_env=shape_env) as mode:
        x = torch.empty(rows, 4)

    def body(call: Any, x: fx.Node) -> list[fx.Node]:
        kept, used = call(aten.relu.default, x), call(aten.neg.default, x)
        call(op, used, 0.5)
        return [kept]

    graph = graph_of([x], body, mode).graph
    plan, _ = make_plan(graph, split(graph), ("x0",))
    assert plan.carried == ((Carried(plan.outputs[0], "float32", (4,)),) if is_carried else ())


def test_an_op_that_writes_and_is_not_declared_is_an_error() -> None:
    module = graph_of([torch.empty(2, 4)], lambda call, x: [call(COUNTS, x, 0.5)])
    with pytest.raises(SplitError, match="op tests::counts mutates an input"):
        split(module.graph)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((4, 24), (96,), (4, 24)),
        ((96,), (4, 24), (4, 24)),
        ((8, 12), (4, 24), (4, 2, 12)),
        ((4, 24), (8, 12), (4, 2, 12)),
        ((6, 4), (4, 6), None),
        ((1, 12), (3, 4), (3, 4)),
        ((5, 7), (5, 7), (5, 7)),
    ],
)
def test_a_view_that_divides_and_joins_has_a_shape_between(
    before: tuple[int, ...], after: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    found = divided_shape(before, after)
    assert found == expected
    if expected is not None:
        assert math.prod(expected) == math.prod(before)


def test_a_shape_between_has_one_symbol_at_most() -> None:
    _, (rows, columns) = symbols_of((2, 64), (2, 64))
    assert divided_shape((4 * rows, 24), (rows, 96)) == (rows, 4, 24)
    assert divided_shape((4 * rows, columns), (rows, 4 * columns)) is None


def test_generated_python_is_python() -> None:
    def body(call: Any, x: fx.Node) -> list[fx.Node]:
        return [call(aten.empty_like.default, x, dtype=torch.float16, device=CPU, pin_memory=False)]

    source = direct_source(piece_to_json(graph_of([torch.empty(2)], body)))
    ast.parse(source)
    (found,) = load_direct(source, "cpu")(torch.empty(2))
    assert (found.dtype, found.shape) == (torch.float16, (2,))
    assert SimpleNamespace(device=found.device).device == CPU
