"""Prompts with images: tokens and log-probabilities are those of transformers' whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from image_engines import Oracle, Prompt, check, config_of, outputs_of, running
from vision_models import small_vision_config

from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiler.build import apply_passes
from compiled_engine.graphs.compiler.signature import callables_of, compile_ranges
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.trace import trace, without_storage
from compiled_engine.models.checkpoint.build_model import build_model

QWEN = "Qwen3VLForConditionalGeneration"
ARCHITECTURES = (
    "Qwen2_5_VLForConditionalGeneration",
    QWEN,
    "Qwen2VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
)


def prompts_of(oracle: Oracle) -> dict[str, Prompt]:
    """Of no, one and three images, of two sizes."""
    small, large = oracle.image(2, 3, seed=1), oracle.image(4, 5, seed=2)
    return {
        "text": Prompt((5, 9, 11, 40, 41, 42, 7)),
        "one": Prompt((5, None, 11, 12, 13), (small,)),
        "large": Prompt((7, 8, None, 3), (large,)),
        "three": Prompt((None, 20, 21, None, 22, None, 23, 24), (small, large, oracle.image(2, 3, seed=3))),
    }


OF_MODE: dict[str, dict[str, Any]] = {
    "eager": {"mode": "eager"},
    "compiled": {"mode": "compiled", "compile_ranges": ()},
}
SHOWN = pytest.mark.shown_by(
    "models/vision/test_tower.py::test_one_compiled_graph_serves_all_sizes",
    "passes/test_image_passes.py::test_values_are_those_of_hooks",
)


# The compiled engine is that of test_tower_updates.py, which finds it in the cache.
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("architecture", "mode"),
    [
        *((architecture, "eager") for architecture in ARCHITECTURES),
        (QWEN, "compiled"),
        *(
            pytest.param(architecture, "compiled", marks=SHOWN)
            for architecture in ARCHITECTURES
            if architecture != QWEN
        ),
    ],
)
def test_tokens_are_those_of_the_whole_model(architecture: str, mode: str, tmp_path: Path) -> None:
    """Together, with long prompts cut into chunks within an image."""
    small = small_vision_config(architecture) if (mode, architecture) == ("compiled", QWEN) else None
    oracle = Oracle(tmp_path, architecture, small)
    prompts = prompts_of(oracle)
    with running(oracle, **OF_MODE[mode]) as core:
        found = outputs_of(core, [oracle.request(name, each) for name, each in prompts.items()])
        check(oracle, prompts, found)


@pytest.mark.shown_by("passes/test_image_passes.py::test_the_usual_forward_is_that_of_the_text_model")
def test_steps_of_text_run_the_code_of_the_text_model(tmp_path: Path) -> None:
    """The plans of an engine that reads no images, and their pieces, are those of one that does, to the byte."""
    oracle = Oracle(tmp_path, QWEN)
    alone, both = (
        plans_of(config_of(oracle, mode="compiled", compile_ranges=(), language_model_only=text_only))
        for text_only in (True, False)
    )
    assert alone
    assert {name: both[name] for name in alone} == alone
    assert both.keys() - alone.keys() == {"images"}


def plans_of(config: EngineConfig) -> dict[str, tuple[str, dict[str, str]]]:
    """The plan of each callable, and its pieces."""
    found = {}
    for name, signature in callables_of(config).items():
        traced = trace(without_storage(build_model(config.model), config.device), signature)
        module, _ = apply_passes(config, traced, *compile_ranges(config))
        plan, pieces = make_plan(module.graph, split(module.graph))
        found[name] = plan.to_json(), pieces
    return found
