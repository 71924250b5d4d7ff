"""The verifier on graphs of a few calls: what it compares, with which tolerance, and which changes it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pass_cases import CPU, Tensors, graph_of, random_tensors
from torch import fx

from compiled_engine.passes.framework.graph_inputs import add_parameter, parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange, PassResult, Replacement
from compiled_engine.passes.framework.matching import aten, emit
from compiled_engine.passes.framework.parameter import BUFFER, made
from compiled_engine.passes.framework.verifier import VerificationError, copy_of, difference, verify_rewrites

pytestmark = pytest.mark.usefixtures("one_thread")

Edit = Callable[[fx.Graph], list[Replacement]]


def check(
    function: Callable[..., object],
    edit: Edit,
    arguments: Tensors | None = None,
    parameters: Tensors | None = None,
    tokens: tuple[int, int] = (4, 4),
) -> int:
    """Verify what `edit` makes of the graph of a function; it returns what it reports."""
    arguments = random_tensors(x=(4, 8)) if arguments is None else arguments
    graph = graph_of(function, arguments, parameters or {}).graph
    before = copy_of(graph)
    result = PassResult(1, (), tuple(edit(graph)))
    return verify_rewrites("edit", before, graph, result, CompileRange(*tokens), CPU)


def call(graph: fx.Graph, target: Any, which: int = 0) -> fx.Node:
    return graph.find_nodes(op="call_function", target=target)[which]


def becomes(old: Any, new: Callable[[fx.Graph, fx.Node], fx.Node], reported: bool = True) -> Edit:
    """The first call of `old` becomes what `new` emits."""

    def edit(graph: fx.Graph) -> list[Replacement]:
        node = call(graph, old)
        with graph.inserting_before(node):
            after = new(graph, node)
        node.replace_all_uses_with(after)
        graph.erase_node(node)
        return [Replacement(node.name, after)] if reported else []

    return edit


def twice(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return emit(graph, aten.add.Tensor, node.args[0], node.args[0])


def itself(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return emit(graph, aten.alias.default, node.args[0])


def doubled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((x * 2).exp(),)


def test_right_and_wrong_replacements() -> None:
    assert check(doubled, becomes(aten.mul.Tensor, twice)) == 1
    with pytest.raises(VerificationError, match=r"pass edit, 4 tokens: the value of alias.*, which replaced mul"):
        check(doubled, becomes(aten.mul.Tensor, itself))


def test_each_replacement_counts_and_one_that_is_gone_does_not() -> None:
    def edit(graph: fx.Graph) -> list[Replacement]:
        reported = becomes(aten.mul.Tensor, twice)(graph)
        with graph.inserting_before(graph.output_node()):
            other = emit(graph, aten.neg.default, reported[0].after)
        gone = Replacement("exp", other)
        graph.erase_node(other)
        return [*reported, *becomes(aten.exp.default, lambda g, n: emit(g, aten.exp.default, n.args[0]))(graph), gone]

    assert check(doubled, edit) == 2


def test_what_reads_another_value_than_before_is_compared_unreported() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.exp() + x.sin(), x.exp()

    def reads(target: Any) -> Edit:
        def edit(graph: fx.Graph) -> list[Replacement]:
            call(graph, aten.add.Tensor).update_arg(0, call(graph, target, -1))
            return []

        return edit

    assert check(two, reads(aten.exp.default)) == 1
    assert check(two, lambda graph: []) == 0
    with pytest.raises(VerificationError, match="the value of add, which replaced add"):
        check(two, reads(aten.sin.default))


def test_another_constant_is_compared_unreported() -> None:
    def edit(graph: fx.Graph) -> list[Replacement]:
        call(graph, aten.mul.Tensor).update_arg(1, 3)
        return []

    with pytest.raises(VerificationError, match="the value of mul"):
        check(doubled, edit)


def test_what_a_graph_returns_is_compared_in_its_order() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.exp(), x.sin()

    def swapped(graph: fx.Graph) -> list[Replacement]:
        graph.output_node().args = (tuple(reversed(graph.output_node().args[0])),)  # type: ignore[arg-type]
        return []

    with pytest.raises(VerificationError, match="the value of sin, which replaced exp"):
        check(two, swapped)
    # An equal value in a returned one's place is accepted, though nobody reported it.
    again = becomes(aten.exp.default, lambda g, n: emit(g, aten.exp.default, n.args[0]), reported=False)
    assert check(doubled, again) == 1
    with pytest.raises(VerificationError, match="alias"):
        check(doubled, becomes(aten.exp.default, itself, reported=False))


def test_memory_may_be_allocated_for_another_value_of_its_shape() -> None:
    """Its elements are not read, so they are not compared."""

    def filled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (aten.fill.Scalar(torch.empty_like(x.exp()), 1.0),)

    def edit(graph: fx.Graph) -> list[Replacement]:
        call(graph, aten.empty_like.default).update_arg(0, graph.find_nodes(op="placeholder")[0])
        return []

    assert check(filled, edit) == 0


@pytest.mark.parametrize("which", [0, 1])
def test_memory_that_took_the_place_of_a_value_has_what_was_written_to_it(which: int) -> None:
    """As where a recurrence writes its result, and the model takes the last rows of it, which are all."""

    def written(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs = [torch.empty_like(x) for _ in range(2)]
        for factor, out in enumerate(outs, start=2):
            out.copy_(x * factor)
        return (outs[0][-4:].exp(), outs[1])

    def edit(graph: fx.Graph) -> list[Replacement]:
        node = call(graph, aten.slice.Tensor)
        memory = call(graph, aten.empty_like.default, which)
        node.replace_all_uses_with(memory)
        graph.erase_node(node)
        return [Replacement(node.name, memory)]

    if which == 0:
        assert check(written, edit) == 2
    else:
        with pytest.raises(VerificationError, match="which replaced slice"):
            check(written, edit)


def test_an_input_of_another_source_is_an_error() -> None:
    def edit(graph: fx.Graph) -> list[Replacement]:
        first, second = graph.find_nodes(op="placeholder")
        first.meta["source"], second.meta["source"] = second.meta["source"], first.meta["source"]
        return []

    with pytest.raises(VerificationError, match=r"input arg[01]_1 has another source than before"):
        check(lambda x, y: (x - y,), edit, random_tensors(x=(4, 8), y=(4, 8)))


def test_an_input_keeps_its_description() -> None:
    """Also where it has the same name."""

    def edit(graph: fx.Graph) -> list[Replacement]:
        weight = graph.find_nodes(op="placeholder")[1]
        weight.meta["source"] = replace(parameter_of(weight), role=BUFFER)
        return []

    with pytest.raises(VerificationError, match="input arg1_1 has another source"):
        check(lambda x, w: (x * w,), edit, random_tensors(x=(4, 8)), random_tensors(w=(8,)))


def written(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """y is read before it is written to, and after."""
    before = x * y
    y.add_(x)
    return before, y * 2


WRITE = aten.add_.Tensor


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (becomes(WRITE, lambda g, n: emit(g, aten.add.Tensor, *n.args)), r"writes to \[\], add_.* wrote to \['self'\]"),
        (becomes(WRITE, lambda g, n: emit(g, aten.sub_.Tensor, *n.args)), "self of sub_.*, which replaced add_"),
        (becomes(WRITE, lambda g, n: emit(g, WRITE, *n.args[:1], n.args[0])), "self of add_"),
    ],
)
def test_what_is_written_is_compared(edit: Edit, problem: str) -> None:
    with pytest.raises(VerificationError, match=problem):
        check(written, edit, random_tensors(x=(4, 8), y=(4, 8)))


def test_a_write_may_be_computed_in_another_way() -> None:
    def other(graph: fx.Graph, node: fx.Node) -> fx.Node:
        return emit(graph, aten.sub_.Tensor, node.args[0], emit(graph, aten.neg.default, node.args[1]))

    assert check(written, becomes(WRITE, other), random_tensors(x=(4, 8), y=(4, 8))) >= 1


def test_a_write_starts_from_what_was_there_before_it() -> None:
    """Afterwards nothing is negative, and both would leave it as it is."""

    def clipped(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y.relu_()
        return (x * y,)

    edit = becomes(aten.relu_.default, lambda g, n: emit(g, aten.abs_.default, *n.args))
    with pytest.raises(VerificationError, match="self of abs_"):
        check(clipped, edit, random_tensors(x=(4, 8), y=(4, 8)))


def test_writes_that_nobody_reported_are_an_error() -> None:
    def dropped(graph: fx.Graph) -> list[Replacement]:
        node = call(graph, WRITE)
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
        return []

    def added(graph: fx.Graph) -> list[Replacement]:
        with graph.inserting_before(graph.output_node()):
            emit(graph, aten.mul_.Tensor, graph.find_nodes(op="placeholder")[1], 2.0)
        return []

    inputs = random_tensors(x=(4, 8), y=(4, 8))
    with pytest.raises(VerificationError, match=r"add_.*, which writes to its inputs, went unreported"):
        check(lambda x, y: (x, y.add_(x))[:1], dropped, inputs)
    with pytest.raises(VerificationError, match=r"mul_.*, which writes to its inputs, came unreported"):
        check(lambda x, y: (x * y,), added, inputs)


@pytest.mark.parametrize(("operand", "is_right"), [(1.0, True), (2.0, False)])
def test_a_derived_parameter_is_computed(operand: float, is_right: bool) -> None:
    """From the one that it is made of, not taken from what it replaced."""

    def edit(graph: fx.Graph) -> list[Replacement]:
        total = call(graph, aten.add.Tensor)
        source = parameter_of(total.args[0])  # type: ignore[arg-type]
        new = add_parameter(graph, made(source, "add", operand, total.meta["val"]))
        total.replace_all_uses_with(new)
        graph.erase_node(total)
        return [Replacement(total.name, new)]

    def scaled(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * (weight + 1),)

    given = random_tensors(x=(4, 8)), random_tensors(weight=(8,))
    if is_right:
        assert check(scaled, edit, *given) == 1
    else:
        with pytest.raises(VerificationError, match="which replaced add"):
            check(scaled, edit, *given)


def test_small_weights_show_what_a_small_constant_does() -> None:
    def normed(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-9) -> tuple[torch.Tensor, ...]:
        return (x * torch.rsqrt(aten.add.Scalar(w.pow(2).mean(-1), eps)),)

    def edit(graph: fx.Graph) -> list[Replacement]:
        call(graph, aten.add.Scalar).update_arg(1, 1e-8)
        return []

    with pytest.raises(VerificationError, match="the value of add"):
        check(normed, edit, random_tensors(x=(8, 8)), random_tensors(w=(8, 8)), (8, 8))


@pytest.mark.parametrize(
    ("low", "high", "first"), [(1, 6, 6), (2, 6, 2), (1, 128, 128), (1, 129, 128), (1, 100_000, 128), (3, 3, 3)]
)
def test_both_ends_of_a_range_are_run_and_not_more_than_128_tokens(low: int, high: int, first: int) -> None:
    """One token is the same in reverse."""
    with pytest.raises(VerificationError, match=rf"pass edit, {first} tokens"):
        check(lambda x: (x.flip(0).exp(),), becomes(aten.flip.default, itself), tokens=(low, high))


def test_a_rewrite_may_round_less_than_the_original() -> None:
    """The oracle leaves casts to fewer bits out: what is nearer to it is right."""

    def narrow(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (aten._to_copy.default(x.float() * 3, dtype=torch.bfloat16).float().exp(),)

    def wide(graph: fx.Graph) -> list[Replacement]:
        end = call(graph, aten.exp.default)
        with graph.inserting_before(end):
            new = emit(graph, aten.exp.default, call(graph, aten.mul.Tensor))
        end.replace_all_uses_with(new)
        graph.eliminate_dead_code()
        return [Replacement(end.name, new)]

    assert check(narrow, wide, random_tensors(torch.bfloat16, x=(4, 8))) == 1


def test_a_copy_has_the_same_names_and_is_apart() -> None:
    graph = graph_of(doubled, random_tensors(x=(4, 8)), {}).graph
    copy = copy_of(graph)
    assert [(n.name, n.op, n.target, str(n.args)) for n in copy.nodes] == [
        (n.name, n.op, n.target, str(n.args)) for n in graph.nodes
    ]
    assert [n.meta.get("val") is m.meta.get("val") for n, m in zip(copy.nodes, graph.nodes, strict=True)]
    call(graph, aten.mul.Tensor).update_arg(1, 3)
    assert call(copy, aten.mul.Tensor).args[1] == 2


ULPS = {torch.float32: 128, torch.bfloat16: 4, torch.float16: 4}


@pytest.mark.parametrize("dtype", ULPS, ids=str)
def test_a_row_may_be_off_by_a_few_units_of_its_largest_value(dtype: torch.dtype) -> None:
    """Other rows do not count."""
    exact = torch.tensor([[1000.0] * 8, [1.0] + [0.25] * 7], dtype=dtype)
    ulp = torch.finfo(dtype).eps
    for units, is_right in ((1, True), (1.3, False), (-1.3, False)):
        found = exact.clone()
        found[1, 0] += units * ULPS[dtype] * ulp
        problem = difference(exact, exact.float(), found)
        assert (problem is None) == is_right
        if problem is not None:
            assert "in row 1, the original by 0" in problem


def test_a_row_may_be_twice_as_far_off_as_the_original() -> None:
    oracle = torch.ones(2, 8)
    expected = oracle + 0.1
    assert difference(expected, oracle, oracle + 0.199) is None
    assert difference(expected, oracle, oracle - 0.199) is None
    assert difference(expected, oracle, oracle + 0.202) is not None
    assert difference(oracle, oracle, oracle + 0.199) is not None


def test_narrow_rows_may_be_off_as_the_mean_row_is() -> None:
    """All of their few results may cancel out."""
    for width, is_right in ((7, True), (8, False)):
        oracle = torch.zeros(2, width)
        oracle[0] = 1.0
        found = oracle.clone()
        found[1] = 20 * torch.finfo(torch.float32).eps
        assert (difference(oracle, oracle, found) is None) == is_right


def test_other_kinds_of_values() -> None:
    row = torch.arange(8.0)
    assert difference(row.int(), row.int(), row.int()) is None
    assert difference(row.int(), row.int(), row.int() + 1) == "has other elements"
    assert difference(row.bool(), row.bool(), row.bool()) is None
    assert difference(row[:0], row[:0], row[:0]) is None
    assert difference(row, row, row.double()) == "is torch.float64[8] instead of torch.float32[8]"
    assert difference(row, row, row[:7]) == "is torch.float32[7] instead of torch.float32[8]"
    assert "nan" in (difference(row, row, row * float("nan")) or "")
    assert difference(torch.tensor([[1.0]]), torch.tensor([[1.0]]), torch.tensor([[1.0]])) is None
    assert difference(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0)) is None
    assert difference(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.1)) is not None


def test_infinite_elements_must_be_equal() -> None:
    """Scores of experts that are left out are infinite; the others of their row are compared."""
    row = torch.tensor([[1.0, -math.inf, 2.0, math.inf, 3.0, 4.0, 5.0, 6.0]])
    assert difference(row, row, row.clone()) is None
    for place, value in ((1, math.inf), (1, 0.0), (1, math.nan), (2, -math.inf), (2, 2.1)):
        found = row.clone()
        found[0, place] = value
        assert difference(row, row, found) is not None


def test_codes_of_eight_bits_must_be_equal() -> None:
    codes = torch.randn(2, 8).to(torch.float8_e4m3fn)
    other = codes.clone()
    other.view(torch.uint8)[1, 3] ^= 1
    assert difference(codes, codes, codes) is None
    assert difference(codes, codes, other) == "has other elements"
