"""One call of each kind: all that the whole forward calls is called, with every shape of arguments that it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from pass_cases import CPU, GEMMA2, GEMMA3, QWEN3, QWEN3_MOE, RANGES, Family
from planned_models import NUM_LAYERS, Pieces, config_of, inputs, planned

from compiled_engine.graphs.compiler.plan import Plan, PlannedStep, distinct_calls
from compiled_engine.graphs.compiler.stitch import stitch
from compiled_engine.models.checkpoint.loader import fill_with_random_weights
from compiled_engine.models.checkpoint.parameters import materialize
from compiled_engine.models.textbook.architectures import build_model
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.passes.framework.graph_inputs import Source

Call = tuple[Any, ...]


def kind(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, tuple(argument.shape), argument.stride()
    return argument


def calls_of(
    plan: Plan, pieces: Pieces, parameters: Mapping[str, torch.Tensor], caches: list[torch.Tensor]
) -> tuple[list[Call], torch.Tensor]:
    """What the forward calls, and what it returns."""
    calls: list[Call] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append((name, *map(kind, arguments)))
            return function(*arguments)

        return call

    def on_attention(function: Callable[..., Any], arguments: Call) -> None:
        watched("attention", function)(*arguments)

    watched_pieces = {key: watched(key, piece) for key, piece in pieces.items()}
    return calls, stitch(plan, watched_pieces, parameters, on_attention)(*inputs(), caches)


@pytest.mark.parametrize(
    ("family", "windows", "fused", "num_attentions"),
    [
        (QWEN3, (None,) * 4, True, 2),  # the first layer's, whose piece has the embedding, and the others'
        (QWEN3, (None,) * 4, False, 2),
        (QWEN3_MOE, (None,) * 4, True, 2),
        pytest.param(GEMMA2, (8, None, 8, None), True, 3, marks=pytest.mark.product(one_in=1000)),
        pytest.param(GEMMA3, (8, 8, 8, None), True, 3, marks=pytest.mark.product(one_in=1000)),
    ],
    ids=str,
)
def test_every_kind_of_call_is_made_once(
    family: Family, windows: tuple[int | None, ...], fused: bool, num_attentions: int
) -> None:
    config = config_of(family)
    config = replace(config, model=replace(config.model, sliding_windows=windows))
    model = build_model(local_model(config))
    caches = [torch.zeros(shape, dtype=config.model.dtype) for shape in config.model.kv_shapes(1, 16)]
    for compile_range in RANGES:
        plan, pieces = planned(config, compile_range, fused=fused)
        weights = materialize(model, plan.parameters, CPU)
        fill_with_random_weights(weights, 0)
        whole, expected = calls_of(plan, pieces, weights.tensors, caches)
        once, found = calls_of(distinct_calls(plan), pieces, weights.tensors, caches)
        assert set(once) == set(whole)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert sum(call[0] == "attention" for call in whole) == NUM_LAYERS
        assert sum(call[0] == "attention" for call in once) == num_attentions
        of_pieces = [call[0] for call in once if call[0] != "attention"]
        assert sorted(of_pieces) == sorted(plan.piece_keys())


def test_a_plan_in_which_nothing_is_alike_stays_as_it_is() -> None:
    config = config_of(QWEN3)
    plan, _ = planned(config, RANGES[0])
    once = distinct_calls(plan)
    again = distinct_calls(once)
    assert again == once
    assert len(once.steps) < len(plan.steps)


INPUTS = tuple(Source("argument", name) for name in ("input_ids_T", "positions_T", "kv_caches.0", "kv_caches.1"))
IDS, POSITIONS, CACHE, OTHER_CACHE, X, Y, Z = range(7)


def calling(
    result: int, *arguments: int | tuple[object], op: str = "attention", piece: str | None = None
) -> PlannedStep:
    """A call of an op, or of a piece. arguments: values, and constants in tuples."""
    given = ({"constant": each[0]} if isinstance(each, tuple) else {"value": each} for each in arguments)
    return PlannedStep(piece, None if piece else op, tuple(given), (result,))


@pytest.mark.parametrize(
    ("other", "is_alike"),
    [
        (calling(Z, X, OTHER_CACHE, (8,)), True),
        (calling(Z, X, OTHER_CACHE, (9,)), False),
        (calling(Z, X, OTHER_CACHE, (None,)), False),
        (calling(Z, X, OTHER_CACHE, (8.5,)), False),
        (calling(Z, X, OTHER_CACHE, ("8",)), False),
        (calling(Z, X, OTHER_CACHE), False),
        (calling(Z, X, OTHER_CACHE, (8,), (8,)), False),
        (calling(Z, X, OTHER_CACHE, (8,), op="another"), False),
        (calling(Z, IDS, OTHER_CACHE, (8,)), False),
        (calling(Z, X, POSITIONS, (8,)), False),
        (calling(Z, X, X, (8,)), False),
        (calling(Z, X, OTHER_CACHE, (8,), piece="p"), True),
        (calling(Z, X, OTHER_CACHE, (8,), piece="q"), False),
    ],
)
def test_calls_of_an_op_are_alike_if_all_but_the_layer_is(other: PlannedStep, is_alike: bool) -> None:
    """Constants are a window and a scale: each has kernels of its own."""
    first = [calling(X, IDS, piece="p"), calling(Y, X, CACHE, (8,))]
    plan = Plan(("input_ids_T",), INPUTS, (*first, other), (Z,))
    once = distinct_calls(plan)
    assert len(once.steps) == (2 if is_alike else 3)
    assert once.outputs == ((once.steps[0 if other.piece else 1] if is_alike else once.steps[-1]).results[0],)
