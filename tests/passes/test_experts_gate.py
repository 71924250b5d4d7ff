"""The gate of experts and the sum over them, on graphs built by hand: what the op computes, and what looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_cases import Tensors, count, graph_of, random_tensors, rewrite, run

from compiled_engine.passes.experts.experts import Experts
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.matching import named

aten = torch.ops.aten
ours = torch.ops.compiled_engine

T, E, D, WIDTH = 5, 6, 8, 4
INPUTS = random_tensors(x=(T, D), other=(E, T, 2 * WIDTH))
PARAMETERS = random_tensors(
    router=(E, D),
    gate_up=(E, 2 * WIDTH, D),
    down=(E, D, WIDTH),
    gate_up_bias=(E, 2 * WIDTH),
    down_bias=(E, D),
    gate_up_t=(E, D, 2 * WIDTH),
    down_t=(E, WIDTH, D),
)


def halves(both: torch.Tensor, other: torch.Tensor, change: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of [E, T, 2 I], but for one thing."""
    match change:
        case "the second half first":
            return both.chunk(2, dim=-1)[::-1]  # type: ignore[return-value]
        case "unequal parts":
            return both[..., : WIDTH + 1].split(WIDTH, dim=-1)  # type: ignore[return-value]
        case "two of three parts":
            return torch.cat((both, both[..., :WIDTH]), -1).chunk(3, dim=-1)[:2]  # type: ignore[return-value]
        case "halves of two products":
            return both.chunk(2, dim=-1)[0], other.chunk(2, dim=-1)[1]
        case "halves of the experts":
            return torch.cat((both[..., :WIDTH],) * 2, 0).chunk(2, dim=0)  # type: ignore[return-value]
        case "columns in turn":
            return both[..., ::2], both[..., 1::2]
        case "columns in turn, up first":
            return both[..., 1::2], both[..., ::2]
        case "the same columns":
            return both[..., ::2], both[..., ::2]
        case "every third column":
            thrice = torch.cat((both, both[..., :WIDTH]), -1)
            return thrice[..., ::3], thrice[..., 1::3]
        case "some columns in turn":
            twice = torch.cat((both, both), -1)
            return twice[..., : 2 * WIDTH : 2], twice[..., 1 : 2 * WIDTH : 2]
        case "columns in turn of two products":
            return both[..., ::2], other[..., 1::2]
        case "tokens in turn":
            doubled = torch.cat((both[..., :WIDTH],) * 2, 1)
            return doubled[:, ::2], doubled[:, 1::2]
    return both.chunk(2, dim=-1)  # type: ignore[return-value]


def clamped(gate: torch.Tensor, up: torch.Tensor, change: str) -> torch.Tensor:
    """The gate of GPT-OSS, but for one thing."""
    limit = 0.7
    gate = gate.clamp(min=-limit if change == "gate clamped below" else None, max=limit)
    if change == "up not clamped below":
        up = up.clamp(max=limit)
    elif change == "another limit of up":
        up = up.clamp(-limit, limit + 1)
    elif change == "another lower limit of up":
        up = up.clamp(-limit - 1, limit)
    elif change != "up not clamped":
        up = up.clamp(-limit, limit)
    if change == "gate not clamped":
        gate = gate * 1.0
    scaled = gate * gate if change == "scaled by itself" else gate * 1.7
    activated = (up if change == "up times sigmoid" else gate) * torch.sigmoid(scaled)
    if change == "tanh":
        activated = gate * torch.tanh(scaled)
    raised = (
        up + 2 if change == "two more" else torch.add(up, 1, alpha=3) if change == "three times one more" else up + 1
    )
    return activated * raised if change == "up behind" else raised * activated


def mixture(gate_change: str = "", limited: str | None = None, change: str = "") -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, other: torch.Tensor, **p: torch.Tensor) -> torch.Tensor:
        shares = torch.softmax(torch.nn.functional.linear(x, p["router"]).float(), -1)
        weights, chosen = shares.topk(2, dim=-1)
        matrix = torch.zeros_like(shares).scatter(-1, chosen, weights).to(x.dtype)
        tokens = x.expand(E, -1, -1)
        if change == "other tokens for each expert":
            tokens = other
        first = p["gate_up_t"] if change == "transposed" else p["gate_up"].transpose(1, 2)
        both = torch.bmm(tokens, first)
        if change == "biases":
            both = both + p["gate_up_bias"].unsqueeze(1)
        if change == "a product that is computed":
            both = both * 2
        gate, up = halves(both, other, gate_change)
        if change in ("gelu", "gelu_tanh"):
            hidden = torch.nn.functional.gelu(gate, approximate="tanh" if change == "gelu_tanh" else "none") * up
        elif change == "relu":
            hidden = torch.relu(gate) * up
        else:
            hidden = torch.nn.functional.silu(gate) * up if limited is None else clamped(gate, up, limited)
        outputs = torch.bmm(hidden, p["down_t"] if change == "transposed" else p["down"].transpose(1, 2))
        if change == "biases":
            outputs = outputs + p["down_bias"].unsqueeze(1)
        if change == "a second product that is computed":
            outputs = outputs * 2
        weighted = outputs * matrix.t().unsqueeze(-1)
        if change == "summed over tokens":
            return weighted.sum(1)
        return weighted.sum(0, keepdim=change == "a sum that is kept")

    return function


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ("silu", 0.0, 0.0, False)),
        ({"gate_change": "columns in turn"}, ("silu", 0.0, 0.0, True)),
        ({"limited": ""}, ("silu", 1.7, 0.7, False)),
        ({"limited": "up behind"}, ("silu", 1.7, 0.7, False)),
        ({"limited": "", "gate_change": "columns in turn"}, ("silu", 1.7, 0.7, True)),
        ({"change": "biases"}, ("silu", 0.0, 0.0, False)),
        ({"change": "biases", "limited": ""}, ("silu", 1.7, 0.7, False)),
        ({"change": "transposed"}, ("silu", 0.0, 0.0, False)),
        ({"change": "gelu"}, ("gelu", 0.0, 0.0, False)),
        ({"change": "gelu_tanh", "gate_change": "columns in turn"}, ("gelu_tanh", 0.0, 0.0, True)),
    ],
)
def test_experts_become_one_op(arguments: dict[str, Any], expected: tuple[object, ...]) -> None:
    function = mixture(**arguments)
    module = graph_of(function, INPUTS, PARAMETERS)
    module.graph.eliminate_dead_code()
    assert Experts().contract(module.graph, CompileRange(T, T)) == 1
    result = rewrite(Experts(), module)
    assert (result.matches, result.near_misses) == (1, ())
    (fused,) = module.graph.find_nodes(op="call_function", target=ours.experts.default)
    given = named(fused)
    assert tuple(given[name] for name in ("activation", "alpha", "limit", "interleaved")) == expected
    assert (given["gate_up_bias_EN"] is not None) == (given["down_bias_ED"] is not None) == ("biases" in str(arguments))
    inputs: Tensors = INPUTS | PARAMETERS
    torch.testing.assert_close(run(module, inputs), function(**inputs), rtol=1e-5, atol=1e-5)
    module.graph.eliminate_dead_code()
    assert count(module, aten.bmm.default) == 0


HALVES = "gate and up are not the two halves of one product"
GATE = "neither silu or gelu(gate) * up nor the gate of clamped values"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        *(
            ({"gate_change": change}, HALVES)
            for change in (
                *("the second half first", "unequal parts", "two of three parts", "halves of two products"),
                *("columns in turn, up first", "the same columns", "some columns in turn"),
                *("every third column", "columns in turn of two products", "halves of the experts", "tokens in turn"),
            )
        ),
        *(
            ({"limited": "", "gate_change": change}, GATE)
            for change in (
                *("the second half first", "halves of two products", "columns in turn, up first", "the same columns"),
                *("columns in turn of two products",),
            )
        ),
        *(
            ({"limited": change}, GATE)
            for change in (
                *("gate clamped below", "up not clamped below", "another limit of up", "another lower limit of up"),
                *("up not clamped", "gate not clamped", "scaled by itself", "up times sigmoid", "tanh", "two more"),
                *("three times one more",),
            )
        ),
        ({"change": "relu"}, GATE),
        ({"change": "other tokens for each expert"}, ""),
        ({"change": "a product that is computed"}, "gate and up are not a product with a parameter of each expert"),
        ({"change": "a second product that is computed"}, "what is weighted is not a product with a parameter of each"),
        ({"change": "summed over tokens"}, "what is weighted is not summed over the experts"),
        ({"change": "a sum that is kept"}, "what is weighted is not summed over the experts"),
    ],
)
def test_what_only_looks_like_experts_is_a_near_miss(arguments: dict[str, Any], reason: str) -> None:
    inputs = INPUTS | random_tensors(other=(E, T, D))
    module = graph_of(mixture(**arguments), inputs, PARAMETERS)
    module.graph.eliminate_dead_code()
    before = str(module.graph)
    result = rewrite(Experts(), module)
    assert (result.matches, len(result.near_misses), str(module.graph)) == (0, 1, before)
    assert reason in result.near_misses[0]
