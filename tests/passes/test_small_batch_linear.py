"""The pass small_batch_linear on graphs built by hand: what each linear takes in, what it leaves alone, and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from pass_cases import DYNAMIC, QWEN3, SMALL, Tensors, count, graph_of, random_tensors, rewrite, run, targets, traced

from compiled_engine.passes.linear.merge_linears import MergeLinears
from compiled_engine.passes.linear.silu_mul import SiluMul
from compiled_engine.passes.linear.small_batch_linear import SmallBatchLinear
from compiled_engine.passes.norm.residual_rms_norm import ResidualRMSNorm
from compiled_engine.passes.norm.rms_norm import RMSNorm

aten = torch.ops.aten
LINEAR = torch.ops.compiled_engine.small_batch_linear.default
BEFORE = (MergeLinears(), ResidualRMSNorm(), RMSNorm(), SiluMul())
linear = torch.nn.functional.linear


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 3e-4)).to(x.dtype)


def plain(x: torch.Tensor, w: torch.Tensor, **others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (linear(x, w, others.get("bias")),)


def normed(x: torch.Tensor, w: torch.Tensor, norm_w: torch.Tensor, **others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (linear(norm(x, norm_w), w, others.get("bias")),)


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, **others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = linear(x, gate, others.get("gate_bias")), linear(x, up, others.get("up_bias"))
    return (torch.nn.functional.silu(first) * second,)


def chain(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, norm_w: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """A linear, a residual sum with its norm, and the linear that reads it; the sum goes on."""
    total = residual + linear(x, w)
    return linear(norm(total, norm_w), last), total


def residual_named_last(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, norm_w: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The same sum as LFM2's code writes it."""
    total = linear(x, w) + residual
    return linear(norm(total, norm_w), last), total


def sum_of_no_linear(
    x: torch.Tensor, residual: torch.Tensor, norm_w: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    total = residual + x
    return linear(norm(total, norm_w), last), total


def norm_read_twice(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, norm_w: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    value = norm(residual + linear(x, w), norm_w)
    return linear(value, last), value.exp()


def linear_read_twice(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, norm_w: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    value = linear(x, w)
    return linear(norm(residual + value, norm_w), last), value.exp()


def tied(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An output head that is the embedding."""
    return (linear(x + torch.nn.functional.embedding(torch.arange(5), w), w),)


X, RESIDUAL = {"x": (5, 8)}, {"residual": (5, 12)}
W, NORM_W, LAST = {"w": (12, 8)}, {"norm_w": (12,)}, {"last": (6, 12)}
GATE_UP = {"gate": (12, 8), "up": (12, 8)}
# name: function, shapes of arguments, shapes of parameters, the calls that are left, what the ops take in.
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], int, list[set[str]]]] = {
    "plain": (plain, X, W, 1, [set()]),
    "bias": (plain, X, W | {"bias": (12,)}, 1, [{"bias"}]),
    "norm": (normed, X, W | {"norm_w": (8,)}, 1, [{"norm"}]),
    "norm and bias": (normed, X, W | {"norm_w": (8,), "bias": (12,)}, 1, [{"norm", "bias"}]),
    "silu mul": (swiglu, X, GATE_UP, 1, [{"silu"}]),
    "silu mul of biases": (swiglu, X, GATE_UP | {"gate_bias": (12,), "up_bias": (12,)}, 1, [{"silu", "bias"}]),
    "residual": (chain, X | RESIDUAL, W | NORM_W | LAST, 2, [{"residual"}, {"norm"}]),
    "a residual named last": (residual_named_last, X | RESIDUAL, W | NORM_W | LAST, 2, [{"residual"}, {"norm"}]),
    "a sum of no linear": (sum_of_no_linear, {"x": (5, 12)} | RESIDUAL, NORM_W | LAST, 2, [{"norm"}]),
    "a tied head": (tied, X, W, 4, [set()]),
    "a norm that something else reads": (norm_read_twice, X | RESIDUAL, W | NORM_W | LAST, 5, [set(), set()]),
    "a linear that something else reads": (linear_read_twice, X | RESIDUAL, W | NORM_W | LAST, 4, [set(), {"norm"}]),
}


def cases() -> Iterator[Any]:
    for (name, case), dtype in product(CASES.items(), (torch.float32, torch.bfloat16)):
        yield pytest.param(*case, dtype, id=f"{name}, {str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("function", "arguments", "parameters", "calls", "taken_in", "dtype"), list(cases()))
def test_what_a_linear_takes_in(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    parameters: dict[str, Any],
    calls: int,
    taken_in: list[set[str]],
    dtype: torch.dtype,
) -> None:
    inputs: Tensors = random_tensors(dtype, **arguments, **parameters)
    module = graph_of(function, {n: inputs[n] for n in arguments}, {n: inputs[n] for n in parameters})
    for graph_pass in BEFORE:
        rewrite(graph_pass, module)
    result = rewrite(SmallBatchLinear(), module)
    assert (result.matches, result.near_misses) == (len(taken_in), ())
    found = []
    for node in module.graph.find_nodes(op="call_function", target=LINEAR):
        _, _, bias, norm_weight, eps, residual, silu_mul, *_ = node.args
        present = {"bias": bias, "norm": norm_weight, "residual": residual, "silu": silu_mul or None}
        found.append({name for name, value in present.items() if value is not None})
        assert eps == (0.0 if norm_weight is None else 3e-4)
    assert found == taken_in
    assert len(targets(module)) == calls
    assert count(module, aten.mm.default) == count(module, aten.addmm.default) == 0
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for got, expected in zip(run(module, inputs), function(**inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def near_misses() -> Iterator[Any]:
    x, y, bias = {"x": (5, 8)}, {"y": (8, 6)}, {"bias": (5, 12)}
    yield pytest.param(lambda x, y: (x @ y,), x | y, {}, "not a transposed parameter", id="no parameter")
    yield pytest.param(lambda x, w: (x @ w,), x, {"w": (8, 6)}, "not a transposed parameter", id="not transposed")
    yield pytest.param(
        lambda x, w, bias: (aten.addmm.default(bias, x, w.t(), beta=2),),
        x,
        W | {"bias": (12,)},
        "beta is 2",
        id="scaled",
    )
    yield pytest.param(
        lambda x, bias, w: (torch.addmm(bias, x, w.t()),), x | bias, W, "not a bias vector", id="not a bias"
    )


@pytest.mark.parametrize(("function", "arguments", "parameters", "reason"), list(near_misses()))
def test_what_is_no_linear_is_a_near_miss(
    function: Callable[..., Any], arguments: dict[str, Any], parameters: dict[str, Any], reason: str
) -> None:
    module = graph_of(function, random_tensors(**arguments), random_tensors(**parameters))
    result = rewrite(SmallBatchLinear(), module)
    assert (result.matches, count(module, LINEAR), len(result.near_misses)) == (0, 0, 1)
    assert reason in result.near_misses[0]


def test_no_norm_and_no_activation_is_left_between_the_linears_of_a_model() -> None:
    _, graphs = traced(QWEN3, torch.bfloat16, num_layers=3)
    module = graphs.for_range(SMALL)
    for graph_pass in (*BEFORE, SmallBatchLinear()):
        rewrite(graph_pass, module)
    names = {getattr(node.target, "__name__", "") for node in module.graph.nodes}
    assert count(module, LINEAR) == 4 * 3 + 1
    assert names.isdisjoint({"mm.default", "addmm.default", "rms_norm.default", "residual_rms_norm.default"})
    assert names.isdisjoint({"silu_mul.default", "silu.default"})


def test_it_applies_to_small_batches_only() -> None:
    assert SmallBatchLinear().applicable(SMALL, "cuda") is None
    assert SmallBatchLinear().applicable(DYNAMIC, "cuda") == "1-256 tokens is not a small-batch range"
