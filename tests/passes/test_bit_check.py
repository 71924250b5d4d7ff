"""The comparison of bits when a batch-invariant model is compiled: it finds ops whose results depend on a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from compiled_engine.passes.framework.matching import emit, emit_item
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.invariance.bit_check import check_bits
from compiled_engine.passes.linear.invariant_linear import invariant_linear
from compiled_engine.passes.linear.round_inputs import round_inputs
from compiled_engine.recurrence.op import STATE_SPACE
from compiled_engine.recurrence.sequences import Sequences

ROWS, FIXED = DimDynamic.DYNAMIC, DimDynamic.STATIC
MUL = torch.ops.aten.mul.Tensor
CUMSUM = torch.ops.aten.cumsum.default


class Graph:
    """A graph whose placeholders have a first dimension that is unknown, or known."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._mode = FakeTensorMode(shape_env=ShapeEnv())

    def placeholder(self, *shape: int, rows: bool = False) -> fx.Node:
        node = self.graph.placeholder(f"argument_{len(self.graph.nodes)}")
        context = StatelessSymbolicContext(dynamic_sizes=[ROWS if rows else FIXED, *[FIXED] * (len(shape) - 1)])
        node.meta["val"] = self._mode.from_tensor(torch.empty(shape), symbolic_context=context)
        return node


def scan_of(invariant: bool) -> fx.Graph:
    made, heads, key, value = Graph(), 2, 16, 24
    x, dt, b, c = (made.placeholder(7, *shape, rows=True) for shape in ((heads, value), (heads,), (1, key), (1, key)))
    a, d, bias = (made.placeholder(heads) for _ in range(3))
    state, out = made.placeholder(3, heads, key, value), made.placeholder(7, heads, value, rows=True)
    sequences = [made.placeholder(3) for _ in Sequences._fields]
    arguments = x, dt, a, b, c, d, bias, 0.0, None, state, None, None, out, *sequences, invariant
    made.graph.call_function(STATE_SPACE, arguments)
    return made.graph


def test_a_row_that_depends_on_others_is_found() -> None:
    made = Graph()
    made.graph.call_function(CUMSUM, (made.placeholder(7, 16, rows=True), 0))
    with pytest.raises(VerificationError, match=r"cumsum.* gives other bits in a step of 2 than in one of 6"):
        check_bits(made.graph, (CUMSUM,), (2, 3))


def test_a_recurrence_in_chunks_is_found() -> None:
    with pytest.raises(VerificationError, match=r"state_space.* gives other bits in steps of 3, 1 and 4 than in"):
        check_bits(scan_of(invariant=False), (), (1, 2))
    assert check_bits(scan_of(invariant=True), (), (1, 2)) == (
        "a request has the same bits in steps of 3, 1 and 4 tokens: 1 x state_space",
    )


def test_inputs_that_another_op_rounds_are_rounded_in_each_step() -> None:
    """Codes and scales are not drawn: scales have rows in their second dimension."""
    made = Graph()
    x = made.placeholder(7, 16, rows=True)
    rounded = emit(made.graph, round_inputs, x, None, "int8 1x*")
    codes = emit_item(made.graph, rounded, 0)
    other = emit_item(made.graph, emit(made.graph, round_inputs, x, None, "int8 1x8"), 0)
    for operand in (codes, codes, other):
        emit(made.graph, MUL, operand, operand)
    (line,) = check_bits(made.graph, (MUL,), (2, 3))
    assert line.endswith("2 x mul.Tensor")  # codes that are rounded otherwise are another case
    made.graph.call_function(CUMSUM, (codes, 1))
    assert len(check_bits(made.graph, (CUMSUM,), (2, 3))) == 1
    made.graph.call_function(CUMSUM, (codes, 0))
    with pytest.raises(VerificationError, match=r"cumsum.* gives other bits in a step of 2 than in one of 6"):
        check_bits(made.graph, (CUMSUM,), (2, 3))


def test_ops_of_equal_shapes_are_compared_once() -> None:
    made = Graph()
    x = made.placeholder(7, 32, rows=True)
    for num_rows in (16, 16, 48):
        made.graph.call_function(invariant_linear, (x, made.placeholder(num_rows, 32), None, None))
    (line,) = check_bits(made.graph, (invariant_linear,), (1, 2, 65))
    assert line == "a row has the same bits in steps of 1, 2 and 65 rows: 2 x invariant_linear"


def test_without_the_gpu_of_the_graph_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Graph()
    x = made.placeholder(7, 32, rows=True)
    weight = made.placeholder(16, 32)
    made.graph.call_function(invariant_linear, (x, weight, None, None))
    for node in (x, weight):
        value = node.meta["val"]
        node.meta["val"] = SimpleNamespace(shape=value.shape, dtype=value.dtype, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_bits(made.graph, (invariant_linear,), (1,)) == ("bits were not compared: no GPU is there",)
