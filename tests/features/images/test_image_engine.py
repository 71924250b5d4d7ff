"""Prompts with images: tokens and log-probabilities are those of transformers' whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
from image_engines import Oracle, Prompt, check, outputs_of, running

ARCHITECTURES = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
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


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda name: name.removesuffix("ForConditionalGeneration"))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp(request.param), request.param)


def prompts_of(oracle: Oracle) -> dict[str, Prompt]:
    """Of no, one and three images, of two sizes."""
    small, large = oracle.image(2, 3, seed=1), oracle.image(4, 5, seed=2)
    return {
        "text": Prompt((5, 9, 11, 40, 41, 42, 7)),
        "one": Prompt((5, None, 11, 12, 13), (small,)),
        "large": Prompt((7, 8, None, 3), (large,)),
        "three": Prompt((None, 20, 21, None, 22, None, 23, 24), (small, large, oracle.image(2, 3, seed=3))),
    }


# Compiled towers: models/vision/test_tower.py. Graphs of text that take embeddings: passes/test_image_passes.py.
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.product(one_in=1000))])
def test_tokens_are_those_of_the_whole_model(oracle: Oracle, mode: str) -> None:
    """Together, with long prompts cut into chunks within an image."""
    prompts = prompts_of(oracle)
    with running(oracle, mode=mode) as core:
        found = outputs_of(core, [oracle.request(name, each) for name, each in prompts.items()])
        check(oracle, prompts, found)


@pytest.mark.usefixtures("one_thread")
def test_steps_of_text_run_the_code_of_the_text_model(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The plans of an engine that reads no images, and their pieces, are those of one that does, to the byte."""
    oracle = Oracle(tmp_path_factory.mktemp("text"), "Qwen3VLForConditionalGeneration")
    plans, pieces = [], []
    for text_only in (True, False):
        with running(oracle, mode="compiled", cache_dir=tmp_path, language_model_only=text_only) as core:
            entry = Path(core.metrics()["cache_entry"])
            plans.append({str(path.relative_to(entry)): path.read_bytes() for path in entry.rglob("plan.json")})
            pieces.append({path.name: path.read_bytes() for path in (entry / "pieces").glob("*.json")})
    alone, both = plans
    assert alone
    assert {name: both[name] for name in alone} == alone
    assert {name.split("/")[0] for name in both.keys() - alone.keys()} == {"images"}
    assert {name: pieces[1][name] for name in pieces[0]} == pieces[0]
