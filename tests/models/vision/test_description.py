"""Descriptions of vision towers, and positions of prompts with images."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from vision_models import ARCHITECTURES, PLACEHOLDER, VOCAB_SIZE, random_image, vision_config, vision_model

from compiled_engine.models.vision.description import describe_vision, why_not_described
from compiled_engine.models.vision.inputs import check_image, num_embeddings
from compiled_engine.models.vision.positions import image_positions
from compiled_engine.vision import VisionDescription

WITH_POSITIONS = [name for name in ARCHITECTURES if name.startswith("Qwen")]


def described(architecture: str, **changes: object) -> VisionDescription:
    found = describe_vision(vision_config(architecture, **changes))
    assert found is not None
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_description_is_plain_data(architecture: str) -> None:
    found = described(architecture)
    assert found.image_token_id == PLACEHOLDER
    assert found.embedding_size == 64
    assert msgspec.json.decode(msgspec.json.encode(found), type=VisionDescription) == found


def test_levels_windows_and_tiles_are_described() -> None:
    qwen3, qwen2_5 = (described(f"{name}ForConditionalGeneration") for name in ("Qwen3VL", "Qwen2_5_VL"))
    assert (qwen3.levels, qwen3.row_size, qwen3.mrope_section, qwen3.mrope_interleaved) == (2, 192, (4, 2, 2), True)
    assert (qwen2_5.window_size, qwen2_5.mrope_section, qwen2_5.mrope_interleaved) == (16, (2, 3, 3), False)
    assert qwen2_5.most_embeddings(128 * 64) == 128
    llava, gemma = (described(f"{name}ForConditionalGeneration") for name in ("Llava", "Gemma3"))
    assert (llava.tile_embeddings, llava.tile_patches, llava.both_ways) == (36, 37, False)
    assert (gemma.tile_embeddings, gemma.tile_patches, gemma.both_ways) == (9, 36, True)
    assert gemma.most_embeddings(0, max_tiles=3) == 27
    next_llava = described("LlavaNextForConditionalGeneration")
    assert next_llava.most_embeddings(0) == 36 + 12 * 13
    assert next_llava.most_tiles(100) == 10
    with_class = described("LlavaForConditionalGeneration", vision_feature_select_strategy="full")
    assert with_class.tile_embeddings == 37


def test_positions_that_a_processor_states_are_those_of_a_grid() -> None:
    gemma = described("Gemma4ForConditionalGeneration")
    assert (gemma.merge_size, gemma.both_ways, gemma.both_ways_in_windows, gemma.layer_token_id) == (2, True, True, 0)
    image = dict(random_image(gemma, 2, 3))
    check_image(gemma, image)
    assert num_embeddings(gemma, image) == 6
    names = {"image_position_ids": image["image_position_ids"].flip(-1)}
    with pytest.raises(ValueError, match=r"other positions than those of a grid \[1, 6, 4\], row by row"):
        check_image(gemma, image | names)
    with pytest.raises(ValueError, match="output lacks image_position_ids, which Gemma4"):
        check_image(gemma, {"pixel_values": image["pixel_values"]})
    with pytest.raises(ValueError, match=r"the grid \[1, 2, 82\]; allowed for Gemma4.*: at most 80 on a side"):
        check_image(gemma, random_image(gemma, 1, 41))
    with pytest.raises(ValueError, match=r"the shape \[1, 32, 47\]; allowed for Gemma4.*: \[1, 32, 48\]"):
        check_image(gemma, image | {"pixel_values": image["pixel_values"][..., 1:]})


def test_other_checkpoints_have_no_description() -> None:
    assert describe_vision(json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})) is None
    assert describe_vision(json.dumps({"model_type": "llama"})) is None
    pixtral = vision_config("LlavaForConditionalGeneration", vision_config={"model_type": "pixtral"})
    assert describe_vision(pixtral) is None
    for name in ("InternVL", "LlavaNext"):
        whole = vision_config(f"{name}ForConditionalGeneration", vision_feature_select_strategy="full")
        assert describe_vision(whole) is None
        assert why_not_described(whole).startswith("vision_feature_select_strategy is 'full' instead of 'default'")


@pytest.mark.parametrize("architecture", WITH_POSITIONS)
@pytest.mark.parametrize(
    "sizes", [[], [(2, 3)], [(4, 1), (1, 5), (3, 3)]], ids=["no image", "one image", "three images"]
)
def test_positions_are_those_of_transformers(architecture: str, sizes: list[tuple[int, int]]) -> None:
    description = described(architecture)
    images = [random_image(description, *size) for size in sizes]
    ids = [5, 6]
    for image in images:
        ids += [7, *[PLACEHOLDER] * num_embeddings(description, image), 8, 9]
    ids.append(VOCAB_SIZE - 1)
    positions_3L, offset = image_positions(description, ids, images)
    model = vision_model(vision_config(architecture)).model
    ids_1L = torch.tensor([ids])
    grids = torch.cat([image["image_grid_thw"] for image in images]) if images else None
    expected, delta = model.get_rope_index(ids_1L, (ids_1L == PLACEHOLDER).int(), image_grid_thw=grids)
    assert positions_3L.dtype == torch.int32
    assert torch.equal(positions_3L, expected[:, 0].int())
    assert offset == int(delta)


def test_prompts_with_other_placeholders_are_refused() -> None:
    description = described(WITH_POSITIONS[0])
    image = random_image(description, 2, 2)
    for ids in ([1, *[PLACEHOLDER] * 3, 2], [1, PLACEHOLDER, PLACEHOLDER, 3, PLACEHOLDER, PLACEHOLDER], [1, 2]):
        with pytest.raises(ValueError, match="an image has 4 embeddings, but the prompt has fewer placeholders"):
            image_positions(description, ids, [image])
    with pytest.raises(ValueError, match="more placeholders than its 1 images have embeddings"):
        image_positions(description, [PLACEHOLDER] * 5, [image])
