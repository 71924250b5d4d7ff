"""The decoder's graph is cut at the keys and values of cross-attention: both parts together compute the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from speech_models import LENGTH, SIZES, save_config
from torch import fx

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler.build import fuse
from compiled_engine.graphs.compiler.signature import FORWARD, HOISTED, callables_of
from compiled_engine.graphs.compiler.trace import TracedGraph, trace, without_storage
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.options import EngineOptions
from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.manager import ContractError, run_passes
from compiled_engine.passes.framework.matching import aten, emit, named
from compiled_engine.passes.framework.parameter import KEPT
from compiled_engine.passes.framework.random_inputs import RandomInputs
from compiled_engine.passes.speech.cross_attention import cross_attention
from compiled_engine.passes.speech.hoist_encoder import ENCODED, HoistEncoder
from compiled_engine.resolve.engine import resolve

CPU = torch.device("cpu")
RANGE = CompileRange(1, LENGTH)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = save_config(tmp_path_factory.mktemp("config"), max_target_positions=128)
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "mode": "compiled", "skip_tokenizer_init": True}
    found = resolve(EngineOptions(model=folder, max_num_batched_tokens=64, max_num_seqs=2, **options))
    return replace(found, compile=replace(found.compile, verify=True))


@pytest.fixture(scope="module")
def made(config: EngineConfig) -> TracedGraph:
    return trace(without_storage(build_model(config.model), CPU), callables_of(config)[FORWARD])


def run(graph: fx.Graph, inputs: RandomInputs, kept: dict[str, torch.Tensor]) -> Any:
    """The graph's results. kept: values of kept parameters, by name."""
    given = [
        kept[source_of(node).name] if is_parameter(node) and source_of(node).name in kept else inputs.of(node)
        for node in graph.find_nodes(op="placeholder")
    ]
    return fx.Interpreter(fx.GraphModule({}, graph)).run(*given)


def kept_in(graph: fx.Graph) -> list[str]:
    parameters = [parameter_of(node) for node in graph.find_nodes(op="placeholder") if is_parameter(node)]
    return [parameter.name for parameter in parameters if parameter.role == KEPT]


def test_both_parts_compute_what_the_whole_does(config: EngineConfig, made: TracedGraph) -> None:
    whole = made.for_range(made.signature.ranges[-1]).graph
    inputs = RandomInputs(whole, LENGTH, CPU, 1.0)
    (expected_TD,) = run(whole, inputs, {})
    first, reports = fuse(config, replace(made, signature=callables_of(config)[HOISTED]), made.signature.ranges[-1])
    num_layers = SIZES["decoder_layers"]
    hoist = next(report for report in reports if report.name == HoistEncoder.name)
    assert hoist.matches == hoist.contract == 2 * num_layers
    arguments = [source_of(n) for n in first.graph.find_nodes(op="placeholder") if not is_parameter(n)]
    assert {source.name for source in arguments} == {ENCODED}
    results = run(first.graph, inputs, {})
    rest, _ = fuse(config, made, made.signature.ranges[-1])
    names = [f"cross_{kind}.{layer}" for layer in range(num_layers) for kind in ("keys", "values")]
    assert kept_in(rest.graph) == names
    assert ENCODED not in {source_of(node).name for node in rest.graph.find_nodes(op="placeholder")}
    assert config.speech is not None
    kept = {}
    for name, result in zip(names, results, strict=True):
        kept[name] = torch.full((config.speech.num_slots * LENGTH, *result.shape[1:]), torch.nan)
        kept[name][:LENGTH] = result
    (found_TD,) = run(rest.graph, inputs, kept)
    torch.testing.assert_close(found_TD, expected_TD, rtol=1e-4, atol=1e-4)


def test_another_reader_of_the_encoders_result_is_refused(made: TracedGraph) -> None:
    graph = made.for_range(made.signature.ranges[-1]).graph
    call = graph.find_nodes(op="call_function", target=cross_attention)[0]
    keys = named(call)["k_EHd"]
    with graph.inserting_before(call):
        total = emit(graph, aten.sum.default, keys)
        call.replace_input_with(named(call)["q_THd"], emit(graph, aten.mul.Tensor, named(call)["q_THd"], total))
    with pytest.raises(
        ContractError, match="sum_default, computed from the encoder's result alone, is read by mul_tensor"
    ):
        run_passes(graph, (HoistEncoder(LENGTH, hoists=False),), (HoistEncoder.name,), RANGE, CPU)
