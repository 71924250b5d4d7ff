"""Embeddings of images in the graph: the values are those that hooks give in the model's own code."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pass_cases import GEMMA3, GEMMA4, QWEN2, QWEN3, STARCODER2, Family, traced
from tiny_models import tiny_config
from torch import fx, nn
from vision_models import vision_config

from compiled_engine.config import EngineConfig, ImagesConfig, ModelConfig
from compiled_engine.features.images.eager_images import EagerImages
from compiled_engine.graphs.compiler.build import fuse
from compiled_engine.graphs.compiler.signature import FORWARD, IMAGES, callables_of
from compiled_engine.graphs.compiler.trace import TracedGraph, trace, without_storage
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.vision.description import describe_vision
from compiled_engine.passes.framework.graph_inputs import is_parameter, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass
from compiled_engine.passes.framework.manager import ContractError, run_passes
from compiled_engine.passes.framework.parameter import Parameter, compute
from compiled_engine.passes.framework.random_inputs import RandomInputs
from compiled_engine.passes.images.merge_embeddings import EMBEDDINGS, IMAGE_INDEX, MergeEmbeddings
from compiled_engine.passes.images.section_angles import POSITION_DELTAS, SectionAngles, angles_of_sections
from compiled_engine.passes.images.whole_images import KEYS_AHEAD

CPU = torch.device("cpu")
NUM_LAYERS, NUM_TOKENS, NUM_ROWS = 3, 9, 8
INDEX_T = torch.tensor([-1, 3, 0, 7, -1, -1, 5, 6, -1], dtype=torch.int32)
DELTAS_T3 = torch.tensor([[0, 0, 0]] * 2 + [[-2, 1, 3], [4, 0, 9]] * 3 + [[1, 1, 1]], dtype=torch.int32)


def with_images(
    model: ModelConfig, levels: int = 0, sections: tuple[int, ...] = (), mixed: bool = False
) -> EngineConfig:
    described = describe_vision(vision_config("LlavaForConditionalGeneration"))
    assert described is not None
    vision = replace(described, levels=levels, mrope_section=sections or None, mrope_interleaved=mixed)
    config = replace(tiny_config(), model=model, images=ImagesConfig(vision, "", NUM_ROWS, NUM_ROWS, NUM_ROWS))
    return replace(config, compile=replace(config.compile, strict=True, verify=True))


def model_of(family: Family, **changes: Any) -> ModelConfig:
    return replace(traced(family, torch.float32, NUM_LAYERS)[0], **changes)


def graph_of_images(config: EngineConfig) -> tuple[TracedGraph, fx.Graph, dict[str, tuple[int, int]]]:
    """The trace, the graph after all passes, and matches and contracts by pass."""
    made = trace(without_storage(build_model(config.model), CPU), callables_of(config)[IMAGES])
    module, reports = fuse(config, made, made.signature.ranges[-1])
    return made, module.graph, {report.name: (report.matches, report.contract) for report in reports}


def with_values(made: TracedGraph) -> tuple[RandomInputs, dict[str, torch.Tensor]]:
    """Random inputs of a step with images, equal each time, and its step tensors by name."""
    graph = made.module.graph
    inputs = RandomInputs(graph, NUM_TOKENS, CPU, 1.0)
    placeholders = graph.find_nodes(op="placeholder")
    values = {source_of(node).name: inputs.of(node) for node in placeholders}
    tensors = {source_of(node).name: values[source_of(node).name] for node in placeholders if not is_parameter(node)}
    tensors[IMAGE_INDEX.name].copy_(INDEX_T)
    if KEYS_AHEAD.name in tensors:
        tensors[KEYS_AHEAD.name].zero_()
    if POSITION_DELTAS.name in tensors:
        tensors[POSITION_DELTAS.name].copy_(DELTAS_T3)
    return inputs, tensors


def executed(made: TracedGraph, graph: fx.Graph) -> torch.Tensor:
    inputs, _ = with_values(made)
    values = []
    for node in graph.find_nodes(op="placeholder"):
        source = source_of(node)
        packed = isinstance(source, Parameter) and source.members
        values.append(compute(source, inputs.parameter) if packed else inputs.of(node))  # type: ignore[arg-type]
    outputs: tuple[torch.Tensor, ...] = fx.GraphModule({}, graph)(*values)
    return outputs[0]


def of_hooks(config: EngineConfig, made: TracedGraph) -> torch.Tensor:
    """The hidden states of the model's own code, with the hooks of an eager engine."""
    assert config.images is not None
    model = build_model(config.model)
    inputs, tensors = with_values(made)
    for node in filter(is_parameter, made.module.graph.find_nodes(op="placeholder")):
        owner, _, name = source_of(node).name.rpartition(".")
        module, value = model.get_submodule(owner), inputs.of(node)
        is_weight = name in dict(module.named_parameters(recurse=False))
        setattr(module, name, nn.Parameter(value, requires_grad=False) if is_weight else value)
    feature = EagerImages(config, config.images)
    (embeddings,) = feature.parameters(model)
    found = feature.callables(model, {FORWARD: model}, {EMBEDDINGS: inputs.parameter(embeddings)})
    asked = [tensors[tensor.name] for tensor in made.signature.asked if tensor.name in tensors]
    with torch.inference_mode():
        hidden_TD: torch.Tensor = found[IMAGES](*made.signature.passed(tensors), *asked)
    return hidden_TD


CASES = {
    "Gemma 3, whose text alone is scaled": (model_of, GEMMA3, 0, (), False),
    "Qwen2": (model_of, QWEN2, 0, (2, 3, 3), False),
    "Qwen3": (model_of, QWEN3, 2, (4, 2, 2), True),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_hooks(case: str) -> None:
    make, family, *how = CASES[case]
    config = with_images(make(family), *how)
    made, graph, matches = graph_of_images(config)
    levels, sections = how[0], how[1]
    assert matches["merge_embeddings"] == (1 + levels, 1 + levels)
    assert matches.get("section_angles") == ((1, 1) if sections else None)
    assert matches["rope_angles"] == ((0, 0) if sections else matches["rope_angles"])
    torch.testing.assert_close(executed(made, graph), of_hooks(config, made), rtol=1e-4, atol=1e-4)


def test_layers_of_gemma4_have_embeddings_and_windows_of_their_own() -> None:
    config = with_images(model_of(GEMMA4))
    config = replace(config, compile=replace(config.compile, strict=False))  # the gates of its layers stay in parts
    assert config.images is not None
    own = {"layer_token_id": 7, "both_ways": True, "both_ways_in_windows": True}
    config = replace(config, images=replace(config.images, vision=replace(config.images.vision, **own)))
    made, graph, matches = graph_of_images(config)
    num_windows = sum(window is not None for window in config.model.sliding_windows)
    assert 0 < num_windows < NUM_LAYERS
    assert matches["layer_tokens"] == (1, 1)
    assert matches["whole_images"] == (num_windows, num_windows)
    torch.testing.assert_close(executed(made, graph), of_hooks(config, made), rtol=1e-4, atol=1e-4)


def test_models_of_transformers_code_merge_them() -> None:
    _, graph, matches = graph_of_images(with_images(model_of(STARCODER2)))
    assert matches["merge_embeddings"] == (1, 1)
    assert any(source_of(node).name == EMBEDDINGS for node in graph.find_nodes(op="placeholder"))


def test_positions_in_turn_and_one_after_the_other() -> None:
    positions_T, deltas_T3 = torch.tensor([10]), torch.tensor([[0, 100, 1000]], dtype=torch.int32)
    angles = partial(angles_of_sections, positions_T, deltas_T3, torch.ones(8))
    assert angles([2, 3, 3], mixed=False).tolist() == [[10.0] * 2 + [110.0] * 3 + [1010.0] * 3]
    assert angles([4, 2, 2], mixed=True).tolist() == [[10.0, 110.0, 1010.0] * 2 + [10.0] * 2]


@pytest.mark.parametrize(
    ("graph_pass", "message"),
    [
        (MergeEmbeddings(NUM_ROWS, NUM_LAYERS), "layer 3: no op reads a parameter model.layers.3."),
        (SectionAngles((2, 3, 4), False), "the factor of positions has no 9 frequencies"),
    ],
)
def test_what_is_not_found_is_an_error(graph_pass: GraphPass, message: str) -> None:
    config = with_images(model_of(QWEN3), sections=(2, 3, 3))
    made = trace(without_storage(build_model(config.model), CPU), callables_of(config)[IMAGES])
    graph = made.for_range(CompileRange(1, 64)).graph
    with pytest.raises(ContractError, match=message):
        run_passes(graph, (graph_pass,), (graph_pass.name,), CompileRange(1, 64), CPU)


def test_the_usual_forward_is_that_of_the_text_model() -> None:
    """Its declaration, from which trace, passes and pieces follow; the images' one has no small range."""
    config = with_images(model_of(QWEN3), 1, (4, 2, 2), True)
    plain = replace(config, images=None)
    found = callables_of(config)
    assert {name: found[name] for name in callables_of(plain)} == callables_of(plain)
    assert [each.high for each in found[IMAGES].ranges] == [config.scheduler.max_num_batched_tokens]
    assert found[IMAGES].returns == found[FORWARD].returns
