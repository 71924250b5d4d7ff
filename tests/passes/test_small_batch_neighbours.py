"""What small_batch_linear and gated_linear take in, with its options: norms, sums, activations, also of codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_cases import DYNAMIC, SMALL, Tensors, count, graph_of, random_tensors, rewrite, run, targets
from torch import fx

from compiled_engine.passes.experts.experts_op import experts
from compiled_engine.passes.framework.matching import aten, named
from compiled_engine.passes.framework.rounding import weight_codes, weight_scales
from compiled_engine.passes.linear.gated_linear import GatedLinear, gated_linear
from compiled_engine.passes.linear.quantised_linear_op import quantised_linear
from compiled_engine.passes.linear.silu_mul import SiluMul, silu_mul
from compiled_engine.passes.linear.small_batch_linear import SmallBatchLinear
from compiled_engine.passes.linear.small_batch_linear_op import small_batch_linear
from compiled_engine.passes.norm.residual_rms_norm import residual_rms_norm
from compiled_engine.passes.norm.rms_norm import rms_norm

EPS, OFFSET = 0.3, 0.5
SCHEME = "e4m3 1x*, inputs e4m3 1x*"
Product = Callable[..., torch.Tensor]


def plain(x: torch.Tensor, w: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return torch.nn.functional.linear(x, w[name], w.get(f"{name}_bias"))


def of_codes(x: torch.Tensor, w: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return quantised_linear(x, w[f"{name}_codes"], w[f"{name}_scales"], None, None, w.get(f"{name}_bias"), SCHEME)


def parameters(product: Product, sizes: dict[str, tuple[int, int]], bias: bool) -> Tensors:
    found = random_tensors(**sizes)
    if product is of_codes:
        codes = {f"{name}_codes": weight_codes(weight, SCHEME) for name, weight in found.items()}
        found = codes | {f"{name}_scales": weight_scales(weight, SCHEME) for name, weight in found.items()}
    return found | (random_tensors(**{f"{name}_bias": size[:1] for name, size in sizes.items()}) if bias else {})


def check(
    function: Callable[..., Any], arguments: Tensors, weights: Tensors, graph_pass: Any = None
) -> tuple[fx.GraphModule, Any]:
    """The graph after the pass, which computes the same, and its report."""
    module = graph_of(function, arguments, weights)
    result = rewrite(graph_pass or SmallBatchLinear(), module)
    for got, expected in zip(run(module, arguments | weights), function(**arguments, **weights), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    return module, result


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("product", "op"), [(plain, small_batch_linear), (of_codes, quantised_linear)])
def test_norms_and_sums_with_their_options(product: Product, op: Any, wide: bool, bias: bool) -> None:
    """The first norm is of one value, the second of a sum, which the linear before it adds; the sum goes on."""

    def function(x: torch.Tensor, residual: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = product(rms_norm(x, w["one"], EPS, OFFSET, wide), w, "a")
        normed, total = residual_rms_norm(first, residual, w["two"], 2 * EPS, 2 * OFFSET, wide)
        return product(normed, w, "b"), total

    arguments = random_tensors(x=(5, 8), residual=(5, 12))
    norms = random_tensors(one=(8,), two=(12,))
    module, result = check(function, arguments, norms | parameters(product, {"a": (12, 8), "b": (6, 12)}, bias))
    assert (result.matches, result.near_misses) == (2, ())
    assert targets(module) == [op, op]
    first, second = (named(node) for node in module.graph.find_nodes(op="call_function", target=op))
    assert (first["eps"], first["norm_offset"], first["norm_wide"]) == (EPS, OFFSET, wide)
    assert (second["eps"], second["norm_offset"], second["norm_wide"]) == (2 * EPS, 2 * OFFSET, wide)
    assert len(result.replacements) == 2
    assert [first["residual_TM"] is None, second["residual_TM"] is None] == [False, True]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("product", "op"), [(plain, small_batch_linear), (of_codes, quantised_linear)])
def test_activations(product: Product, op: Any, activation: str) -> None:
    def function(x: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (product(silu_mul(product(x, w, "a"), activation), w, "b"),)

    weights = parameters(product, {"a": (12, 8), "b": (4, 6)}, bias=True)
    module, result = check(function, random_tensors(x=(5, 8)), weights)
    assert (result.matches, targets(module)) == (2, [op, op])
    gated, _ = (named(node) for node in module.graph.find_nodes(op="call_function", target=op))
    assert (gated["silu_mul"], gated["activation"]) == (True, activation)


def test_a_norm_inside_of_the_sum_stays_a_norm() -> None:
    """The linear before it cannot add what it is not the norm of."""

    def function(x: torch.Tensor, residual: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed, total = residual_rms_norm(plain(x, w, "a"), residual, w["two"], EPS, 0.0, False, w["one"])
        return plain(normed, w, "b"), total

    weights = random_tensors(one=(12,), two=(12,)) | parameters(plain, {"a": (12, 8), "b": (6, 12)}, False)
    module, result = check(function, random_tensors(x=(5, 8), residual=(5, 12)), weights)
    assert result.matches == 2
    assert count(module, residual_rms_norm) == 1


@pytest.mark.parametrize("why", ["something else reads it", "it has a norm inside"])
def test_a_norm_that_stays_leaves_others_as_they_are(why: str) -> None:
    def function(x: torch.Tensor, residual: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inner = w["one"] if why == "it has a norm inside" else None
        first, total = residual_rms_norm(plain(x, w, "a"), residual, w["one"], EPS, 0.0, False, inner)
        second, total = residual_rms_norm(plain(first, w, "b"), total, w["two"], EPS)
        return plain(second, w, "c"), total, first if inner is None else total

    sizes = {"a": (12, 8), "b": (12, 12), "c": (6, 12)}
    weights = random_tensors(one=(12,), two=(12,)) | parameters(plain, sizes, False)
    module, result = check(function, random_tensors(x=(5, 8), residual=(5, 12)), weights)
    assert result.matches == 3
    assert count(module, residual_rms_norm) == 1
    assert count(module, small_batch_linear) == 3


def test_a_linear_that_ends_in_an_activation_adds_no_residual() -> None:
    def function(x: torch.Tensor, residual: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gated = silu_mul(plain(x, w, "a"), "silu")
        normed, total = residual_rms_norm(gated, residual, w["one"], EPS)
        return plain(normed, w, "b"), total

    weights = random_tensors(one=(6,)) | parameters(plain, {"a": (12, 8), "b": (4, 6)}, False)
    module, result = check(function, random_tensors(x=(5, 8), residual=(5, 6)), weights)
    assert result.matches == 2
    assert count(module, aten.add.Tensor) == 1


@pytest.mark.parametrize("which", ["x", "residual"])
def test_a_norm_whose_sum_nobody_reads(which: str) -> None:
    """Also where the linear is the second addend: the first is what linears add to."""

    def function(x: torch.Tensor, residual: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = plain(x, w, "a")
        addends = (product, residual) if which == "x" else (residual, product)
        return (plain(residual_rms_norm(*addends, w["one"], EPS)[0], w, "b"),)

    weights = random_tensors(one=(12,)) | parameters(plain, {"a": (12, 8), "b": (6, 12)}, False)
    module, result = check(function, random_tensors(x=(5, 8), residual=(5, 12)), weights)
    assert result.matches == 2
    assert count(module, aten.add.Tensor) == (which == "residual")


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("of_a_sum", [False, True])
def test_experts_take_in_the_norm_before_them_and_the_residual_behind(of_a_sum: bool, wide: bool) -> None:
    """The router reads the same norm."""

    def mixture(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        return experts(x, plain(x, w, "router"), w["gate_up"], w["down"], None, None, 2, True)

    def function(x: torch.Tensor, residual: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if of_a_sum:
            normed, total = residual_rms_norm(plain(x, w, "a"), residual, w["one"], EPS, OFFSET, wide)
        else:
            normed, total = rms_norm(residual, w["one"], EPS, OFFSET, wide), residual
        last, total = residual_rms_norm(mixture(normed, w), total, w["two"], 2 * EPS)
        return plain(last, w, "b"), total

    weights = random_tensors(one=(12,), two=(12,), gate_up=(3, 16, 12), down=(3, 12, 8))
    weights |= parameters(plain, {"a": (12, 8), "b": (6, 12), "router": (3, 12)}, False)
    if not of_a_sum:
        del weights["a"]
    module, result = check(function, random_tensors(x=(5, 8), residual=(5, 12)), weights)
    assert result.matches == 2 + of_a_sum
    assert sorted(map(str, targets(module))) == sorted(map(str, [small_batch_linear] * (2 + of_a_sum) + [experts]))
    (call,) = module.graph.find_nodes(op="call_function", target=experts)
    arguments = named(call)
    assert (arguments["eps"], arguments["norm_offset"], arguments["norm_wide"]) == (EPS, OFFSET, wide)
    assert arguments["norm_weight_D"] is not None
    assert arguments["residual_TD"] is not None
    assert {each.after for each in result.replacements} >= {call}


def test_experts_whose_result_is_read_add_no_residual() -> None:
    def function(x: torch.Tensor, residual: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixed = experts(x, plain(x, w, "router"), w["gate_up"], w["down"], None, None, 2, True)
        last, total = residual_rms_norm(mixed, residual, w["one"], EPS)
        return plain(last, w, "b"), total, mixed.exp()

    weights = random_tensors(one=(12,), gate_up=(3, 16, 12), down=(3, 12, 8))
    weights |= parameters(plain, {"b": (6, 12), "router": (3, 12)}, False)
    module, result = check(function, random_tensors(x=(5, 12), residual=(5, 12)), weights)
    assert result.matches == 2
    (call,) = module.graph.find_nodes(op="call_function", target=experts)
    assert named(call)["residual_TD"] is None
    assert count(module, aten.add.Tensor) == 1


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("product", "op"), [(plain, gated_linear), (of_codes, quantised_linear)])
def test_a_linear_and_its_activation_are_one(product: Product, op: Any, bias: bool, activation: str) -> None:
    def function(x: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (silu_mul(product(x, w, "a"), activation),)

    weights = parameters(product, {"a": (12, 8)}, bias)
    module, result = check(function, random_tensors(x=(5, 8)), weights, GatedLinear())
    assert (result.matches, result.near_misses, targets(module)) == (1, (), [op])
    (call,) = module.graph.find_nodes(op="call_function", target=op)
    assert named(call)["activation"] == activation


def test_a_gated_linear_whose_product_is_read_stays() -> None:
    def function(x: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = plain(x, w, "a")
        return silu_mul(product, "silu"), product

    weights = parameters(plain, {"a": (12, 8)}, False)
    _, result = check(function, random_tensors(x=(5, 8)), weights, GatedLinear())
    assert (result.matches, len(result.near_misses)) == (0, 1)
    assert result.near_misses[0].endswith("the linear's result has other users")
    _, result = check(lambda x: (silu_mul(x, "silu"),), random_tensors(x=(5, 8)), {}, GatedLinear())
    assert result.near_misses[0].endswith("gate and up are not what a linear computes")


@pytest.mark.parametrize(
    ("activate", "name"),
    [
        (torch.nn.functional.silu, "silu"),
        (torch.nn.functional.gelu, "gelu"),
        (lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"), "gelu_tanh"),
    ],
)
@pytest.mark.parametrize("up_first", [False, True])
def test_the_activation_of_halves_has_its_name(activate: Any, name: str, up_first: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = x.chunk(2, -1)
        return (up * activate(gate) if up_first else activate(gate) * up,)

    module, result = check(function, random_tensors(x=(5, 8)), {}, SiluMul())
    assert (result.matches, targets(module)) == (1, [silu_mul])
    (call,) = module.graph.find_nodes(op="call_function", target=silu_mul)
    assert named(call)["activation"] == name


def test_small_batch_and_other_ranges() -> None:
    assert GatedLinear().applicable(DYNAMIC, "cuda") is None
    assert GatedLinear().applicable(SMALL, "cuda") == "1-8 tokens is a small-batch range"
