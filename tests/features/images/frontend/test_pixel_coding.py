"""Bytes in place of pixel values, with processors made up here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from compiled_engine.features.images.frontend.pixel_coding import AS_BYTES, PixelCoding
from compiled_engine.models.vision.pixel_codes import CODES, PIXELS, TABLE, look_up


class Qwen2VLImageProcessor:
    """Has the name of an image processor whose pixels can be coded, and settings like its."""

    patch_size, merge_size = 2, 1


def pixel_coding(dtype: torch.dtype, other: float | None = None) -> PixelCoding:
    """Return a coding whose processor takes an image as one patch of two frames. other: the image's first value."""

    def process(image: np.ndarray[Any, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        pixels_CQ = torch.from_numpy(image.transpose(2, 0, 1).reshape(3, -1).copy())
        if AS_BYTES.items() <= settings.items():
            found = pixels_CQ.flatten().unsqueeze(0).to(dtype)
            if other is not None and len(image) == 2:
                found[0, 0] = other
            return {PIXELS: found}
        values_C1Q = (pixels_CQ.float() / 255 - 0.5).unsqueeze(1)
        return {PIXELS: values_C1Q.expand(-1, 2, -1).reshape(1, -1)}

    return PixelCoding(Qwen2VLImageProcessor(), process)


IMAGE = np.random.default_rng(0).integers(0, 256, (2, 2, 3), dtype=np.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64, torch.bfloat16])
def test_bytes_stand_for_the_processors_values(dtype: torch.dtype) -> None:
    coding = pixel_coding(dtype)
    found = coding.process(IMAGE, {})
    expected = coding.process(IMAGE, {"images_kwargs": {}})[PIXELS]
    assert found[CODES].dtype == torch.uint8
    assert torch.equal(look_up(found[CODES], found[TABLE], 2), expected)


@pytest.mark.parametrize("other", [0.5, -1.0, 256.0, math.nan, math.inf, 1e30])
@pytest.mark.filterwarnings("error")
def test_a_value_that_is_no_byte_has_the_processor_run_as_a_whole(other: float) -> None:
    assert CODES not in pixel_coding(torch.float32, other).process(IMAGE, {})
