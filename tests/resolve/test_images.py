"""Which checkpoints read images, with which limits, and the reason where one does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vision_models import vision_config

from compiled_engine.config import EngineConfig
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve

QWEN, GEMMA = "Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"
LLAVA, IDEFICS = "LlavaForConditionalGeneration", "Idefics3ForConditionalGeneration"
GEMMA4 = "Gemma4ForConditionalGeneration"


def resolved(folder: Path, architecture: str, processor: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(vision_config(architecture))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor or {}))
    given = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "mode": "compiled"} | options
    return resolve(EngineOptions(model=folder, **given))


def test_limits_follow_from_the_processor_and_the_step(tmp_path: Path) -> None:
    config = resolved(tmp_path, QWEN, {"size": {"longest_edge": 64_000}}, max_num_batched_tokens=512)
    images = config.images
    assert images is not None
    assert (images.most_embeddings, images.cache_size, images.step_size) == (1000, 1000, 512)
    given = resolved(tmp_path, QWEN, None, encoder_cache_size=99, max_num_encoder_input_tokens=7).images
    assert given is not None
    assert (given.most_embeddings, given.cache_size, given.step_size) == (99, 99, 7)
    smaller = resolved(tmp_path, QWEN, mm_processor_kwargs={"max_pixels": 6400}).images
    assert smaller is not None
    assert smaller.most_embeddings == 100
    assert json.loads(images.config)["model_type"] == "qwen3_vl"


def test_embeddings_of_gemma4_follow_from_the_processor_and_belong_to_one_step(tmp_path: Path) -> None:
    for processor, options, most in (
        (None, {}, 280),
        ({"max_soft_tokens": 140}, {}, 140),
        ({"max_soft_tokens": 140}, {"mm_processor_kwargs": {"max_soft_tokens": 70}}, 70),
    ):
        images = resolved(tmp_path, GEMMA4, processor, **options).images
        assert images is not None
        assert images.most_embeddings == most
    few = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    reason = "max_num_batched_tokens is 64, but the tokens of an image see each other, and there are 280"
    assert resolved(tmp_path, GEMMA4, **few).reasons["image_input"] == reason
    small = json.loads(vision_config(GEMMA4))  # whose images are as causal as text
    del small["text_config"]["use_bidirectional_attention"]
    (tmp_path / "config.json").write_text(json.dumps(small))
    images = resolved(tmp_path, GEMMA4, **few).images
    assert images is not None
    assert (images.vision.both_ways, images.most_embeddings) == (False, 280)


def test_settings_within_those_of_the_whole_processor_come_first(tmp_path: Path) -> None:
    """As newer versions of transformers write and read them."""
    nested = {"processor_class": "Qwen3VLProcessor", "image_processor": {"size": {"longest_edge": 6400}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    for beside in (None, {"size": {"longest_edge": 64_000}}):
        images = resolved(tmp_path, QWEN, beside).images
        assert images is not None
        assert images.most_embeddings == 100


@pytest.mark.parametrize(
    ("architecture", "processor", "most"),
    [
        ("InternVLForConditionalGeneration", {"max_patches": 3}, 4),
        ("InternVLForConditionalGeneration", {}, 13),
        (
            "Idefics3ForConditionalGeneration",
            {"size": {"longest_edge": 90}, "max_image_size": {"longest_edge": 30}},
            10,
        ),
        (GEMMA, {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 2}, 3),
        (GEMMA, {}, 1),
    ],
)
def test_an_image_may_have_several_tiles(
    architecture: str, processor: dict[str, Any], most: int, tmp_path: Path
) -> None:
    images = resolved(tmp_path, architecture, processor).images
    assert images is not None
    assert images.most_embeddings == most * images.vision.tile_embeddings


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        (QWEN, {"language_model_only": True}, "language_model_only is True"),
        (QWEN, {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        (QWEN, {"limit_mm_per_prompt": {"image": 0}}, "limit_mm_per_prompt allows none"),
        (
            GEMMA,
            {"max_num_batched_tokens": 8, "max_num_seqs": 4},
            "max_num_batched_tokens is 8, but the tokens of an image see each other, and there are 9",
        ),
        (
            GEMMA,
            {"max_prefill_tokens": 5},
            "max_prefill_tokens is 5, but the tokens of an image see each other, and there are 9",
        ),
    ],
)
def test_an_engine_says_why_it_reads_no_images(
    architecture: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = resolved(tmp_path, architecture, **options)
    assert config.images is None
    assert config.reasons["image_input"] == reason


@pytest.mark.parametrize("architecture", [LLAVA, "Mistral3ForConditionalGeneration"])
def test_the_tower_of_pixtral_is_refused_by_its_name(architecture: str, tmp_path: Path) -> None:
    """The text model runs alone."""
    values = json.loads(vision_config(LLAVA))
    kinds = {"model_type": "mistral3" if architecture != LLAVA else "llava", "architectures": [architecture]}
    values |= kinds | {"vision_config": {"model_type": "pixtral"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = resolved(tmp_path, architecture)
    assert config.images is None
    assert config.model.wrapper == architecture
    assert config.reasons["image_input"] == (
        f"the checkpoint is a {architecture}: its vision tower pixtral loops over the sizes of the images, which "
        "cannot be traced whole, and its text model runs alone"
    )
    with pytest.raises(ValueError, match=r"encoder_cache_size is 8, but the checkpoint is a .* tower pixtral loops"):
        resolved(tmp_path, architecture, encoder_cache_size=8)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("mm_processor_kwargs", {"max_pixels": 6400}),
        ("max_image_pixels", 100),
        ("image_workers", 2),
        ("allowed_media_domains", ("images.example",)),
    ],
)
def test_options_of_images_need_a_multimodal_checkpoint(option: str, value: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {option: value}
    with pytest.raises(ValueError, match=rf"^{option} is .*, but the model takes only text; allowed: "):
        resolve(EngineOptions(device="cpu", **given))
    assert resolved(tmp_path, QWEN, language_model_only=True, **given).image_input is None
    assert resolve(EngineOptions(device="cpu", limit_mm_per_prompt={"image": 0})).image_input is None


def test_arguments_of_the_processor_are_values_of_json(tmp_path: Path) -> None:
    for given, message in (({"size": {1}}, "must have values of JSON: "), ({1: 2}, "must have strings as keys")):
        with pytest.raises(TypeError, match=f"^mm_processor_kwargs {message}"):
            resolved(tmp_path, QWEN, mm_processor_kwargs=given)


def test_an_unknown_kind_of_media_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit_mm_per_prompt has 'images'; allowed: image, video, audio"):
        resolved(tmp_path, QWEN, limit_mm_per_prompt={"images": 1})


def test_limits_of_images_need_a_tower() -> None:
    with pytest.raises(ValueError, match="encoder_cache_size is 8, but the model takes only text; allowed: None"):
        resolve(EngineOptions(device="cpu", encoder_cache_size=8))
