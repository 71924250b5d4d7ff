"""Each pass on a graph built by hand: what it rewrites, what it leaves alone and why, and that values stay.

rope_kv_write has tests of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_cases import (
    count,
    graph_of,
    packed_parameters,
    random_tensors,
    rewrite,
    run,
    targets,
)

from compiled_engine.passes.framework.parameter import made
from compiled_engine.passes.layout.no_op_elimination import NoOpElimination
from compiled_engine.passes.linear.gated_linear import GatedLinear
from compiled_engine.passes.linear.merge_linears import MergeLinears
from compiled_engine.passes.linear.silu_mul import SiluMul
from compiled_engine.passes.linear.small_batch_linear import SmallBatchLinear
from compiled_engine.passes.norm.residual_rms_norm import ResidualRMSNorm
from compiled_engine.passes.norm.rms_norm import RMSNorm
from compiled_engine.passes.rope.expand_references import expand_references

aten = torch.ops.aten
ours = torch.ops.compiled_engine


def qkv(x: torch.Tensor, **parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    linear = torch.nn.functional.linear
    return tuple(linear(x, parameters[n], parameters.get(f"{n}_bias")) for n in ("layer.q", "layer.k", "layer.v"))


@pytest.mark.parametrize("biased", [False, True])
def test_linears_of_one_input_become_one(biased: bool) -> None:
    arguments = random_tensors(x=(5, 8))
    shapes = {"layer.q": (12, 8), "layer.k": (4, 8), "layer.v": (4, 8)}
    if biased:
        shapes |= {"layer.q_bias": (12,), "layer.k_bias": (4,), "layer.v_bias": (4,)}
    parameters = random_tensors(**shapes)
    module = graph_of(qkv, arguments, parameters)
    assert rewrite(MergeLinears(), module).matches == 1
    assert count(module, aten.mm.default) + count(module, aten.addmm.default) == 1
    weight = packed_parameters(module)[0]
    assert [member.name for member in weight.members] == ["layer.q", "layer.k", "layer.v"]
    assert weight.name == "layer.{q,k,v}"
    for got, expected in zip(run(module, arguments | parameters), qkv(**arguments, **parameters), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_weight_used_twice_is_left_alone_and_named() -> None:
    def tied(x: torch.Tensor, embedding: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ embedding.t(), x @ other.t(), embedding.sum()

    module = graph_of(tied, random_tensors(x=(5, 8)), random_tensors(embedding=(6, 8), other=(4, 8)))
    result = rewrite(MergeLinears(), module)
    assert result.matches == 0
    assert "embedding" in result.near_misses[0]
    assert "used elsewhere" in result.near_misses[0]


def test_linears_of_different_inputs_stay_apart() -> None:
    def separate(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ a.t(), y @ b.t()

    module = graph_of(separate, random_tensors(x=(5, 8), y=(5, 8)), random_tensors(a=(4, 8), b=(4, 8)))
    assert rewrite(MergeLinears(), module).matches == 0


def norm_of_sum(eps: float, weight_first: bool = True) -> Callable[..., tuple[torch.Tensor, ...]]:
    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = residual + x
        wide = total.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(total.dtype)
        return (weight * normed if weight_first else normed * weight), total

    return function


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 3.7e-4])
@pytest.mark.parametrize("weight_first", [True, False])
def test_residual_and_norm_become_one(dtype: torch.dtype, eps: float, weight_first: bool) -> None:
    inputs = random_tensors(dtype, x=(5, 24), residual=(5, 24))
    weight = random_tensors(dtype, weight=(24,))
    function = norm_of_sum(eps, weight_first)
    module = graph_of(function, inputs, weight)
    assert rewrite(ResidualRMSNorm(), module).matches == 1
    fused = module.graph.find_nodes(op="call_function", target=ours.residual_rms_norm.default)
    assert fused[0].args[3] == eps
    assert count(module, aten.rsqrt.default) == 0
    for got, expected in zip(run(module, inputs | weight), function(**inputs, **weight), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("inner_eps", "is_fused"), [(1e-5, True), (0.3, False)])
def test_a_norm_of_what_is_added_is_fused_if_it_is_like_that_of_the_sum(inner_eps: float, is_fused: bool) -> None:
    """The fused op has one eps for both."""

    def function(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, inner: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        normed = inner * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + inner_eps))
        return norm_of_sum(1e-5)(normed, residual, weight)

    inputs, weights = random_tensors(x=(5, 24), residual=(5, 24)), random_tensors(weight=(24,), inner=(24,))
    module = graph_of(function, inputs, weights)
    assert rewrite(ResidualRMSNorm(), module).matches == 1
    (fused,) = module.graph.find_nodes(op="call_function", target=ours.residual_rms_norm.default)
    assert (fused.args[-1] is not None) == is_fused
    for got, expected in zip(run(module, inputs | weights), function(**inputs, **weights), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_norm_without_a_residual_stays() -> None:
    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    module = graph_of(plain, random_tensors(x=(5, 24)), random_tensors(weight=(24,)))
    assert rewrite(ResidualRMSNorm(), module).matches == 0


def test_a_norm_without_a_weight_is_a_near_miss() -> None:
    def weightless(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        total = x + residual
        return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)

    module = graph_of(weightless, random_tensors(x=(5, 24), residual=(5, 24)), {})
    result = rewrite(ResidualRMSNorm(), module)
    assert result.matches == 0
    assert "weight" in result.near_misses[0]


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t()),)


def test_silu_mul_reads_the_merged_halves() -> None:
    arguments, parameters = random_tensors(x=(5, 8)), random_tensors(gate=(12, 8), up=(12, 8))
    module = graph_of(swiglu, arguments, parameters)
    assert rewrite(MergeLinears(), module).matches == 1
    assert rewrite(SiluMul(), module).matches == 1
    (got,) = run(module, arguments | parameters)
    torch.testing.assert_close(got, swiglu(**arguments, **parameters)[0])


def test_silu_mul_without_merged_linears_is_a_near_miss() -> None:
    module = graph_of(swiglu, random_tensors(x=(5, 8)), random_tensors(gate=(12, 8), up=(12, 8)))
    result = rewrite(SiluMul(), module)
    assert result.matches == 0
    assert "merge_linears" in result.near_misses[0]


def test_a_silu_that_is_used_elsewhere_is_a_near_miss() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = torch.split(x, [4, 4], dim=1)
        activated = torch.nn.functional.silu(gate)
        return activated * up, activated

    result = rewrite(SiluMul(), graph_of(both, random_tensors(x=(6, 8)), {}))
    assert (result.matches, len(result.near_misses)) == (0, 1)


def test_up_before_gate_is_not_silu_mul() -> None:
    def swapped(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        first, second = x @ gate.t(), x @ up.t()
        return first * torch.nn.functional.silu(second)

    module = graph_of(swapped, random_tensors(x=(5, 8)), random_tensors(gate=(12, 8), up=(12, 8)))
    assert rewrite(MergeLinears(), module).matches == 1
    assert rewrite(SiluMul(), module).matches == 0


def test_expanded_references_give_the_same_values() -> None:
    arguments, parameters = random_tensors(x=(5, 8)), random_tensors(gate=(12, 8), up=(12, 8))
    module = graph_of(swiglu, arguments, parameters)
    for graph_pass in (MergeLinears(), SiluMul(), SmallBatchLinear()):
        assert rewrite(graph_pass, module).matches == 1
    assert count(module, ours.small_batch_linear.default) == 1
    expanded = expand_references(module)
    assert count(expanded, ours.small_batch_linear.default) == 0
    (got,) = run(expanded, arguments | parameters)
    torch.testing.assert_close(got, swiglu(**arguments, **parameters)[0])


def rms_norm_with(change: str, of_a_sum: bool = True) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A norm, of a sum or of x alone, that looks like the textbook's, but for one thing."""

    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = torch.add(residual, x, alpha=2) if change == "twice the addend" else residual + x
        if not of_a_sum:
            total = x
        wide = total if change == "narrow" else total.float()
        squares = wide.pow(3 if change == "cubes" else 2)
        mean = squares.mean([-1, 0] if change == "the mean over tokens too" else -1, keepdim=True)
        shifted = torch.add(mean, 1e-5, alpha=3) if change == "alpha" else mean + 1e-5
        scaled = residual.float() if change == "another value" else wide
        normed = scaled * torch.rsqrt(shifted)
        if change != "not rounded before the weight":
            normed = normed.to(total.dtype)
        if change == "a weight plus a constant, rounded":
            weight = weight + 1.0
        return (weight * weight if change == "a weight that is computed" else weight) * normed, total

    return function


HIDDEN = (24,)


@pytest.mark.parametrize("of_a_sum", [True, False])
@pytest.mark.parametrize(
    ("change", "dtype", "weight"),
    [
        ("narrow", torch.bfloat16, torch.empty(HIDDEN, dtype=torch.bfloat16)),
        ("alpha", torch.float32, torch.empty(HIDDEN)),
        ("cubes", torch.float32, torch.empty(HIDDEN)),
        ("the mean over tokens too", torch.float32, torch.empty(HIDDEN)),
        ("a weight that is computed", torch.float32, torch.empty(HIDDEN)),
        ("a weight plus a constant, rounded", torch.bfloat16, torch.empty(HIDDEN, dtype=torch.bfloat16)),
        ("another value", torch.float32, torch.empty(HIDDEN)),
        ("another value", torch.bfloat16, torch.empty(HIDDEN, dtype=torch.bfloat16)),
        ("another dtype of the weight", torch.bfloat16, torch.empty(HIDDEN)),
        ("another dtype of the weight", torch.float32, torch.empty(HIDDEN, dtype=torch.bfloat16)),
        ("not rounded before the weight", torch.bfloat16, torch.empty(HIDDEN, dtype=torch.bfloat16)),
        ("another shape of the weight", torch.float32, torch.empty(1)),
        ("another shape of the weight", torch.float32, torch.empty(5, 24)),
    ],
)
def test_what_only_looks_like_a_norm_is_a_near_miss(
    change: str, dtype: torch.dtype, weight: torch.Tensor, of_a_sum: bool
) -> None:
    inputs = random_tensors(dtype, x=(5, 24), residual=(5, 24))
    module = graph_of(rms_norm_with(change, of_a_sum), inputs, {"weight": weight})
    result = rewrite(ResidualRMSNorm() if of_a_sum else RMSNorm(), module)
    assert result.matches == 0
    # Where what is scaled is no sum, the pass for sums has nothing to say.
    assert len(result.near_misses) == (0 if of_a_sum and change == "another value" else 1)


@pytest.mark.parametrize(
    ("change", "residual"),
    [
        ("twice the addend", torch.empty(5, 24, dtype=torch.bfloat16)),
        ("an addend of another shape", torch.empty(24, dtype=torch.bfloat16)),
        ("an addend of another dtype", torch.empty(5, 24)),
    ],
)
def test_a_norm_of_what_only_looks_like_a_sum_is_a_near_miss(change: str, residual: torch.Tensor) -> None:
    inputs = random_tensors(torch.bfloat16, x=(5, 24)) | {"residual": residual}
    module = graph_of(rms_norm_with(change), inputs, {"weight": torch.empty(HIDDEN, dtype=residual.dtype)})
    result = rewrite(ResidualRMSNorm(), module)
    assert result.matches == 0
    assert len(result.near_misses) == 1


def gated(x: torch.Tensor, y: torch.Tensor, sizes: list[int], of_two: bool) -> torch.Tensor:
    gate, up = x.split(sizes, dim=1)[:2]
    if of_two:
        up = y.split(sizes, dim=1)[1]
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(("sizes", "of_two"), [([4, 4], True), ([1, 7], False), ([3, 3, 2], False)])
def test_what_only_looks_like_silu_mul_is_a_near_miss(sizes: list[int], of_two: bool) -> None:
    module = graph_of(lambda x, y: gated(x, y, sizes, of_two), random_tensors(x=(6, 8), y=(6, 8)), {})
    result = rewrite(SiluMul(), module)
    assert (result.matches, len(result.near_misses)) == (0, 1)


def test_halves_of_the_rows_are_not_silu_mul() -> None:
    def by_rows(x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.split(x, [3, 3], dim=0)
        return torch.nn.functional.silu(gate) * up

    module = graph_of(by_rows, random_tensors(x=(6, 8)), {})
    assert rewrite(SiluMul(), module).matches == 0


def test_biases_of_only_some_linears_keep_them_apart() -> None:
    def some(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.nn.functional.linear(x, a, bias), x @ b.t()

    parameters = random_tensors(a=(4, 8), b=(4, 8), bias=(4,))
    result = rewrite(MergeLinears(), graph_of(some, random_tensors(x=(5, 8)), parameters))
    assert (result.matches, result.near_misses) == (0, ("a, b: only some have a bias",))


def test_a_transposed_weight_that_is_used_elsewhere_keeps_linears_apart() -> None:
    def shared(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        transposed = b.t()
        return x @ a.t(), x @ transposed, y @ transposed

    inputs, parameters = random_tensors(x=(5, 8), y=(3, 8)), random_tensors(a=(4, 8), b=(4, 8))
    module = graph_of(shared, inputs, parameters)
    result = rewrite(MergeLinears(), module)
    assert (result.matches, result.near_misses) == (0, ("a, b: a transposed weight is used elsewhere too",))
    for got, expected in zip(run(module, inputs | parameters), shared(**inputs, **parameters), strict=True):
        assert torch.equal(got, expected)


def test_a_derived_weight_keeps_linears_apart() -> None:
    """It is computed when the others are read, so it cannot be packed with them."""
    module = graph_of(
        lambda x, a, b: (x @ a.t(), x @ b.t()), random_tensors(x=(5, 8)), random_tensors(a=(4, 8), b=(4, 8))
    )
    (derived,) = [node for node in module.graph.find_nodes(op="placeholder") if node.meta["source"].name == "b"]
    derived.meta["source"] = made(derived.meta["source"], "mul", 2.0, derived.meta["val"])
    result = rewrite(MergeLinears(), module)
    assert (result.matches, result.near_misses) == (0, ("a, b.mul(2.0): a parameter is derived from another",))


def test_scaled_products_and_sums_with_values_are_not_merged() -> None:
    def scaled(x: torch.Tensor, **parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c, d = parameters.values()
        return torch.addmm(c, x, a.t(), beta=2), torch.addmm(d, x, b.t(), alpha=3)

    def of_values(
        x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, **parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        a, b = parameters.values()
        return torch.addmm(y, x, a.t()), torch.addmm(z, x, b.t())

    weights = random_tensors(a=(4, 8), b=(4, 8))
    of_scaled = graph_of(scaled, random_tensors(x=(5, 8)), weights | random_tensors(c=(4,), d=(4,)))
    of_sums = graph_of(of_values, random_tensors(x=(5, 8), y=(5, 4), z=(5, 4)), weights)
    for module in (of_scaled, of_sums):
        assert rewrite(MergeLinears(), module).matches == 0
        assert packed_parameters(module) == []


def outside_of_groups(num_groups: int, num_chosen: int, written: float = 1.0) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that masks all experts that are not in the chosen groups, as routers of transformers do."""

    def masked(x: torch.Tensor) -> torch.Tensor:
        scores = x.view(5, num_groups, -1).topk(2, dim=-1)[0].sum(-1)
        chosen = scores.topk(num_chosen, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(scores).scatter(1, chosen, written)
        mask = mask.unsqueeze(-1).expand(-1, -1, 8 // num_groups).reshape(5, 8)
        return x.masked_fill(~mask.bool(), float("-inf"))

    return masked


NO_OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times one": lambda x: x * 1.0,
    "over one": lambda x: x / 1,
    "to its own dtype": lambda x: aten._to_copy.default(x, dtype=x.dtype),
    "viewed as it is": lambda x: aten.view.default(x, [5, 8]),
    "expanded to its own shape": lambda x: aten.expand.default(x, [5, 8]),
    "masked by nothing": lambda x: x.masked_fill(x.new_zeros(8).bool(), 2.0),
    "masked by not of ones": lambda x: x.masked_fill(torch.full_like(x, True, dtype=torch.bool).logical_not(), 2.0),
    "masked outside of the only group": outside_of_groups(1, 1),
    "masked outside of all groups": outside_of_groups(4, 4),
}
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times two": lambda x: x * 2.0,
    "times a tensor": lambda x: x * torch.ones_like(x),
    "to another dtype": lambda x: x.double(),
    "turned": lambda x: x.t().contiguous(),
    "viewed as another shape": lambda x: x.view(8, 5),
    "made contiguous": lambda x: aten._to_copy.default(x[:, ::2], dtype=x.dtype),
    "negated": lambda x: -x,
    "masked as a whole": lambda x: x.masked_fill(torch.ones_like(x).bool(), 2.0),
    "masked where it is positive": lambda x: x.masked_fill(x > 0, 2.0),
    "masked outside of one group of two": outside_of_groups(2, 1),
    "masked outside of no group, by another constant": outside_of_groups(1, 1, written=0.0),
    "masked by what whole numbers do not have": lambda x: x.masked_fill(
        torch.full_like(x, -1, dtype=torch.uint8).bool(), 2.0
    ),
    "masked to another shape": lambda x: x[:, :1].masked_fill(x.new_zeros(8).bool(), 2.0),
}


@pytest.mark.parametrize("name", NO_OPS)
def test_a_no_op_goes(name: str) -> None:
    x = random_tensors(x=(5, 8))
    module = graph_of(lambda x: (NO_OPS[name](x).exp(),), x, {})
    assert rewrite(NoOpElimination(), module).matches == 1
    assert targets(module) == [aten.exp.default]
    assert torch.equal(run(module, x)[0], x["x"].exp())


@pytest.mark.parametrize("name", OPS)
def test_what_only_looks_like_a_no_op_stays(name: str) -> None:
    module = graph_of(lambda x: (OPS[name](x).exp(),), random_tensors(x=(5, 8)), {})
    module.graph.eliminate_dead_code()
    before = len(module.graph.nodes)
    assert rewrite(NoOpElimination(), module).matches == 0
    assert len(module.graph.nodes) == before


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 3e-5)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_becomes_one(dtype: torch.dtype) -> None:
    inputs, weight = random_tensors(dtype, x=(5, 24)), random_tensors(dtype, weight=(24,))
    module = graph_of(lambda x, weight: (rms_norm(x, weight),), inputs, weight)
    assert rewrite(RMSNorm(), module).matches == 1
    assert targets(module) == [ours.rms_norm.default]
    assert torch.equal(run(module, inputs | weight)[0], rms_norm(**inputs, **weight))


def test_a_norm_of_heads_is_left_to_rope_kv_write() -> None:
    module = graph_of(rms_norm, random_tensors(x=(5, 3, 24)), random_tensors(weight=(24,)))
    assert rewrite(RMSNorm(), module).matches == 0


@pytest.mark.parametrize(("beta", "alpha", "matches"), [(1, 1, 1), (2, 1, 0), (1, 0.5, 0)])
def test_a_scaled_product_is_not_what_a_linear_computes(beta: float, alpha: float, matches: int) -> None:
    def scaled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return ours.silu_mul(torch.addmm(bias, x, weight.t(), beta=beta, alpha=alpha))

    module = graph_of(scaled, random_tensors(x=(5, 8)), random_tensors(weight=(12, 8), bias=(12,)))
    result = rewrite(GatedLinear(), module)
    assert (result.matches, len(result.near_misses)) == (matches, 1 - matches)
