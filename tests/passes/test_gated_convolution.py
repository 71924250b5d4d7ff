"""gated_convolution: which products become part of a convolution, which do not and why; what is left of LFM2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_cases import LFM2, SMALL, count, graph_for, graph_of, random_tensors, rewrite, run, run_on

from compiled_engine.graphs.compiler.direct_piece import is_direct
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.passes.framework.matching import aten, named
from compiled_engine.passes.recurrence.gated_convolution import GatedConvolution
from compiled_engine.passes.registry import registered_passes
from compiled_engine.recurrence.op import CONV_STATE

SEQUENCES = {"rows": torch.tensor([2, 0]), "starts": torch.tensor([0, 1, 5]), "lens": torch.tensor([3, 4])}
SEQUENCES["host"] = torch.tensor([1, 4, 4])
Function = Callable[..., tuple[torch.Tensor, ...]]


def convolved(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, **sequences: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    CONV_STATE(x, weight, None, "", None, None, state, out, *sequences.values())
    return out


def check(function: Function, matches: int, reason: str = "") -> torch.fx.GraphModule:
    """Rewrite the function's graph, as often as the contract says, and compare what both compute."""
    tensors = random_tensors(a=(5, 8), b=(5, 8), c=(5, 8), weight=(8, 3), state=(3, 8, 2))
    inputs = tensors | {name: each.int() for name, each in SEQUENCES.items()}
    module = graph_of(function, inputs, {})
    contract = GatedConvolution().contract(module.graph, SMALL)
    result = rewrite(GatedConvolution(), module)
    assert contract == matches
    assert (result.matches, len(result.near_misses)) == (matches, bool(reason))
    assert all(reason in each for each in result.near_misses)
    found = {name: each.clone() for name, each in inputs.items()}
    for got, expected in zip(run(module, found), function(**inputs), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(found["state"], inputs["state"])
    return module


@pytest.mark.parametrize("which", ["factor", "gate", "factor and gate"])
def test_products_become_part_of_the_convolution(which: str) -> None:
    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = convolved(a * b if "factor" in which else a, **others)
        return (c * y if "gate" in which else y + c,)

    module = check(function, 1)
    assert count(module, aten.mul.Tensor) == 0
    (call,) = map(named, module.graph.find_nodes(op="call_function", target=CONV_STATE))
    assert [name for name in ("factor", "gate") if call[f"{name}_TD"] is not None] == which.split(" and ")


def neither(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (convolved(a + b, **others) + c,)


def input_read(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = a * b
    return convolved(x, **others) + c, x.exp()


def result_read(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = convolved(a + b, **others)
    return y * c, y.exp()


def later_gate(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (convolved(a + b, **others) * c.exp(),)


def square(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = convolved(a + b, **others)
    return (y * y + c,)


def column(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (convolved(a * b[:, :1], **others) + c,)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (neither, ""),
        (input_read, "its input is read elsewhere too"),
        (result_read, "its result is read elsewhere too"),
        (later_gate, "its gate is computed after it"),
        (square, "its gate is computed after it"),
        (column, "its factors differ in shape or dtype"),
    ],
    ids=["neither", "input read", "result read", "later gate", "square", "column"],
)
def test_other_products_stay(function: Function, reason: str) -> None:
    check(function, 0, reason)


@pytest.mark.usefixtures("one_thread")
def test_no_piece_of_lfm2_needs_a_compiler() -> None:
    """Neither sums, which linears add, nor products are left."""
    graph = graph_for(LFM2, torch.bfloat16, SMALL)
    reports = {report.name: report for report in run_on(graph, SMALL, registered_passes())}
    assert reports["gated_convolution"].matches == reports["gated_convolution"].verified == 1
    _, pieces = make_plan(graph, split(graph), ())
    assert pieces
    assert all(map(is_direct, pieces.values()))
