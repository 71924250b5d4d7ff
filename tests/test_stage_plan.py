"""Stages as parts of a plan: one after the other they compute what the whole does, and have what it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from pass_cases import BIASED, CPU, GEMMA2, PHI3, QWEN3, QWEN3_MOE, RANGES, Family
from tiny_models import tiny_config

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler.build import apply_passes
from compiled_engine.graphs.compiler.example_inputs import example_inputs, without_storage
from compiled_engine.graphs.compiler.plan import Plan
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.stage_plan import StageForward, stage_plan
from compiled_engine.graphs.compiler.stitch import stitch
from compiled_engine.graphs.compiler.trace import trace
from compiled_engine.models.checkpoint.parameters import materialize
from compiled_engine.models.checkpoint.random_weights import fill_with_random_weights
from compiled_engine.models.textbook.architectures import build_model
from compiled_engine.parallel.stages import ParameterPlaces, divide_layers, parameter_places, stages_of
from compiled_engine.passes.graph_pass import CompileRange
from compiled_engine.passes.manager import run_passes
from compiled_engine.passes.registry import registered_passes

NUM_LAYERS, NUM_TOKENS = 4, 5
Pieces = Mapping[str, Callable[..., object]]


def config_of(family: Family) -> EngineConfig:
    return tiny_config(
        family.architecture,
        NUM_LAYERS,
        rope=family.rope,
        tie_word_embeddings=family.tied,
        qkv_bias=family.qkv_bias,
        attention_out_bias=family.other_biases,
        mlp_bias=family.other_biases,
        sliding_windows=(family.sliding_window,) * NUM_LAYERS,
    )


def planned(config: EngineConfig, compile_range: CompileRange, *, fused: bool = False) -> tuple[Plan, Pieces]:
    """Pieces as they are before they are compiled. fused: with the ops that passes put in, as on a GPU."""
    model = without_storage(build_model(config.local_model), CPU)
    graphs = trace(model, example_inputs(config))
    if fused:
        module, passes = graphs.for_range(compile_range), registered_passes()
        run_passes(module.graph, passes, [graph_pass.name for graph_pass in passes], compile_range, CPU)
    else:
        module, _ = apply_passes(config, graphs, compile_range)
    steps = split(module.graph)
    plan, _ = make_plan(module.graph, steps)
    keys = [step.piece for step in plan.steps]
    return Plan.from_json(plan.to_json()), {
        key: step.piece for key, step in zip(keys, steps, strict=True) if key is not None and step.piece is not None
    }


def inputs() -> tuple[torch.Tensor, torch.Tensor, AttentionInputs]:
    """One prompt, in block 0."""
    tokens = torch.arange(NUM_TOKENS)
    prompt = AttentionInputs(
        query_start_loc_R1=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        seq_lens_R=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        block_table_RB=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping_T=tokens,
        host_3=torch.tensor([0, NUM_TOKENS, NUM_TOKENS], dtype=torch.int32),
        backend="torch",
        work_W=torch.zeros(1, dtype=torch.int32),
    )
    return tokens * 7 % 50, tokens, prompt


@pytest.mark.parametrize(
    ("family", "stage_layers", "fused"),
    [
        (QWEN3, (3, 1), False),
        (QWEN3, (3, 1), True),
        (BIASED, (1, 2, 1), True),
        (GEMMA2, (2, 2), True),
        (PHI3, (1, 3), False),
        (QWEN3_MOE, (2, 1, 1), False),
    ],
    ids=str,
)
def test_stages_compute_what_the_whole_does(family: Family, stage_layers: tuple[int, ...], fused: bool) -> None:
    config = config_of(family)
    places = parameter_places(build_model(config.local_model), config.local_model)
    model = build_model(config.local_model)
    parameters = materialize(model, {}, CPU)
    fill_with_random_weights(model, 0)
    named = dict(model.named_parameters(remove_duplicate=False))  # a tied one under each of its names
    caches = [torch.zeros(shape, dtype=config.model.dtype) for shape in config.model.kv_shapes(1, 16)]
    for compile_range in RANGES:
        plan, pieces = planned(config, compile_range, fused=fused)
        is_cpp = compile_range.small and not config.model.experts.count
        assert any(step.op == "compiled_engine::rope_attend" for step in plan.steps) == (fused or is_cpp)
        packed = {name: torch.cat([parameters[m] for m in members]) for name, members in plan.packed().items()}
        given = parameters | packed
        expected = stitch(plan, pieces, given)(*inputs(), caches)
        found = None
        for stage in stages_of(stage_layers, NUM_LAYERS):
            part = stage_plan(plan, stage)
            forward = StageForward(stitch(part.plan, pieces, given), part, found)
            assert forward.received_row_bytes * NUM_TOKENS == (0 if found is None else found.numel())
            found = forward(*inputs(), [torch.zeros_like(caches[layer]) for layer in stage.layers])
            needed = part.plan.parameters() | (places.of_logits if stage.is_last else frozenset())
            assert {id(named[name]) for name in needed & named.keys()} == {
                id(named[name]) for name in places.of_stage(stage)
            }
        assert torch.equal(found, expected)


def test_something_else_than_rows_of_tokens_cannot_cross() -> None:
    plan, _ = planned(config_of(QWEN3), RANGES[0])
    nothing_known = Plan(plan.inputs, plan.steps, plan.outputs)
    with pytest.raises(ValueError, match="cannot be handed from stage to stage"):
        stage_plan(nothing_known, stages_of((2, 2), NUM_LAYERS)[0])
    with pytest.raises(ValueError, match="4 attentions, not one for each of 5 layers"):
        stage_plan(plan, stages_of((2, 3), 5)[1])


@pytest.mark.parametrize(
    ("count", "logits", "expected"), [(1, 8, (6,)), (2, 0, (3, 3)), (2, 8, (4, 2)), (3, 0, (2, 2, 2)), (6, 0, (1,) * 6)]
)
def test_layers_are_divided_by_what_they_take(count: int, logits: int, expected: tuple[int, ...]) -> None:
    """Six layers of 2 bytes, half of them before the attention; the embedding counts nothing, the logits half."""
    attentions = {"embed": 0} | {f"{part}{i}": i + after for i in range(6) for after, part in enumerate(("q", "o"))}
    nbytes = dict.fromkeys(attentions, 1) | {"embed": 100, "head": logits}
    places = ParameterPlaces(attentions, frozenset({"head"}))
    layers = divide_layers(places, nbytes, 6, count)
    assert sum(layers) == 6
    assert layers == expected
