"""Hidden states of chosen layers as outputs: the values are those that the model's layers are called with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pass_cases import (
    CPU,
    DYNAMIC,
    FAMILIES,
    GEMMA2,
    GLM4,
    GPT_OSS,
    QWEN3,
    QWEN3_MOE,
    SMALL,
    STARCODER2,
    Family,
    graph_for,
    run_on,
    traced,
)
from torch import fx, nn

from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.passes.framework.graph_inputs import is_parameter, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.manager import ContractError
from compiled_engine.passes.framework.matching import arg
from compiled_engine.passes.framework.parameter import Parameter, compute
from compiled_engine.passes.framework.random_inputs import RandomInputs
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.layout.aux_hidden_states import AuxHiddenStates
from compiled_engine.passes.layout.layer_inputs import layer_stack
from compiled_engine.passes.registry import registered_passes

NUM_LAYERS, LAYERS, NUM_TOKENS = 3, (2, 0), 7


def graph_with_outputs(family: Family, compile_range: CompileRange, dtype: torch.dtype = torch.float32) -> fx.Graph:
    """The graph after all passes, strictly."""
    graph = graph_for(family, dtype, compile_range, NUM_LAYERS)
    before = len(arg(graph.output_node(), 0))
    passes = (AuxHiddenStates(LAYERS), *registered_passes())
    reports = run_on(graph, compile_range, passes, verify=False)
    assert (reports[0].matches, reports[0].contract) == (len(LAYERS), len(LAYERS))
    assert len(arg(graph.output_node(), 0)) == before + len(LAYERS)
    return graph


def random_inputs(family: Family) -> RandomInputs:
    """The same values each time, which depend on the order in which they are drawn."""
    graph = traced(family, torch.float32, NUM_LAYERS)[1].module.graph
    inputs = RandomInputs(graph, NUM_TOKENS, CPU, 1.0)
    for node in graph.find_nodes(op="placeholder"):
        inputs.of(node)
    return inputs


def executed(graph: fx.Graph, inputs: RandomInputs) -> tuple[torch.Tensor, ...]:
    """The outputs of a graph after its passes, which may have packed parameters."""
    sources = {node: source_of(node) for node in graph.find_nodes(op="placeholder")}
    values = [
        compute(source, inputs.parameter) if isinstance(source, Parameter) and source.members else inputs.of(node)
        for node, source in sources.items()
    ]
    outputs: tuple[torch.Tensor, ...] = fx.GraphModule({}, graph)(*values)
    return outputs


def inputs_of_layers(family: Family, inputs: RandomInputs) -> dict[int, torch.Tensor]:
    """Run the model's own code, and record what each layer is called with."""
    config, graphs = traced(family, torch.float32, NUM_LAYERS)
    model = build_model(replace(config))
    placeholders = graphs.module.graph.find_nodes(op="placeholder")
    for node in filter(is_parameter, placeholders):
        owner, _, name = source_of(node).name.rpartition(".")
        module, value = model.get_submodule(owner), inputs.of(node)
        is_weight = name in dict(module.named_parameters(recurse=False))
        setattr(module, name, nn.Parameter(value, requires_grad=False) if is_weight else value)
    found: dict[int, torch.Tensor] = {}

    def record(layer: int, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        found[layer] = arguments[0].clone()

    for number, layer in enumerate(model.get_submodule("model.layers")):  # type: ignore[arg-type]
        layer.register_forward_pre_hook(partial(record, number))
    tensors = {source_of(node).name: inputs.of(node) for node in placeholders if source_of(node).kind == "argument"}
    with torch.inference_mode():
        model(*graphs.signature.passed(tensors))
    return found


@pytest.mark.product(one_in=10)
@pytest.mark.parametrize("compile_range", [SMALL, DYNAMIC], ids=lambda each: each.name)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_aux_hidden_states_are_what_the_layers_are_called_with(family: Family, compile_range: CompileRange) -> None:
    graph = graph_with_outputs(family, compile_range)
    expected = inputs_of_layers(family, random_inputs(family))
    outputs = executed(graph, random_inputs(family))
    for layer, found in zip(LAYERS, outputs[-len(LAYERS) :], strict=True):
        torch.testing.assert_close(found, expected[layer], rtol=1e-4, atol=1e-4)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("family", [QWEN3, QWEN3_MOE, GEMMA2], ids=str)
def test_aux_hidden_states_in_bfloat16_keep_the_contracts_of_all_passes(family: Family) -> None:
    graph = graph_with_outputs(family, SMALL, torch.bfloat16)
    outputs = arg(graph.output_node(), 0)[-len(LAYERS) :]
    assert {node.meta["val"].dtype for node in outputs} == {torch.bfloat16}


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("family", [GPT_OSS, STARCODER2, GLM4], ids=str)
def test_foreign_models_return_them(family: Family) -> None:
    """Each output enters the first norm of its layer; the first is what the embedding gives."""
    graph = graph_with_outputs(family, DYNAMIC)
    aux_hidden_states = arg(graph.output_node(), 0)[-len(LAYERS) :]
    assert len({*aux_hidden_states}) == len(LAYERS)
    hidden = arg(graph.output_node(), 0)[0].meta["val"]
    assert {tuple(map(str, node.meta["val"].shape)) for node in aux_hidden_states} == {tuple(map(str, hidden.shape))}


def test_the_plan_returns_the_aux_hidden_states() -> None:
    graph = graph_with_outputs(QWEN3, DYNAMIC)
    plan, _ = make_plan(graph, split(graph))
    assert len(plan.outputs) == len(set(plan.outputs)) == 1 + len(LAYERS)


def test_a_layer_that_is_not_there_is_an_error() -> None:
    graph = graph_for(QWEN3, torch.float32, DYNAMIC, NUM_LAYERS)
    outputs = arg(graph.output_node(), 0)
    with pytest.raises(ContractError, match=r"layer 4: no op reads a parameter model.layers.4."):
        run_on(graph, DYNAMIC, (AuxHiddenStates((0, 4)),), verify=False)
    assert arg(graph.output_node(), 0) == outputs


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("family", [QWEN3, GEMMA2, GPT_OSS], ids=str)
def test_the_verifier_finds_an_output_inside_of_a_layer(family: Family) -> None:
    """It accepts the right ones, and nothing else that has their shape."""
    graph = graph_for(family, torch.float32, DYNAMIC, NUM_LAYERS)
    before = list(graph.nodes)
    (report,) = run_on(graph, DYNAMIC, (AuxHiddenStates(LAYERS),), verify=True)
    assert report.matches == len(LAYERS)
    *results, _, last = arg(graph.output_node(), 0)
    inside = before[before.index(last) + 4]
    graph.output_node().args = ((*results, inside, last),)
    graph_pass = AuxHiddenStates((1, 2))
    with pytest.raises(VerificationError, match=rf"layers.1 gets .* and {inside.name} is returned"):
        graph_pass.verify(graph, graph_pass.run(graph_for(family, torch.float32, DYNAMIC, NUM_LAYERS)), DYNAMIC, CPU)


def test_the_stack_of_layers_is_that_with_the_most_numbers() -> None:
    experts = [f"model.layers.{layer}.mlp.experts.{expert}.w" for layer in range(2) for expert in range(9)]
    assert layer_stack([*experts, "model.heads.0.w", "lm_head.weight"]) == "model.layers"
    assert layer_stack(["lm_head.weight"]) == ""
