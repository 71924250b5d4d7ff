"""Stages as parts of a plan: one after the other they compute what the whole does, and have what it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_cases import BIASED, CPU, GEMMA2, PHI3, QWEN3, QWEN3_MOE, RANGES, Family
from planned_models import NUM_LAYERS, NUM_TOKENS, config_of, inputs, planned
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiled_engine.graphs.compiler.plan import Plan
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.stage_plan import StageForward, stage_plan
from compiled_engine.graphs.compiler.stitch import stitch
from compiled_engine.models.checkpoint.loader import fill_with_random_weights
from compiled_engine.models.checkpoint.parameters import materialize, parameters_of
from compiled_engine.models.textbook.architectures import build_model
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.parallel.stages import ParameterPlaces, divide_layers, parameter_places, stages_of
from compiled_engine.passes.framework.graph_inputs import Source
from compiled_engine.passes.framework.graph_pass import GraphPass, SplittingOp
from compiled_engine.passes.registry import register_pass, unregister_pass


@pytest.mark.product(one_in=8)
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
    places = parameter_places(build_model(local_model(config)), local_model(config))
    model = build_model(local_model(config))
    caches = [torch.zeros(shape, dtype=config.model.dtype) for shape in config.model.kv_shapes(1, 16)]
    for compile_range in RANGES:
        plan, pieces = planned(config, compile_range, fused=fused)
        is_cpp = compile_range.small and not config.model.experts.count
        assert any(step.op == "compiled_engine::rope_attend" for step in plan.steps) == (fused or is_cpp)
        weights = materialize(model, (*parameters_of(model), *plan.parameters), CPU)
        fill_with_random_weights(weights, 0)
        named = dict(model.named_parameters(remove_duplicate=False))  # a tied one under each of its names
        given = weights.tensors
        expected = stitch(plan, pieces, given)(*inputs(), caches)
        found = None
        for stage in stages_of(stage_layers, NUM_LAYERS):
            part = stage_plan(plan, stage)
            forward = StageForward(stitch(part.plan, pieces, given), part, found)
            assert forward.received_row_bytes * NUM_TOKENS == (0 if found is None else found.numel())
            found = forward(*inputs(), [torch.zeros_like(caches[layer]) for layer in stage.layers])
            read = {leaf.name for parameter in part.plan.parameters for leaf in parameter.leaves()}
            needed = read | (places.of_logits if stage.is_last else frozenset())
            assert {id(named[name]) for name in needed & named.keys()} == {
                id(named[name]) for name in places.of_stage(stage)
            }
        assert torch.equal(found, expected)


def test_something_else_than_rows_of_tokens_cannot_cross() -> None:
    plan, _ = planned(config_of(QWEN3), RANGES[0])
    nothing_known = Plan(plan.arguments, plan.inputs, plan.steps, plan.outputs)
    with pytest.raises(ValueError, match="cannot be sent between stages"):
        stage_plan(nothing_known, stages_of((2, 2), NUM_LAYERS)[0])
    with pytest.raises(ValueError, match="4 attentions, not one for each of 5 layers"):
        stage_plan(plan, stages_of((2, 3), 5)[1])


@torch.library.custom_op("tests::attend_somehow", mutates_args=("x_T",))
def attend_somehow(x_T: torch.Tensor) -> None:
    """Stand for an attention."""


class Attends(GraphPass):
    """Has an op that plans may be cut behind."""

    name = "attends_somehow"
    splitting_ops = (SplittingOp("tests::attend_somehow", lambda x_T: None, attends=True),)


def plan_of(function: Callable[[torch.Tensor], object]) -> Plan:
    """Return the plan of a function of an input [T, 4]."""
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env), shape_env.ignore_fresh_unbacked_symbols():
        num_tokens = shape_env.create_unbacked_symint()
        shape_env.constrain_symbol_range(num_tokens.node.expr, 2, 64)
        module = make_fx(function)(torch.empty(num_tokens, 4))
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta["source"] = Source("argument", "x_TD")
    return make_plan(module.graph, split(module.graph), ("x_TD",))[0]


def test_values_of_several_dtypes_are_unpacked_for_any_number_of_tokens() -> None:
    def function(x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half_TD, sums_T = x_TD.bfloat16()[:, :3], x_TD.sum(1)
        attend_somehow(x_TD)
        return (half_TD + sums_T.unsqueeze(1),)

    register_pass(Attends())
    try:
        border = stage_plan(plan_of(function), stages_of((1, 0), 1)[0]).sent
    finally:
        unregister_pass("attends_somehow")
    assert border is not None
    assert len({value.dtype for value in border.values}) == 2
    values = [torch.randn(3, *each.row_shape).to(getattr(torch, each.dtype)) for each in border.values]
    assert all(map(torch.equal, border.unpack(border.pack(values), 3), values))


def test_what_has_no_row_for_each_token_is_not_carried_and_refused_between_stages() -> None:
    """Tables of transformers' code have a batch of one before the tokens, and rows of pairs have a step's length."""

    def function(x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows_TD, table_1TD, tokens_T, total = x_TD * 2, x_TD.unsqueeze(0) * 3, x_TD.sum(1), x_TD.sum()
        pairs_TT = tokens_T.unsqueeze(1) * tokens_T
        attend_somehow(x_TD)
        return rows_TD + table_1TD.squeeze(0) + tokens_T.unsqueeze(1) * total + pairs_TT @ x_TD, x_TD

    register_pass(Attends())
    try:
        plan = plan_of(function)
        assert sorted(value.row_shape for value in plan.carried) == [(), (4,)]
        assert Plan.from_json(plan.to_json()) == plan
        with pytest.raises(ValueError, match="cannot be sent between stages"):
            stage_plan(plan, stages_of((1, 0), 1)[0])
    finally:
        unregister_pass("attends_somehow")


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
