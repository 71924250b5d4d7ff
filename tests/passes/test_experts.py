"""Mixtures of experts: which routers and gates the kernel computes, and that others keep their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pass_cases import CPU, GLM4_MOE, GPT_OSS, QWEN3_MOE, Family, graph_of, random_tensors, rewrite, traced
from torch import fx

from compiled_engine.config import ExpertsConfig
from compiled_engine.passes.experts.experts import Experts
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.manager import run_passes
from compiled_engine.passes.framework.matching import named
from compiled_engine.passes.layout.lowering import lower
from compiled_engine.passes.registry import registered_passes

aten = torch.ops.aten
ours = torch.ops.compiled_engine


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("family", [GPT_OSS, GLM4_MOE], ids=str)
def test_a_router_may_take_the_smallest(family: Family) -> None:
    """The routing is taken into the kernel only where the kernel chooses as the router does."""
    compile_range = CompileRange(1, 64)
    graph = traced(family, torch.float32)[1].for_range(compile_range).graph
    lower(graph, compile_range, CPU)
    chosen = graph.find_nodes(op="call_function", target=aten.topk.default)
    for node in chosen:
        node.args = (*node.args[:2], -1, False, *node.args[4:])
    (experts,) = [graph_pass for graph_pass in registered_passes() if graph_pass.name == "experts"]
    assert chosen
    run_passes(graph, (experts,), ["experts"], compile_range, CPU, strict=False, verify=True)


def mixture_with(change: str) -> Callable[..., torch.Tensor]:
    """The textbook's mixture of experts, with a router that differs in one thing."""

    def function(
        x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, other: torch.Tensor
    ) -> torch.Tensor:
        logits = torch.nn.functional.linear(x, router)
        wide = logits if change == "softmax in 16 bits" else logits.float()
        shares = torch.softmax(wide, 0 if change == "softmax over tokens" else -1)
        if change.startswith("choice first"):
            weights, chosen = wide.topk(2, dim=-1)
            weights = other[:, :2].float() if change == "choice first, weights of others" else weights
            weights = torch.softmax(weights, 0 if change == "choice first, softmax over tokens" else -1)
        else:
            weights, chosen = shares.topk(2, dim=-1, largest=change != "the smallest")
        if change == "another's choice":
            chosen = other.topk(2, dim=-1)[1]
        if change == "scaled":
            weights = weights * 2.5
        if change in ("renormalised", "divided by the largest"):
            whole = weights.sum(-1, keepdim=True)
            weights = weights / (whole if change == "renormalised" else weights.amax(-1, keepdim=True))
        if change == "scaled and divided":
            weights = weights * 2.5 / weights.sum(-1, keepdim=True)
        matrix = torch.zeros_like(shares).scatter(-1, chosen, weights).to(x.dtype)
        gate, up = torch.bmm(x.expand(len(down), -1, -1), gate_up.transpose(1, 2)).chunk(2, dim=-1)
        outputs = torch.bmm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2))
        return (outputs * matrix.t().unsqueeze(-1)).sum(0)

    return function


@pytest.mark.parametrize(
    ("change", "is_known", "renormalise"),
    [
        ("", True, False),
        ("renormalised", True, True),
        ("choice first", True, True),
        *(
            (change, False, False)
            for change in (
                *("softmax in 16 bits", "softmax over tokens", "the smallest", "another's choice", "scaled"),
                *("divided by the largest", "scaled and divided"),
                *("choice first, weights of others", "choice first, softmax over tokens"),
            )
        ),
    ],
)
def test_a_router_is_taken_in_only_if_the_kernel_computes_it(change: str, is_known: bool, renormalise: bool) -> None:
    """Of any other the op is given the choice and its weights."""
    parameters = random_tensors(torch.bfloat16, router=(6, 8), gate_up=(6, 32, 8), down=(6, 8, 16))
    module = graph_of(mixture_with(change), random_tensors(torch.bfloat16, x=(5, 8), other=(5, 6)), parameters)
    lower(module.graph, CompileRange(5, 5), CPU)
    result = rewrite(Experts(), module)
    assert (result.matches, result.near_misses) == (1, ())
    (fused,) = module.graph.find_nodes(op="call_function", target=ours.experts.default)
    arguments = named(fused)
    assert (arguments["chosen_TX"] is None, arguments["renormalise"]) == (is_known, renormalise)
    assert arguments["top_k"] == 2


RENORMALISED = replace(QWEN3_MOE, changes=(("experts", ExpertsConfig(4, 2, 32, renormalise=True)),))


def clamped_further_below(node: fx.Node) -> bool:
    if node.target is not aten.clamp.default or node.args[1] is None:
        return False
    node.args = (node.args[0], -0.5, node.args[2])
    return True


def softmax_over_tokens(node: fx.Node) -> bool:
    if node.target is not aten._softmax.default:
        return False
    node.args = (node.args[0], 0, node.args[2])
    return True


def ones_for_the_experts_not_chosen(node: fx.Node) -> bool:
    if node.target is not aten.scatter.src:
        return False
    zeros: Any = node.args[0]
    with node.graph.inserting_before(node):
        ones = node.graph.call_function(aten.add.Tensor, (zeros, 1))
    ones.meta["val"] = zeros.meta["val"]
    node.args = (ones, *node.args[1:])
    return True


def is_clamp_of_gate(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.clamp.default and node.args[1] is None


def gate_clamped_below(node: fx.Node) -> bool:
    if not is_clamp_of_gate(node):
        return False
    node.args = (node.args[0], -0.1, node.args[2])
    return True


def gate_clamped_elsewhere(node: fx.Node) -> bool:
    if not is_clamp_of_gate(node):
        return False
    node.args = (node.args[0], None, 0.1)
    return True


def gate_of_columns_of_up(node: fx.Node) -> bool:
    """The clamp of gate reads every second column from the second on."""
    if not is_clamp_of_gate(node):
        return False
    columns: Any = node.args[0]
    columns.args = (columns.args[0], columns.args[1], 1, *columns.args[3:])
    return True


def is_one_more(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and node.args[1:] == (1,)


def up_and_two(node: fx.Node) -> bool:
    if not is_one_more(node):
        return False
    node.args = (node.args[0], 2)
    return True


def up_and_one_twice(node: fx.Node) -> bool:
    if not is_one_more(node):
        return False
    node.kwargs = {"alpha": 2}
    return True


def sigmoid_of_up(node: fx.Node) -> bool:
    if node.target is not aten.mul.Tensor or not is_clamp_of_gate(node.args[0]) or isinstance(node.args[1], fx.Node):
        return False
    up = next(each for each in node.graph.nodes if each.target is aten.clamp.default and each.args[1] is not None)
    up.append(node)
    node.args = (up, node.args[1])
    return True


def divided_by_sums_over_tokens(node: fx.Node) -> bool:
    if node.target is not aten.sum.dim_IntList or node.args[1:] != ([-1], True):
        return False
    node.args = (node.args[0], [0], True)
    node.meta["val"] = node.args[0].meta["val"].sum(0, keepdim=True)  # type: ignore[union-attr]
    return True


@pytest.mark.parametrize(
    ("family", "change"),
    [
        (GPT_OSS, clamped_further_below),
        (GPT_OSS, gate_clamped_below),
        (GPT_OSS, gate_clamped_elsewhere),
        (GPT_OSS, gate_of_columns_of_up),
        (GPT_OSS, up_and_two),
        (GPT_OSS, up_and_one_twice),
        (GPT_OSS, sigmoid_of_up),
        (GPT_OSS, softmax_over_tokens),
        (GPT_OSS, ones_for_the_experts_not_chosen),
        (QWEN3_MOE, softmax_over_tokens),
        (RENORMALISED, divided_by_sums_over_tokens),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_experts_that_compute_something_else_keep_their_values(
    family: Family, change: Callable[[fx.Node], bool]
) -> None:
    """What the kernel does not compute stays outside of it."""
    compile_range = CompileRange(1, 64)
    graph = traced(family, torch.float32)[1].for_range(compile_range).graph
    lower(graph, compile_range, CPU)
    assert sum(map(change, list(graph.nodes))) > 0
    (experts,) = [graph_pass for graph_pass in registered_passes() if graph_pass.name == "experts"]
    run_passes(graph, (experts,), ["experts"], compile_range, CPU, strict=False, verify=True)
