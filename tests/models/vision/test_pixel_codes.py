"""Pixels that come as bytes with a table of their values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vision_models import random_image, vision_config

from compiled_engine.models.vision.description import describe_vision
from compiled_engine.models.vision.inputs import blank_image, check_image, num_embeddings, tower_inputs
from compiled_engine.models.vision.pixel_codes import CODES, PIXELS, TABLE, look_up
from compiled_engine.vision import VisionDescription


def described(architecture: str) -> VisionDescription:
    found = describe_vision(vision_config(architecture))
    assert found is not None
    return found


QWEN, GEMMA = (described(f"{name}ForConditionalGeneration") for name in ("Qwen3VL", "Gemma4"))


def coded_image(height: int, width: int, seed: int) -> dict[str, torch.Tensor]:
    """Return an image with random codes and a table of its own."""
    image = random_image(QWEN, height, width)
    generator = torch.Generator().manual_seed(seed)
    shape = (len(image.pop(PIXELS)), QWEN.num_channels, QWEN.patch_size**2)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return {**image, CODES: codes, TABLE: torch.randn(QWEN.num_channels, 256, generator=generator)}


@given(
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_values_are_those_of_the_table(patches: int, channels: int, size: int, frames: int, dtype: torch.dtype) -> None:
    codes = torch.randint(0, 256, (patches, channels, size), dtype=torch.uint8)
    table = torch.randn(channels, 256).to(dtype)

    values = look_up(codes, table, frames)

    assert (values.dtype, values.shape) == (dtype, (patches, channels * frames * size))
    for patch, channel, frame in torch.cartesian_prod(*map(torch.arange, (patches, channels, frames))).tolist():
        start = (channel * frames + frame) * size
        found = values[patch, start : start + size].tolist()
        assert found == [float(table[channel, code]) for code in codes[patch, channel].tolist()]


def test_a_tower_reads_codes_as_the_values_that_they_stand_for() -> None:
    images = [coded_image(2, 3, 0), random_image(QWEN, 1, 2), coded_image(4, 1, 1)]
    values = [
        {**image, PIXELS: look_up(image[CODES], image[TABLE], QWEN.temporal_patch_size)} if CODES in image else image
        for image in images
    ]
    expected = tower_inputs(
        QWEN, [{name: image[name] for name in (PIXELS, "image_grid_thw")} for image in values], torch.bfloat16
    )

    found = tower_inputs(QWEN, images, torch.bfloat16)

    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_codes_of_other_shapes_or_for_other_towers_are_refused() -> None:
    image = coded_image(2, 3, 0)
    check_image(QWEN, image)
    check_image(QWEN, blank_image(QWEN, 7))
    assert num_embeddings(QWEN, image) == 6
    with pytest.raises(ValueError, match=r"the shape \[24, 3, 15\]; allowed for Qwen3VL.*: \[24, 3, 16\]"):
        check_image(QWEN, {**image, CODES: image[CODES][..., 1:]})
    with pytest.raises(ValueError, match=r"the table of pixels has the shape \[2, 256\]; allowed: \[3, 256\]"):
        check_image(QWEN, {**image, TABLE: image[TABLE][1:]})
    with pytest.raises(ValueError, match="output lacks pixel_table, which Qwen3VL"):
        check_image(QWEN, {name: tensor for name, tensor in image.items() if name != TABLE})
    with pytest.raises(ValueError, match="output lacks pixel_values, which Gemma4"):
        check_image(GEMMA, {**image, "image_position_ids": torch.zeros(1, 24, 2)})
