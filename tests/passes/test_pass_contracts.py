"""Contracts: a pass, or a recogniser, that stops matching falls short of what its contract counts."""

from __future__ import annotations

import pytest
import torch
from changed_passes import Silent
from pass_cases import (
    COHERE,
    CPU,
    DYNAMIC,
    GEMMA2,
    LFM2,
    PERSIMMON,
    QWEN3,
    QWEN3_MOE,
    SMALL,
    STARCODER2,
    Family,
    graph_of,
    random_tensors,
    rewrite,
    run_all,
    traced,
)
from torch import fx

from compiled_engine.passes.framework.manager import ContractError, run_passes
from compiled_engine.passes.framework.op_library import LinearArguments, OpDeclaration, declare_op
from compiled_engine.passes.linear.gated_linear import GatedLinear
from compiled_engine.passes.linear.linears import linear_of, multiplied_values, why_no_linear
from compiled_engine.passes.linear.merge_linears import MergeLinears
from compiled_engine.passes.linear.small_batch_linear import SmallBatchLinear
from compiled_engine.passes.norm.norms import norm_of
from compiled_engine.passes.norm.residual_rms_norm import ResidualRMSNorm
from compiled_engine.passes.norm.rms_norm import RMSNorm
from compiled_engine.passes.registry import passes_of_quantised, registered_passes

aten = torch.ops.aten
OF_RANKS = ("all_reduce_residual_rms_norm", "sequence_parallel")
# `top_k` has no contract: it takes what other passes leave, and only on a GPU.
NOT_HERE = {*OF_RANKS, *passes_of_quantised(), "top_k"}
FAMILIES = {"experts": QWEN3_MOE, "layer_norm": STARCODER2, "gated_convolution": LFM2}


@pytest.mark.parametrize("name", [p.name for p in registered_passes() if p.name not in NOT_HERE])
def test_a_pass_that_stops_matching_is_an_error(name: str) -> None:
    passes = tuple(Silent(p) if p.name == name else p for p in registered_passes())
    compile_range = SMALL if name == "small_batch_linear" else DYNAMIC
    with pytest.raises(ContractError, match=f"pass {name} matched 0 times"):
        run_all(FAMILIES.get(name, QWEN3), torch.float32, compile_range, passes, verify=False)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("family", "summed"), [(QWEN3, 4), (GEMMA2, 0)], ids=str)
def test_passes_of_several_ranks_count_sums(family: Family, summed: int) -> None:
    """A norm of what is added comes between the sum over ranks and the sum with the residual."""
    graph = traced(family, torch.float32)[1].for_range(DYNAMIC).graph
    contracts = [p.contract(graph, DYNAMIC) for p in registered_passes() if p.name in OF_RANKS]
    assert contracts == [summed, 4]


def _opaque_linear(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    return x_TK @ weight_NK.t()


for _name in ("opaque_linear", "blocked_linear"):
    torch.library.custom_op(f"tests::{_name}", mutates_args=())(_opaque_linear).register_fake(
        lambda x, weight: x.new_empty(x.shape[0], weight.shape[0])
    )
declare_op(
    torch.ops.tests.blocked_linear.default, OpDeclaration(linear=LinearArguments("x_TK", "weight_NK", format="blocks"))
)


def two_linears(op: object) -> fx.GraphModule:
    """gate and up of one input, as an op computes them."""
    arguments, weights = random_tensors(x=(5, 8)), random_tensors(**{"layer.gate": (12, 8), "layer.up": (12, 8)})
    return graph_of(lambda x, **w: tuple(op(x, weight) for weight in w.values()), arguments, weights)  # type: ignore[operator]


def test_a_linear_of_an_op_that_nobody_declared_counts() -> None:
    """Contracts count matrices that values are multiplied with, so they notice what `linear_of` does not know."""
    module = two_linears(torch.ops.tests.opaque_linear)
    assert not any(map(linear_of, module.graph.nodes))
    assert list(multiplied_values(module.graph).values()) == [2]
    for graph_pass, contract in ((MergeLinears(), 1), (SmallBatchLinear(), 1)):
        assert graph_pass.contract(module.graph, SMALL) == contract
        with pytest.raises(ContractError, match=f"pass {graph_pass.name} matched 0 times .* its contract is 1"):
            run_passes(module.graph, (graph_pass,), (graph_pass.name,), SMALL, CPU, strict=True)


def test_a_declared_op_is_a_linear_to_every_pass() -> None:
    """Passes that know plain weights alone say so."""
    module = two_linears(torch.ops.tests.blocked_linear)
    linears = [linear for linear in map(linear_of, module.graph.nodes) if linear is not None]
    x, *weights = module.graph.find_nodes(op="placeholder")
    assert [(linear.x, linear.weight, linear.format) for linear in linears] == [(x, w, "blocks") for w in weights]
    merged = rewrite(MergeLinears(), module)
    assert (merged.matches, merged.near_misses) == (0, ("layer.gate, layer.up: their weights are stored as blocks",))
    small = rewrite(SmallBatchLinear(), module)
    assert (small.matches, len(small.near_misses)) == (0, 2)
    assert all("its weight is stored as blocks" in reason for reason in small.near_misses)


def test_an_op_is_declared_once() -> None:
    op = torch.ops.tests.blocked_linear.default
    declare_op(op, OpDeclaration(linear=LinearArguments("x_TK", "weight_NK", format="blocks")))
    with pytest.raises(ValueError, match="allowed: one declaration of an op"):
        declare_op(op, OpDeclaration(direct=True))


def test_a_gate_of_declared_linears_is_not_taken_in() -> None:
    def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.compiled_engine.silu_mul(torch.ops.tests.blocked_linear(x, weight))

    module = graph_of(gated, random_tensors(x=(5, 8)), random_tensors(weight=(12, 8)))
    assert rewrite(GatedLinear(), module).near_misses[0].endswith("its weight is stored as blocks")


@pytest.mark.parametrize("how", ["t", "transpose", "permute"])
def test_a_weight_may_be_transposed_in_any_way(how: str) -> None:
    ways = {"t": lambda w: w.t(), "transpose": lambda w: w.transpose(-2, -1), "permute": lambda w: w.permute(1, 0)}
    module = graph_of(lambda x, w: x @ ways[how](w), random_tensors(x=(5, 8)), random_tensors(w=(12, 8)))
    (product,) = module.graph.find_nodes(op="call_function", target=aten.mm.default)
    linear = linear_of(product)
    assert linear is not None
    assert (linear.x, linear.weight) == tuple(module.graph.find_nodes(op="placeholder"))
    assert why_no_linear(product) is None


def test_what_is_no_linear_counts_for_none() -> None:
    """An embedding reads a matrix, but multiplies nothing with it; a bias of experts is added."""

    def function(x: torch.Tensor, ids: torch.Tensor, table: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.embedding(ids, table) + x)[None] + bias.unsqueeze(1)

    arguments = random_tensors(x=(5, 8)) | {"ids": torch.arange(5)}
    module = graph_of(function, arguments, random_tensors(table=(9, 8), bias=(3, 8)))
    assert not multiplied_values(module.graph)
    assert not any(map(linear_of, module.graph.nodes))


def norm_of_another_root(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Over the largest square, which is no norm that is known."""
    total = x + residual
    return tuple(weight * (y * torch.rsqrt(y.pow(2).amax(-1, keepdim=True) + 1e-6)) for y in (total, x))


def test_a_norm_that_nobody_knows_counts() -> None:
    module = graph_of(norm_of_another_root, random_tensors(x=(5, 8), residual=(5, 8)), random_tensors(weight=(8,)))
    assert not any(map(norm_of, module.graph.nodes))
    for graph_pass in (ResidualRMSNorm(), RMSNorm()):
        assert graph_pass.contract(module.graph, SMALL) == 1
        with pytest.raises(ContractError, match=f"pass {graph_pass.name} matched 0 times"):
            run_passes(module.graph, (graph_pass,), (graph_pass.name,), SMALL, CPU, strict=True)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("family", [QWEN3, STARCODER2, COHERE], ids=str)
def test_norms_are_values(family: Family) -> None:
    """Of ATen, and written out: a LayerNorm says that it is centred."""
    graph = traced(family, torch.bfloat16)[1].for_range(SMALL).graph
    norms = [norm for norm in map(norm_of, graph.nodes) if norm is not None]
    of_tokens = [norm for norm in norms if norm.x.meta["val"].dim() == 2]
    assert len(of_tokens) >= 3  # two layers with at least one each, and the last
    assert {norm.centred for norm in of_tokens} == {family is not QWEN3}
    assert all((norm.bias is not None) == (family is STARCODER2) for norm in of_tokens)


def test_a_layer_norm_of_heads_is_no_part_of_the_rotation() -> None:
    """The op that rotates has RMSNorm; what a LayerNorm gives is rotated as it is."""
    reports = {report.name: report for report in run_all(PERSIMMON, torch.float32, DYNAMIC, verify=False)}
    assert reports["rope_kv_write"].matches == 2
    assert reports["rope_kv_write"].near_misses == ()
