"""LayerNorms on graphs built by hand: which one kernel computes, with a sum or alone, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_cases import count, graph_of, random_tensors, rewrite, targets

from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.norm.layer_norm import LayerNorm
from compiled_engine.passes.norm.residual_rms_norm import ResidualRMSNorm
from compiled_engine.passes.norm.rms_norm import RMSNorm

aten = torch.ops.aten
ours = torch.ops.compiled_engine


HIDDEN = (24,)


def deviation_norm(squared: str) -> Callable[..., torch.Tensor]:
    """LayerNorm without a bias, or what divides by the root of other squares."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        squares = (centred if squared == "deviation" else x).pow(2)
        return centred * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6) * weight

    return norm


@pytest.mark.parametrize(("squared", "matches"), [("deviation", 1), ("value", 0)])
def test_a_layer_norm_divides_by_the_root_of_squared_deviations(squared: str, matches: int) -> None:
    module = graph_of(deviation_norm(squared), random_tensors(x=(5, 24)), random_tensors(weight=(24,)))
    result = rewrite(LayerNorm(), module)
    assert (result.matches, len(result.near_misses)) == (matches, 1 - matches)


def deviation_norm_with(change: str) -> Callable[..., torch.Tensor]:
    """A norm, written out as Cohere's, that looks like a LayerNorm, but for one thing."""

    def mean(value: torch.Tensor) -> torch.Tensor:
        return value.mean([-1, 0] if change == "means over tokens too" else -1, keepdim=True)

    def function(x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x if change == "narrow" else x.float()
        of_other = mean(other.float())
        centred = torch.sub(wide, mean(wide), alpha=2 if change == "twice the mean" else 1)
        squared = wide - of_other if change == "squares from another mean" else centred
        if change == "from another mean":
            centred = wide - of_other
        squares = squared.pow(3 if change == "cubes" else 2)
        shifted = torch.add(mean(squares), 1e-6, alpha=3 if change == "alpha" else 1)
        scaled = centred * torch.rsqrt(shifted)
        if change == "rounded before the weight":
            return scaled.to(x.dtype) * weight
        if change == "a weight that is computed":
            weight = weight * weight
        normed = scaled * (weight if change == "narrow" else weight.float())
        return normed if change == "not rounded" else normed.to(x.dtype)

    return function


@pytest.mark.parametrize(
    ("change", "weight", "matches"),
    [
        ("", torch.empty(HIDDEN, dtype=torch.bfloat16), 1),
        *(
            (change, torch.empty(HIDDEN, dtype=torch.bfloat16), 0)
            for change in (
                *("narrow", "twice the mean", "from another mean", "squares from another mean", "cubes", "alpha"),
                *("means over tokens too", "rounded before the weight", "not rounded", "a weight that is computed"),
            )
        ),
        ("another dtype of the weight", torch.empty(HIDDEN), 0),
        ("another shape of the weight", torch.empty(1, dtype=torch.bfloat16), 0),
        ("another shape of the weight", torch.empty(5, 24, dtype=torch.bfloat16), 0),
    ],
)
def test_what_only_looks_like_a_layer_norm_written_out_is_a_near_miss(
    change: str, weight: torch.Tensor, matches: int
) -> None:
    inputs = random_tensors(torch.bfloat16, x=(5, 24), other=(5, 24))
    module = graph_of(deviation_norm_with(change), inputs, {"weight": weight})
    module.graph.eliminate_dead_code()
    result = rewrite(LayerNorm(), module)
    assert (result.matches, len(result.near_misses)) == (matches, 1 - matches)


@pytest.mark.parametrize("written_out", [False, True])
def test_a_layer_norm_of_heads_stays(written_out: bool) -> None:
    """The kernel has a program for each token."""
    norm = deviation_norm("deviation")
    if not written_out:
        norm = lambda x, weight: torch.nn.functional.layer_norm(x, weight.shape, weight)  # noqa: E731
    module = graph_of(norm, random_tensors(x=(5, 2, 12)), random_tensors(weight=(12,)))
    module.graph.eliminate_dead_code()
    before = targets(module)
    assert LayerNorm().contract(module.graph, CompileRange(1, 8)) == 0
    result = rewrite(LayerNorm(), module)
    assert (result.matches, result.near_misses, targets(module)) == (0, (), before)


def with_computed(name: str) -> Callable[..., torch.Tensor]:
    """A LayerNorm whose weight or bias is no parameter."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        given = {"weight": weight, "bias": weight} | {name: weight * 2}
        return torch.nn.functional.layer_norm(x, weight.shape, given["weight"], given["bias"])

    return norm


def of_another_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.bfloat16(), weight.shape, weight)


def with_its_mean(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return aten.native_layer_norm.default(x, weight.shape, weight, None, 1e-6)[:2]


@pytest.mark.parametrize(
    ("function", "shape", "reason"),
    [
        (lambda x, weight: torch.nn.functional.layer_norm(x, x.shape, weight), (5, 24), "not over the last dimension"),
        (of_another_dtype, (24,), "its weight or bias is not a parameter of its dtype"),
        (with_its_mean, (24,), "its mean or its deviation is read too"),
        (with_computed("weight"), (24,), "its weight or bias is not a parameter of its dtype"),
        (with_computed("bias"), (24,), "its weight or bias is not a parameter of its dtype"),
    ],
    ids=["two dimensions", "dtype", "mean", "computed weight", "computed bias"],
)
def test_what_only_looks_like_a_layer_norm_is_a_near_miss(
    function: Callable[..., object], shape: tuple[int, ...], reason: str
) -> None:
    module = graph_of(function, random_tensors(x=(5, 24)), random_tensors(weight=shape))
    module.graph.eliminate_dead_code()
    result = rewrite(LayerNorm(), module)
    assert (result.matches, len(result.near_misses)) == (0, 1)
    assert reason in result.near_misses[0]


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize(
    ("change", "x_shape", "residual", "is_residual"),
    [
        ("", (5, 24), torch.empty(5, 24, dtype=torch.bfloat16), True),
        ("twice the addend", (5, 24), torch.empty(5, 24, dtype=torch.bfloat16), False),
        ("a constant", (5, 24), torch.empty(5, 24, dtype=torch.bfloat16), False),
        ("", (5, 24), torch.empty(24, dtype=torch.bfloat16), False),
        ("", (24,), torch.empty(5, 24, dtype=torch.bfloat16), False),
        ("", (5, 1), torch.empty(5, 24, dtype=torch.bfloat16), False),
        ("", (5, 24), torch.empty(5, 24), False),
    ],
)
def test_a_layer_norm_takes_in_only_the_sum_of_two_of_its_shape_and_dtype(
    change: str, x_shape: tuple[int, ...], residual: torch.Tensor, is_residual: bool, written_out: bool
) -> None:
    """Its kernel reads a row of both for each token."""

    def norm_of_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = torch.add(x, residual, alpha=2 if change == "twice the addend" else 1)
        if change == "a constant":
            total = x + 0.5
        if not written_out:
            return torch.nn.functional.layer_norm(total, weight.shape, weight)
        return deviation_norm("deviation")(total.float(), weight.float()).to(weight.dtype)

    inputs = random_tensors(torch.bfloat16, x=x_shape) | {"residual": residual}
    module = graph_of(norm_of_sum, inputs, {"weight": torch.empty(HIDDEN, dtype=residual.dtype)})
    module.graph.eliminate_dead_code()
    assert rewrite(LayerNorm(), module).matches == 1
    (fused,) = module.graph.find_nodes(op="call_function", target=ours.layer_norm.default)
    assert (fused.args[1] is not None) == is_residual
    assert count(module, aten.add.Tensor) == (0 if is_residual else 1)


def wide_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """LayerNorm as Cohere's code computes it."""
    return deviation_norm("deviation")(x.float(), weight.float()).to(x.dtype)


def native_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, eps=1e-6)


@pytest.mark.parametrize("layer_norm", [wide_norm, native_norm])
def test_a_layer_norm_is_no_rms_norm(layer_norm: Callable[..., torch.Tensor]) -> None:
    """Neither alone nor as what is added before an RMSNorm."""

    def function(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, inner: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        total = residual + layer_norm(x, inner)
        wide = total.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype), total

    weights = random_tensors(torch.bfloat16, weight=HIDDEN, inner=HIDDEN)
    alone = graph_of(layer_norm, random_tensors(torch.bfloat16, x=(5, 24)), {"weight": weights["weight"]})
    alone.graph.eliminate_dead_code()
    before = targets(alone)
    result = rewrite(RMSNorm(), alone)
    assert (result.matches, result.near_misses, targets(alone)) == (0, (), before)
    added = graph_of(function, random_tensors(torch.bfloat16, x=(5, 24), residual=(5, 24)), weights)
    assert rewrite(ResidualRMSNorm(), added).matches == 1
    (fused,) = added.graph.find_nodes(op="call_function", target=ours.residual_rms_norm.default)
    assert fused.args[-1] is None
    assert rewrite(LayerNorm(), added).matches == 1
