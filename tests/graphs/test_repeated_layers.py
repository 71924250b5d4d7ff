"""Few layers are traced, and what comes out is what a trace of all of them gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family, write_checkpoint
from speech_models import save_config
from tiny_models import tiny_config
from torch import fx, nn
from vision_models import vision_config

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler import trace as trace_module
from compiled_engine.graphs.compiler.build import apply_passes
from compiled_engine.graphs.compiler.signature import ENCODE, FORWARD, callables_of, compile_ranges, forward_signature
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.trace import TracedGraph, trace, without_storage
from compiled_engine.graphs.compiler.traced_layers import traced_layers
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.families import FAMILIES
from compiled_engine.models.textbook.layers import LayerStack
from compiled_engine.models.textbook.llama import LlamaModel
from compiled_engine.models.vision.description import describe_vision
from compiled_engine.models.vision.tower_config import tower_config
from compiled_engine.options import EngineOptions
from compiled_engine.passes.framework.graph_inputs import source_of
from compiled_engine.resolve.engine import resolve

FULL, WINDOW = None, 8


def model_of(config: EngineConfig) -> nn.Module:
    return without_storage(build_model(config.model), config.device)


def stack_of(model: nn.Module) -> LayerStack:
    (stack,) = [module for module in model.modules() if isinstance(module, LayerStack)]
    return stack


def with_windows(config: EngineConfig, windows: tuple[int | None, ...]) -> EngineConfig:
    return replace(config, model=replace(config.model, num_layers=len(windows), sliding_windows=windows))


def plans(config: EngineConfig, traced: TracedGraph) -> list[tuple[str, dict[str, str]]]:
    """Plan and pieces of every range."""
    found = []
    for compile_range in compile_ranges(config):
        module, _ = apply_passes(config, traced, compile_range)
        plan, pieces = make_plan(module.graph, split(module.graph))
        found.append((plan.to_json(), pieces))
    return found


def ops(traced: TracedGraph) -> list[Any]:
    """The graph with nodes by their places, whatever they are called."""
    place = {node: i for i, node in enumerate(traced.module.graph.nodes)}
    return [
        source_of(node)
        if node.op == "placeholder"
        else (str(node.target), fx.map_arg((node.args, node.kwargs), place.get))
        for node in traced.module.graph.nodes
    ]


def few_of(config: EngineConfig, change: Callable[[nn.Module], Any] = lambda model: None) -> tuple[TracedGraph, int]:
    """The trace as it is, and how many layers Dynamo's graph has."""
    model = model_of(config)
    change(model)
    few = trace(model, forward_signature(config))
    assert stack_of(model).only is None
    return few, few.dynamo_graph.count("= torch.ops.compiled_engine.attention")


def both_ways(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module], Any] = lambda model: None
) -> tuple[TracedGraph, TracedGraph, int]:
    """The trace as it is and one of all layers, and how many layers Dynamo's graph has for the first."""
    few, num_traced = few_of(config, change)
    model = model_of(config)
    change(model)
    with monkeypatch.context() as patched:
        patched.setattr(trace_module, "traced_layers", lambda model: ())
        every = trace(model, forward_signature(config))
    return few, every, num_traced


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_plan_and_pieces_are_those_of_a_whole_trace(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the range of all sizes; passes of another one see the same trace."""
    config = tiny_config(architecture, 4, dtype=torch.bfloat16)
    config = replace(config, compile=replace(config.compile, ranges=()))
    few, every, num_traced = both_ways(config, monkeypatch)
    assert num_traced == 3
    assert plans(config, few) == plans(config, every)
    assert few.symbols == every.symbols


# Windows of layers, and how many layers are traced.
FEW = [
    ((FULL,) * 3, 3),
    ((FULL,) * 4 + (WINDOW,) * 4, 6),
    ((FULL,) + (WINDOW,) * 4, 4),
    ((FULL, WINDOW) * 3, 6),
    ((FULL, WINDOW) * 4, 6),
    ((FULL, WINDOW, WINDOW, FULL, WINDOW, FULL, FULL) * 2, 11),
    ((FULL,) * 4, 3),
    ((FULL,) * 4 + (WINDOW,) * 2 + (FULL,), 6),
    ((FULL, WINDOW) * 4 + (FULL,), 5),
    (((WINDOW,) * 3 + (FULL,)) * 3 + (WINDOW,), 7),
]


@pytest.mark.parametrize(("windows", "num_traced"), FEW)
def test_two_layers_of_each_kind_are_chosen(windows: tuple[int | None, ...], num_traced: int) -> None:
    chosen = traced_layers(model_of(with_windows(tiny_config("Qwen2ForCausalLM"), windows)))
    assert num_traced == (len(chosen[0].numbers) if chosen else len(windows))


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("windows", "num_traced"), FEW)
def test_few_layers_of_each_kind_are_traced(
    windows: tuple[int | None, ...], num_traced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_windows(tiny_config("Qwen2ForCausalLM"), windows)
    few, every, found = both_ways(config, monkeypatch)
    assert found == num_traced
    assert ops(few) == ops(every)


def no_bias(layer: Any) -> None:
    layer.self_attn.q_proj.bias = None


def other_eps(layer: Any) -> None:
    layer.input_layernorm.eps = 0.5


def other_class(layer: Any) -> None:
    layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("number", "change"), [(0, other_eps), (1, no_bias), (4, other_class), (7, no_bias)])
def test_a_layer_that_is_unlike_its_neighbours(
    number: int, change: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("Qwen2ForCausalLM", 8)
    few, every, num_traced = both_ways(config, monkeypatch, lambda model: change(stack_of(model)[number]))
    assert num_traced < 8
    assert ops(few) == ops(every)


def share_weights(model: nn.Module) -> None:
    first: Any = stack_of(model)[0]
    for layer in stack_of(model):
        layer.mlp.gate_proj.weight = first.mlp.gate_proj.weight


def share_a_module(model: nn.Module) -> None:
    stack: Any = stack_of(model)
    stack[3].mlp = stack[2].mlp


class _Sly(float):
    """Equal to any other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = float.__hash__


def pretend(model: nn.Module) -> None:
    for number, layer in enumerate(stack_of(model)):
        layer.input_layernorm.eps = _Sly(0.5 if number == 1 else 0.25)  # type: ignore[union-attr]


def change_the_stack(model: Any) -> None:
    """A loop of its own may do as it likes with any layer."""

    class Stack(LayerStack):
        def forward(self, x_TD: torch.Tensor, *arguments: Any) -> torch.Tensor:
            *shared, kv_caches = arguments
            for number, layer in enumerate(self):
                x_TD = layer(x_TD * 2 if number == 3 else x_TD, *shared, kv_caches[number])
            return x_TD

    model.model.layers = Stack(list(model.model.layers))


def use_a_middle_layer_again(model: Any) -> None:
    class Model(LlamaModel):
        def forward(self, *arguments: Any) -> torch.Tensor:
            return super().forward(*arguments) * self.layers[2].input_layernorm.weight

    model.model.__class__ = Model


def count_layers_and_caches(model: Any) -> None:
    """What a model does with its layers beside applying them is that of all of them."""

    class Model(LlamaModel):
        def forward(self, *arguments: Any) -> torch.Tensor:
            return super().forward(*arguments) / len(self.layers) / len(arguments[3])

    model.model.__class__ = Model


def add_before(norm: Any) -> None:
    """The norm is given two values, and takes their sum."""

    class Joined(type(norm)):  # type: ignore[misc]
        def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> Any:
            return super().forward(given[0] + given[1])

    norm.__class__ = Joined


def hand_on_two_values(last: float) -> Callable[[nn.Module], None]:
    """Each layer but the first takes two. last: a setting of the last one, equal to that of the others, which has it
    use the second value first, and the first one later."""

    def change(model: Any) -> None:
        first_layer, norm = stack_of(model)[0], model.model.norm

        class Layer(type(first_layer)):  # type: ignore[misc]
            def forward(self, given: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
                one, two = given if isinstance(given, tuple) else (given, given * 2)
                weight_D = self.input_layernorm.weight
                x_TD = two * weight_D * 3 + one if self.turned > 0.4 else one * weight_D + two
                return super().forward(x_TD, *arguments), x_TD

        for number, layer in enumerate(stack_of(model)):
            layer.__class__ = Layer
            layer.turned = _Sly(last if number == 7 else 0.25)  # type: ignore[assignment]
        add_before(norm)

    return change


def take_one_value_twice(model: Any) -> None:
    """The first layer is given one value, the others two. Which of them the second and the last layer scale, nothing
    tells but their ops, and where both are one value, not even these."""
    first_layer, norm = stack_of(model)[0], model.model.norm

    class Layer(type(first_layer)):  # type: ignore[misc]
        def forward(self, given: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            one, two = given if isinstance(given, tuple) else (given, given)
            if self.turned > 0.4:
                one, two = two, one
            x_TD = one * self.input_layernorm.weight + two
            return super().forward(x_TD, *arguments), x_TD

    for number, layer in enumerate(stack_of(model)):
        layer.__class__ = Layer
        layer.turned = _Sly(0.5 if number in (1, 4) else 0.25)  # type: ignore[assignment]
    add_before(norm)


def name_the_layers_of(kind: type) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for number, layer in enumerate(stack_of(model)):
            layer.kind = kind(number > 0)  # type: ignore[assignment]

    return change


@pytest.mark.parametrize(
    ("change", "num_traced"),
    [
        (count_layers_and_caches, 3),
        # A setting of a layer that is a constant of the graph.
        *(pytest.param(name_the_layers_of(kind), 4, marks=pytest.mark.product(one_in=1000)) for kind in (bool, int)),
    ],
)
def test_whatever_a_model_does_the_graph_is_that_of_a_whole_trace(
    change: Callable[[nn.Module], None], num_traced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, every, found = both_ways(tiny_config("LlamaForCausalLM", 5), monkeypatch, change)
    assert found == num_traced
    assert ops(few) == ops(every)


@pytest.mark.parametrize(
    "change",
    [share_weights, share_a_module, change_the_stack, pretend, use_a_middle_layer_again, take_one_value_twice],
)
def test_layers_that_do_not_repeat_one_another_are_all_traced(change: Callable[[nn.Module], None]) -> None:
    """At once, or when that has shown."""
    _, found = few_of(tiny_config("LlamaForCausalLM", 5), change)
    assert found == 5


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("last", "num_traced"), [(0.25, 5), (0.5, 8)])
def test_layers_that_take_the_same_values_in_another_order_are_all_traced(
    last: float, num_traced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer is behind the only one of another kind, of those that are traced."""
    config = with_windows(tiny_config("Qwen2ForCausalLM"), (FULL,) * 3 + (WINDOW,) + (FULL,) * 4)
    change = hand_on_two_values(last)
    if num_traced == 8:
        _, found = few_of(config, change)
    else:
        few, every, found = both_ways(config, monkeypatch, change)
        assert ops(few) == ops(every)
    assert found == num_traced


def test_settings_of_different_types_are_unlike() -> None:
    model = model_of(tiny_config(num_layers=8))
    for number, layer in enumerate(stack_of(model)):
        layer.flag = number > 0 or 0  # type: ignore[assignment]
        layer.scale = torch.ones(3)  # type: ignore[assignment]
    assert traced_layers(model) == ()
    for layer in stack_of(model):
        del layer.scale
    (layers,) = traced_layers(model)
    assert layers.numbers == (0, 1, 2, 7)


def test_the_model_applies_all_its_layers_after_a_failure() -> None:
    model = model_of(tiny_config(num_layers=8))
    (layers,) = traced_layers(model)
    with pytest.raises(ZeroDivisionError), layers.alone():
        raise ZeroDivisionError
    assert layers.stack.only is None


def test_there_is_a_cache_for_each_layer() -> None:
    with pytest.raises(ValueError, match="there are 2 KV caches for 3 layers"):
        LayerStack([nn.Identity()] * 3)(*[torch.zeros(1)] * 4, [torch.zeros(1)] * 2)


def computed(traced: TracedGraph) -> list[Any]:
    """The graph's ops in order, whatever the order of the graph's inputs."""
    place: dict[fx.Node, Any] = {}
    for node in traced.module.graph.nodes:
        place[node] = source_of(node) if node.op == "placeholder" else len(place)
    calls = [node for node in place if node.op != "placeholder"]
    first = place[calls[0]]
    where = {node: at - first if isinstance(at, int) else at for node, at in place.items()}
    return [(str(node.target), fx.map_arg((node.args, node.kwargs), where.get)) for node in calls]


# Architecture of a tower, its fields, and which of its layers are traced.
TOWERS = [
    ("Qwen3VLForConditionalGeneration", {"depth": 7, "deepstack_visual_indexes": [2]}, (0, 1, 2, 3, 5, 6)),
    ("LlavaForConditionalGeneration", {"num_hidden_layers": 6}, (0, 1, 4)),  # reads the last layer but one
]


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("architecture", "fields", "numbers"), TOWERS)
def test_few_layers_are_traced_where_results_of_some_are_read(
    architecture: str,
    fields: dict[str, Any],
    numbers: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config_json = vision_config(architecture, tower=fields)
    (tmp_path / "config.json").write_text(config_json)
    engine = resolve(EngineOptions(model=str(tmp_path), load_format="dummy", device="cpu"))
    description = describe_vision(config_json)
    assert description is not None
    config = tower_config(engine, description, config_json, 1200)
    signature = callables_of(config)[FORWARD]
    few = trace(model_of(config), signature)
    assert f"the layers {list(numbers)}" in few.dynamo_graph
    monkeypatch.setattr(trace_module, "traced_layers", lambda model: ())
    every = trace(model_of(config), signature)
    assert computed(few) == computed(every)


@pytest.mark.parametrize(("callable_name", "stack"), [(ENCODE, "encoder"), (FORWARD, "decoder")])
def test_few_layers_of_a_speech_model_are_traced(
    callable_name: str, stack: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each callable has layers of one stack alone, but the decoder's have KV caches."""
    save_config(tmp_path, encoder_layers=4, decoder_layers=4)
    config = resolve(EngineOptions(model=tmp_path, load_format="dummy", device="cpu", skip_tokenizer_init=True))
    signature = callables_of(config)[callable_name]
    few = trace(model_of(config), signature)
    assert few.dynamo_graph.startswith(f"# Of model.{stack}.layers the layers [0, 1, 3];")
    monkeypatch.setattr(trace_module, "traced_layers", lambda model: ())
    every = trace(model_of(config), signature)
    assert computed(few) == computed(every)


# Type of a model of transformers' code, its fields, which of its layers are traced, and how many pieces differ.
_MIXERS = ["linear_attention", "mlp"] * 5 + ["full_attention", "mlp"]
# The last five layers read earlier keys, and each layer has its own part of the embeddings.
_GEMMA = {
    **{"num_hidden_layers": 7, "num_kv_shared_layers": 5, "attention_k_eq_v": False, "enable_moe_block": False},
    **{"layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 4, "full_attention"]},
    **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 131},
}
FOREIGN: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    # The loop over layers reads `block_type` of each; the only attention is behind a mixer and before an MLP.
    "nemotron_h": ({"layers_block_type": _MIXERS, "num_hidden_layers": 12}, (0, 1, 2, 3, 8, 9, 10, 11), 5),
    # Attention of a class of ours, and slices that are the same for all layers: parts of complex numbers.
    "deepseek_v2": ({"num_hidden_layers": 5, "first_k_dense_replace": 1}, (0, 1, 2, 4), 4),
    "bloom": ({"num_hidden_layers": 5}, (0, 1, 4), 3),
    "gemma4_text": (_GEMMA, (0, 1, 2, 3, 5, 6), 6),
}


SHOWN = pytest.mark.shown_by("graphs/test_repeated_layers.py::test_few_layers_of_transformers_code_are_traced")


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("name", [pytest.param(name, marks=SHOWN) if name == "bloom" else name for name in FOREIGN])
def test_few_layers_of_transformers_code_are_traced(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fields, numbers, num_pieces = FOREIGN[name]
    write_checkpoint(tmp_path, replace(family(name), changes={**family(name).changes, **fields}))
    config = resolve(EngineOptions(model=tmp_path, load_format="dummy", device="cpu", skip_tokenizer_init=True))
    signature = forward_signature(config)
    few = trace(model_of(config), signature)
    assert f"the layers {list(numbers)}" in few.dynamo_graph
    monkeypatch.setattr(trace_module, "traced_layers", lambda model: ())
    every = trace(model_of(config), signature)
    assert computed(few) == computed(every)
    _, pieces = make_plan(few.module.graph, split(few.module.graph))
    assert len(pieces) == num_pieces
