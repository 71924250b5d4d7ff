"""Each pass on a graph built by hand: what it rewrites, what it leaves alone and why, and that values stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_engine.passes.expand_references import expand_references
from compiled_engine.passes.graph_inputs import Source, parameter_layout
from compiled_engine.passes.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.manager import PASS_NAMES, ContractError, run_passes
from compiled_engine.passes.merge_linears import MergeLinears
from compiled_engine.passes.residual_rms_norm import ResidualRMSNorm
from compiled_engine.passes.silu_mul import SiluMul

Tensors = dict[str, torch.Tensor]


def graph_of(function: Callable[..., object], arguments: Tensors, parameters: Tensors) -> fx.GraphModule:
    """The ATen graph of function(**arguments, **parameters), with sources as the trace gives them."""
    inputs = arguments | parameters
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in inputs.values()]
        module = make_fx(lambda *values: function(**dict(zip(inputs, values, strict=True))))(*fakes)
    for node, name in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["source"] = Source("parameter" if name in parameters else "argument", name)
    return module


def run(module: fx.GraphModule, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """Execute a rewritten graph, packing parameters as the layout says."""
    packed = {p.name: torch.cat([inputs[m] for m in p.members]) for p in parameter_layout(module.graph).packed}
    module.recompile()
    values = [(inputs | packed)[n.meta["source"].name] for n in module.graph.find_nodes(op="placeholder")]
    return module(*values)


def rewrite(graph_pass: GraphPass, module: fx.GraphModule) -> PassResult:
    result = graph_pass.run(module.graph)
    module.graph.lint()
    return result


def count(module: fx.GraphModule, target: Callable[..., object]) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


def random_tensors(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


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
    assert rewrite(MergeLinears(), module) == PassResult(1)
    assert count(module, torch.ops.aten.mm.default) + count(module, torch.ops.aten.addmm.default) == 1
    layout = parameter_layout(module.graph)
    assert layout.packed[0].members == ("layer.q", "layer.k", "layer.v")
    assert layout.packed[0].name == "layer.{q,k,v}"
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
    assert rewrite(MergeLinears(), module) == PassResult(0)


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
    assert rewrite(ResidualRMSNorm(), module) == PassResult(1)
    fused = module.graph.find_nodes(op="call_function", target=torch.ops.compiled_engine.residual_rms_norm.default)
    assert fused[0].args[3] == eps
    assert count(module, torch.ops.aten.rsqrt.default) == 0
    for got, expected in zip(run(module, inputs | weight), function(**inputs, **weight), strict=True):
        assert torch.equal(got, expected)


def test_a_norm_without_a_residual_stays() -> None:
    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    module = graph_of(plain, random_tensors(x=(5, 24)), random_tensors(weight=(24,)))
    assert rewrite(ResidualRMSNorm(), module) == PassResult(0)


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
    assert rewrite(MergeLinears(), module) == PassResult(1)
    assert rewrite(SiluMul(), module) == PassResult(1)
    (got,) = run(module, arguments | parameters)
    torch.testing.assert_close(got, swiglu(**arguments, **parameters)[0])


def test_silu_mul_without_merged_linears_is_a_near_miss() -> None:
    module = graph_of(swiglu, random_tensors(x=(5, 8)), random_tensors(gate=(12, 8), up=(12, 8)))
    result = rewrite(SiluMul(), module)
    assert result.matches == 0
    assert "merge_linears" in result.near_misses[0]


def test_up_before_gate_is_not_silu_mul() -> None:
    def swapped(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        first, second = x @ gate.t(), x @ up.t()
        return first * torch.nn.functional.silu(second)

    module = graph_of(swapped, random_tensors(x=(5, 8)), random_tensors(gate=(12, 8), up=(12, 8)))
    assert rewrite(MergeLinears(), module) == PassResult(1)
    assert rewrite(SiluMul(), module).matches == 0


def test_expanded_references_give_the_same_values() -> None:
    arguments, parameters = random_tensors(x=(5, 8)), random_tensors(gate=(12, 8), up=(12, 8))
    module = graph_of(swiglu, arguments, parameters)
    run_passes(module.graph, PASS_NAMES, CompileRange(1, 64), "cpu", num_layers=1)
    expanded = expand_references(module)
    assert count(expanded, torch.ops.compiled_engine.silu_mul.default) == 0
    (got,) = run(expanded, arguments | parameters)
    torch.testing.assert_close(got, swiglu(**arguments, **parameters)[0])


def test_strict_mode_names_the_pass_below_its_contract() -> None:
    module = graph_of(swiglu, random_tensors(x=(5, 8)), random_tensors(gate=(12, 8), up=(12, 8)))
    with pytest.raises(ContractError, match=r"merge_linears matched 1 times, its contract is 2"):
        run_passes(module.graph, PASS_NAMES, CompileRange(1, 64), "cpu", num_layers=1, strict=True)


def test_disabled_passes_do_not_run() -> None:
    module = graph_of(swiglu, random_tensors(x=(5, 8)), random_tensors(gate=(12, 8), up=(12, 8)))
    reports = run_passes(module.graph, ("silu_mul",), CompileRange(1, 64), "cpu", num_layers=1)
    assert [report.name for report in reports] == ["silu_mul"]
    assert count(module, torch.ops.aten.mm.default) == 2


def rms_norm_with(change: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A norm of a sum that looks like the textbook's, but for one thing."""

    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = residual + x
        wide = total if change == "narrow" else total.float()
        squares = wide.pow(2).mean(-1, keepdim=True)
        shifted = torch.add(squares, 1e-5, alpha=3) if change == "alpha" else squares + 1e-5
        normed = (wide * torch.rsqrt(shifted)).to(total.dtype)
        return weight * normed, total

    return function


@pytest.mark.parametrize(
    ("change", "dtype", "weight_shape"),
    [
        ("narrow", torch.bfloat16, (24,)),
        ("alpha", torch.float32, (24,)),
        ("shape", torch.float32, (1,)),
        ("shape", torch.float32, (5, 24)),
    ],
)
def test_what_only_looks_like_a_residual_norm_is_a_near_miss(
    change: str, dtype: torch.dtype, weight_shape: tuple[int, ...]
) -> None:
    inputs = random_tensors(dtype, x=(5, 24), residual=(5, 24))
    module = graph_of(rms_norm_with(change), inputs, random_tensors(dtype, weight=weight_shape))
    result = rewrite(ResidualRMSNorm(), module)
    assert result.matches == 0
    assert len(result.near_misses) == 1


def test_halves_of_the_rows_are_not_silu_mul() -> None:
    def by_rows(x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.split(x, [3, 3], dim=0)
        return torch.nn.functional.silu(gate) * up

    module = graph_of(by_rows, random_tensors(x=(6, 8)), {})
    assert rewrite(SiluMul(), module).matches == 0


def test_linears_named_at_different_depths_stay_apart() -> None:
    def experts(x: torch.Tensor, **parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x @ weight.t() for weight in parameters.values())

    weights = random_tensors(**{"mlp.gate": (4, 8), "mlp.experts.0.up": (4, 8)})
    result = rewrite(MergeLinears(), graph_of(experts, random_tensors(x=(5, 8)), weights))
    assert result.matches == 0
    assert "depth" in result.near_misses[0]
