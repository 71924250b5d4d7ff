"""Requests with images in every way in which an engine may compute them, against transformers' whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from image_engines import TOLERANCE, Oracle, Prompt, check, outputs_of, running
from vision_models import small_vision_config

from compiled_engine.engine.core import EngineCore
from compiled_engine.features.prompt_logprobs.extras import rows_in

pytestmark = pytest.mark.usefixtures("one_thread")
QWEN, LLAVA = "Qwen3VLForConditionalGeneration", "LlavaForConditionalGeneration"
GEMMA, GEMMA4 = "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"


@pytest.fixture(scope="module", params=[QWEN, LLAVA, GEMMA, pytest.param(GEMMA4, marks=pytest.mark.product(one_in=3))])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def shared(oracle: Oracle) -> Iterator[EngineCore]:
    with running(oracle, mode="eager", encoder_cache_size=128) as core:
        yield core


@pytest.fixture
def core(shared: EngineCore) -> Iterator[EngineCore]:
    """An engine whose caches are empty, and are again afterwards."""
    shared.reset_prefix_cache()
    yield shared
    shared.reset_prefix_cache()
    assert shared.metrics()["image_cache_rows_used"] == 0


def cached(core: EngineCore) -> int:
    return int(core.metrics()["prefix_hits"])


def test_an_image_of_before_runs_no_tower(oracle: Oracle, core: EngineCore) -> None:
    """In another request whose prompt begins differently, so that no prefix is shared."""
    image = oracle.image(3, 3, seed=5)
    prompts = {"first": Prompt((4, None, 9), (image,)), "second": Prompt((8, 8, None, 9, None), (image, image))}
    for name, prompt in prompts.items():
        before = core.metrics()
        check(oracle, {name: prompt}, outputs_of(core, [oracle.request(name, prompt)]))
        after = core.metrics()
        assert after["tower_runs"] == before["tower_runs"] + (name == "first")
        assert (after["tower_seconds"] > before["tower_seconds"]) == (name == "first")
        assert after["image_cache_hits"] == before["image_cache_hits"] + 2 * (name == "second")


def test_prompts_with_the_same_image_share_a_prefix_and_others_none(oracle: Oracle, core: EngineCore) -> None:
    """Their token ids are equal; prefixes end within the image."""
    images = {name: oracle.image(4, 5, seed=seed) for name, seed in (("a", 1), ("b", 2), ("again", 1))}
    for name, image in images.items():
        before, runs = cached(core), core.metrics()["tower_runs"]
        prompt = Prompt((4, 5, 6, None, 9), (image,))
        check(oracle, {name: prompt}, outputs_of(core, [oracle.request(name, prompt)]))
        length = len(prompt.expanded(oracle.vision))
        assert cached(core) - before == ((length - 1) // 8 * 8 if name == "again" else 0)
        assert core.metrics()["tower_runs"] == runs + (name != "again")


def test_a_prefix_that_ends_within_an_image_continues_with_the_rest_of_it(oracle: Oracle, core: EngineCore) -> None:
    """The prompts part within the image's last block; the embeddings are in the cache, or computed again."""
    image = oracle.image(4, 5, seed=3)
    prompts = {"one": Prompt((4, None, 9, 9), (image,)), "other": Prompt((4, None, 7, 7, 7), (image,))}
    for name, prompt in prompts.items():
        before = cached(core)
        check(oracle, {name: prompt}, outputs_of(core, [oracle.request(name, prompt)]))
        assert (cached(core) > before) == (name == "other")


def test_requests_of_all_kinds_are_packed_into_steps(oracle: Oracle, core: EngineCore) -> None:
    """Texts that generate meanwhile, and prompts that come while others are cut into chunks."""
    prompts: dict[str, Prompt] = {"text": Prompt((5, 6, 7, 8, 9))}
    for number in range(5):
        image = oracle.image(2 + number % 3, 5, seed=number)
        prompts[f"image {number}"] = Prompt((3, None, *range(40, 45 + 3 * number)), (image,))
        prompts[f"text {number}"] = Prompt(tuple(range(50, 60 + number)))
    requests = [oracle.request(name, prompt, max_tokens=9) for name, prompt in prompts.items()]
    check(oracle, prompts, outputs_of(core, requests, steps_between=1))


def test_an_image_that_ends_the_prompt(oracle: Oracle, core: EngineCore) -> None:
    prompts = {"one": Prompt((5, None), (oracle.image(2, 3, seed=8),)), "alone": Prompt((None,), (oracle.image(4, 4),))}
    check(oracle, prompts, outputs_of(core, [oracle.request(name, each) for name, each in prompts.items()]))


@pytest.mark.product(one_in=1000, each=("limits",))
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"encoder_cache_size": 24}, id="few rows"),
        pytest.param({"max_num_encoder_input_tokens": 7}, id="one image a step"),
        pytest.param({"num_blocks": 14, "max_num_seqs": 4}, id="preempted"),
        pytest.param({"num_blocks": 14, "encoder_cache_size": 20, "enable_prefix_caching": False}, id="all of it"),
        pytest.param({"async_scheduling": True, "num_blocks": 14}, id="steps in flight"),
        pytest.param({"max_num_batched_tokens": 4}, id="short steps"),
    ],
)
def test_limits_change_no_result(oracle: Oracle, limits: dict[str, Any]) -> None:
    """Images are computed when there is room for them, evicted, and computed again for a preempted request."""
    images = [oracle.image(4, 5, seed=seed) for seed in range(4)]
    prompts = {
        str(number): Prompt((3 + number, None, 9, None, *range(30, 36)), (images[number], images[number - 1]))
        for number in range(4)
    }
    if oracle.vision.tile_size:  # an image has 36 embeddings
        limits = {**limits} | ({"encoder_cache_size": 72} if "encoder_cache_size" in limits else {})
        limits |= {"num_blocks": 25} if "num_blocks" in limits else {}
    if oracle.vision.both_ways:  # it has 9 or 20, which belong to one step
        longest = oracle.vision.tile_embeddings or 20
        limits |= {"num_blocks": 11} if "num_blocks" in limits and oracle.vision.tile_size else {}
        limits |= {"max_num_batched_tokens": longest} if "max_num_batched_tokens" in limits else {}
    with running(oracle, mode="eager", **limits) as core:
        requests = [oracle.request(name, prompt, max_tokens=24) for name, prompt in prompts.items()]
        check(oracle, prompts, outputs_of(core, requests))
        found = core.metrics()
        assert (found["preemptions"] > 0) == ("num_blocks" in limits)
        assert found["tower_images"] >= len(images)
        if "max_num_encoder_input_tokens" in limits:
            assert found["tower_runs"] == found["tower_images"]


def test_log_probabilities_of_a_prompt_with_images(oracle: Oracle, core: EngineCore) -> None:
    prompt = Prompt((5, 6, None, 9, 10, None, 3), (oracle.image(3, 3), oracle.image(4, 5)))
    request = oracle.request("r", prompt, prompt_logprobs=0, max_tokens=1)
    core.add(request)
    found: list[float] = []
    while core.has_unfinished():
        for output in core.step():
            found += [each.logprobs[0] for _, rows in [rows_in(output.extras) or (0, [])] for each in rows]
    ids = torch.tensor(prompt.expanded(oracle.vision))
    expected = oracle.logprobs(ids.tolist(), prompt.images)[:-1].gather(1, ids[1:, None]).flatten()
    assert found == pytest.approx(expected.tolist(), abs=TOLERANCE)


DRAFTS: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2}


def check_with(oracle: Oracle, **options: Any) -> None:
    """Check an engine with these options and requests of several images, of one, and of none."""
    images = [oracle.image(4, 5, seed=1), oracle.image(2, 3, seed=2)]
    prompts = {
        "both": Prompt((3, None, 9, 9, 9, 9, None, 9, 9, 9), tuple(images)),
        "one": Prompt((*range(20, 40), None, 7), (images[1],)),
        "text": Prompt((5, 6, 5, 6, 5, 6, 5)),
    }
    with running(oracle, **options) as core:
        requests = [oracle.request(name, prompt, max_tokens=12) for name, prompt in prompts.items()]
        check(oracle, prompts, outputs_of(core, requests))


@pytest.mark.product(one_in=1000, each=("options",))
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(DRAFTS, id="drafts"),
        pytest.param(TWO_RANKS, id="two ranks"),
        pytest.param({"model_impl": "transformers"}, id="transformers' code"),
        pytest.param({"enable_lora": True}, id="with adapters"),
    ],
)
def test_other_features_change_no_result(oracle: Oracle, options: dict[str, Any]) -> None:
    check_with(oracle, mode="eager", **options)


WHOLE: dict[str, Any] = {"mode": "compiled", "compile_ranges": ()}


@pytest.mark.shown_by(
    "features/images/test_image_engine.py::test_tokens_are_those_of_the_whole_model",
    "features/images/test_image_requests.py::test_other_features_change_no_result",
    "passes/test_image_passes.py::test_values_are_those_of_hooks",
)
@pytest.mark.parametrize("architecture", [QWEN, LLAVA])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(WHOLE | TWO_RANKS | {"strict_passes": True}, id="two ranks"),
        pytest.param({"mode": "auto"}, id="recorded decodes"),
        pytest.param(WHOLE | {"enable_lora": True}, id="with adapters"),
    ],
)
def test_other_features_of_compiled_engines_change_no_result(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    check_with(Oracle(tmp_path, architecture, small_vision_config(architecture)), **options)


def test_the_text_model_runs_alone_if_the_user_wants_it(oracle: Oracle) -> None:
    with running(oracle, mode="eager", language_model_only=True) as text:
        assert text.config.images is None
        assert text.config.reasons["image_input"] == "language_model_only is True"
        check(oracle, {"t": Prompt((5, 6))}, outputs_of(text, [oracle.request("t", Prompt((5, 6)))]))
