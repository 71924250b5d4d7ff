"""The pass merge_linears: quantised linears, gates and their ups, views of results, and what keeps linears apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pass_cases import SMALL, Tensors, count, graph_of, packed_parameters, random_tensors, rewrite, run, targets
from torch import fx

from compiled_engine.passes.framework.graph_inputs import parameter_of
from compiled_engine.passes.framework.matching import named
from compiled_engine.passes.framework.parameter import compute, made
from compiled_engine.passes.framework.rounding import weight_codes, weight_scales
from compiled_engine.passes.linear.linears import linear_of
from compiled_engine.passes.linear.merge_linears import MergeLinears
from compiled_engine.passes.linear.quantised_linear_op import quantised_linear

aten = torch.ops.aten
NAMES = ("layer.q", "layer.k", "layer.v")
SIZES = {"layer.q": 12, "layer.k": 4, "layer.v": 8}
K = 8


def quantised_weights(schemes: dict[str, str], **more: Tensors) -> Tensors:
    found: Tensors = {}
    for name, scheme in schemes.items():
        weight = random_tensors(**{name: (SIZES[name], K)})[name]
        found |= {f"{name}.codes": weight_codes(weight, scheme), f"{name}.scales": weight_scales(weight, scheme)}
        found |= {f"{name}.bias": torch.arange(float(SIZES[name]))} if more.get("bias") else {}
        found |= {f"{name}.input_scale": torch.tensor([0.02])} if "static" in scheme else {}
    return found


def linears(schemes: dict[str, str]) -> Callable[..., tuple[torch.Tensor, ...]]:
    def function(x: torch.Tensor, **p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.ops.compiled_engine.quantised_linear(
                x, p[f"{n}.codes"], p[f"{n}.scales"], None, p.get(f"{n}.input_scale"), p.get(f"{n}.bias"), scheme
            )
            for n, scheme in schemes.items()
        )

    return function


def merged(schemes: dict[str, str], bias: bool = False) -> tuple[fx.GraphModule, Any, Tensors]:
    inputs, weights = random_tensors(x=(5, K)), quantised_weights(schemes, bias={"": torch.empty(0)} if bias else {})
    module = graph_of(linears(schemes), inputs, weights)
    return module, rewrite(MergeLinears(), module), inputs | weights


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("tiles", "together"),
    [
        (("1x*", "1x*", "1x*"), "1x*"),
        (("4x4", "4x4", "4x4"), "4x4"),
        (("4x4", "2x4", "8x4"), "2x4"),  # scales of larger tiles are repeated
        (("6x*", "4x*", "4x*"), "2x*"),
    ],
)
@pytest.mark.parametrize("inputs", ["e4m3 1x*", "e4m3 1x4", "e4m3 static", ""])
def test_quantised_linears_are_merged_without_another_rounding(
    tiles: tuple[str, ...], together: str, inputs: str, bias: bool
) -> None:
    schemes = {
        name: f"e4m3 {tile}" + (f", inputs {inputs}" if inputs else "") for name, tile in zip(NAMES, tiles, strict=True)
    }
    module, result, given = merged(schemes, bias)
    assert (result.matches, result.near_misses, len(result.replacements)) == (1, (), 3)
    (call,) = module.graph.find_nodes(op="call_function", target=quantised_linear)
    assert named(call)["scheme"] == f"e4m3 {together}" + (f", inputs {inputs}" if inputs else "")
    linear = linear_of(call)
    assert linear is not None
    for node in linear.parameters:
        parameter = parameter_of(node)
        value = compute(parameter, lambda leaf: given[leaf.name])
        assert value.shape == parameter.shape == node.meta["val"].shape
        assert value.dtype == parameter.torch_dtype == node.meta["val"].dtype
    for got, expected in zip(run(module, given), linears(schemes)(**given), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_static_scales_of_inputs_that_differ_are_an_error_when_they_are_read() -> None:
    module, _, given = merged(dict.fromkeys(NAMES, "e4m3 1x*, inputs e4m3 static"))
    with pytest.raises(ValueError, match=r"inputs of layer.\{q,k,v\}.input_scale are .* they can be merged where"):
        run(module, given | {"layer.k.input_scale": torch.tensor([0.03])})


def test_linears_of_different_schemes_merge_with_their_like() -> None:
    """It is no match, since the group is not one linear."""
    other = "e4m3 1x4, inputs e4m3 1x4"
    schemes = {"layer.q": "e4m3 1x*", "layer.k": other, "layer.v": other}
    module, result, given = merged(schemes)
    names = "layer.q.codes, layer.k.codes, layer.v.codes"
    assert (result.matches, result.near_misses) == (0, (f"{names}: their schemes differ",))
    assert count(module, quantised_linear) == 2
    assert len(result.replacements) == 2
    for got, expected in zip(run(module, given), linears(schemes)(**given), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def parallel_block(activation: Callable[[torch.Tensor], torch.Tensor], swapped: bool) -> Callable[..., Any]:
    def function(x: torch.Tensor, **p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, up, gate = (x @ p[name].t() for name in ("layer.q", "layer.k", "layer.up", "layer.gate"))
        active = activation(gate)
        return q, (up * active if swapped else active * up), k

    return function


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("activation", [torch.nn.functional.silu, torch.nn.functional.gelu])
def test_a_gate_and_its_up_are_apart_from_others_of_their_input(activation: Any, swapped: bool) -> None:
    """So that they are the halves of one linear."""
    weights = random_tensors(**{f"layer.{name}": (12, 8) for name in ("q", "k", "up", "gate")})
    inputs, function = random_tensors(x=(5, 8)), parallel_block(activation, swapped)
    module = graph_of(function, inputs, weights)
    result = rewrite(MergeLinears(), module)
    assert (result.matches, result.near_misses) == (1, ())
    assert {each.name for each in packed_parameters(module)} == {"layer.{q,k}", "layer.{up,gate}"}
    for got, expected in zip(run(module, inputs | weights), function(**inputs, **weights), strict=True):
        torch.testing.assert_close(got, expected)


def test_one_other_linear_beside_a_gate_and_its_up_stays() -> None:
    def function(x: torch.Tensor, **p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, up, gate = (x @ p[name].t() for name in ("layer.q", "layer.up", "layer.gate"))
        return q, torch.nn.functional.silu(gate) * up

    weights = random_tensors(**{f"layer.{name}": (12, 8) for name in ("q", "up", "gate")})
    inputs = random_tensors(x=(5, 8))
    module = graph_of(function, inputs, weights)
    assert rewrite(MergeLinears(), module).matches == 1
    assert [each.name for each in packed_parameters(module)] == ["layer.{up,gate}"]
    assert count(module, aten.mm.default) == 2


def test_a_relu_is_no_gate() -> None:
    weights = random_tensors(**{f"layer.{name}": (12, 8) for name in ("q", "k", "up", "gate")})
    module = graph_of(parallel_block(torch.relu, False), random_tensors(x=(5, 8)), weights)
    rewrite(MergeLinears(), module)
    assert [each.name for each in packed_parameters(module)] == ["layer.{q,k,up,gate}"]


def test_rows_that_are_viewed_otherwise_are_copied() -> None:
    """Rows of one linear's own result are dense; those of a part of a wider one are not."""

    def function(x: torch.Tensor, **p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = (x @ p[name].t() for name in ("layer.a", "layer.b"))
        heads = first.view(5, 3, 4)
        return heads.view(5, 3, 2, 2), second.view(-1), heads.view(15, 4)

    inputs = random_tensors(x=(5, 8))
    weights = random_tensors(**{"layer.a": (12, 8), "layer.b": (4, 8)})
    module = graph_of(function, inputs, weights)
    assert rewrite(MergeLinears(), module).matches == 1
    assert targets(module).count(aten.reshape.default) == 2
    assert targets(module).count(aten.view.default) == 2
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        assert node.meta["val"].stride(0) == 16
    for got, expected in zip(run(module, inputs | weights), function(**inputs, **weights), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("which", [0, 1])
def test_a_derived_bias_keeps_linears_apart_and_derived_codes_do_not(which: int) -> None:
    """Biases that are derived are computed when they are read; codes are made of weights, which may be packed."""
    linear = torch.nn.functional.linear
    parameters = random_tensors(a=(4, 8), b=(4, 8), c=(4,), d=(4,))
    module = graph_of(lambda x, a, b, c, d: (linear(x, a, c), linear(x, b, d)), random_tensors(x=(5, 8)), parameters)
    bias = next(n for n in module.graph.find_nodes(op="placeholder") if n.meta["source"].name == "cd"[which])
    bias.meta["source"] = made(bias.meta["source"], "mul", 2.0, bias.meta["val"])
    result = rewrite(MergeLinears(), module)
    assert (result.matches, result.near_misses) == (0, ("a, b: a parameter is derived from another",))
    codes = quantised_weights(dict.fromkeys(NAMES, "e4m3 1x*"))
    online = graph_of(linears(dict.fromkeys(NAMES, "e4m3 1x*")), random_tensors(x=(5, 8)), codes)
    for node in online.graph.find_nodes(op="placeholder"):
        if node.meta["source"].name.endswith("codes"):
            source = node.meta["source"]
            node.meta["source"] = replace(source, make=(("codes", "e4m3 1x*"),), members=(replace(source),))
    assert rewrite(MergeLinears(), online).matches == 1


@pytest.mark.parametrize("what", ["codes", "scales", "bias", "input_scale"])
def test_a_parameter_that_something_else_reads_keeps_linears_apart(what: str) -> None:
    schemes = dict.fromkeys(NAMES, "e4m3 1x*, inputs e4m3 static")
    plain = linears(schemes)
    weights = quantised_weights(schemes, bias={"": torch.empty(0)})
    module = graph_of(
        lambda x, **p: (*plain(x, **p), p[f"layer.k.{what}"].float().sum()), random_tensors(x=(5, 8)), weights
    )
    result = rewrite(MergeLinears(), module)
    assert result.matches == 0
    assert result.near_misses[0].endswith(": a parameter is used elsewhere too")
    assert result.replacements == ()


def test_the_contract_counts_values_that_several_matrices_are_multiplied_with() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, **p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = p.values()
        return (x @ a.t(), y @ b.t(), *((x @ c.t(),) if len(x) == 5 else ()))

    weights = random_tensors(**{f"layer.{name}": (4, 8) for name in "abc"})
    for rows, contract in ((5, 1), (3, 0)):
        module = graph_of(function, random_tensors(x=(rows, 8), y=(4, 8)), weights)
        graph_pass = MergeLinears()
        assert graph_pass.contract(module.graph, SMALL) == contract
        assert graph_pass.run(module.graph).matches == contract


@pytest.mark.parametrize(
    ("names", "packed"),
    [
        (("model.0.a.w", "model.0.b.w"), "model.0.{a,b}.w"),
        (("model.0.a.w", "model.0.gate.b.w"), "model.0.{a,gate.b}.w"),
        (("model.model.w", "model.w"), "model.{model,}.w"),
    ],
)
def test_names_are_packed_piece_by_piece(names: tuple[str, ...], packed: str) -> None:
    weights = random_tensors(**dict.fromkeys(names, (4, 8)))
    module = graph_of(lambda x, **p: tuple(x @ w.t() for w in p.values()), random_tensors(x=(5, 8)), weights)
    rewrite(MergeLinears(), module)
    (parameter,) = packed_parameters(module)
    assert parameter.name == packed
