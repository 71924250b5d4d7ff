"""Has a checkpoint's processor return pixels as bytes with a table of their values, see models/vision/pixel_codes.py.

The processor resizes the image and divides it into patches, but neither scales nor repeats the pixels. Its own results
for a small image make the table, so the values are those of the processor to the bit. This module runs in the workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from compiled_engine.models.vision.pixel_codes import CODES, NUM_VALUES, PIXELS, TABLE, look_up

# Image processors whose patches are cut from resized pixels, without padding.
CLASSES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
# Settings with which these return the resized pixels themselves, of one frame.
AS_BYTES: Mapping[str, Any] = {"do_rescale": False, "do_normalize": False, "temporal_patch_size": 1}
NUM_CHANNELS = 3
_MOST_TABLES = 64

Process = Callable[[Any, Mapping[str, Any]], dict[str, Any]]
"""Calls the processor: an image and settings to its outputs by name."""


class PixelCoding:
    """Processes images, with bytes in place of pixel values where the two are equivalent.

    image_processor: the checkpoint's. process: calls the checkpoint's whole processor.
    """

    def __init__(self, image_processor: Any, process: Process) -> None:
        self._image_processor, self._call = image_processor, process
        self._tables: dict[str, torch.Tensor | None] = {}  # by the settings as JSON

    def process(self, image: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the processor's outputs by name, with CODES and TABLE in place of pixel values if possible.

        Raises what the processor raises.
        """
        if (table_CV := self.table(settings)) is not None:
            outputs = self._call(image, {**settings, **AS_BYTES})
            if (codes_PX := _as_bytes(outputs.pop(PIXELS))) is not None:
                return {**outputs, CODES: codes_PX.unflatten(-1, (NUM_CHANNELS, -1)), TABLE: table_CV}
        return self._call(image, settings)

    def table(self, settings: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the value of each byte in each channel, [C channels, V byte values].

        Returns None if pixels cannot be coded with these settings.
        """
        if type(self._image_processor).__name__ not in CLASSES or not _leave_frames(settings):
            return None
        stated = json.dumps(settings, sort_keys=True)
        if stated not in self._tables:
            if len(self._tables) == _MOST_TABLES:
                self._tables.clear()
            try:
                self._tables[stated] = self._learn(dict(settings, do_resize=False))
            except Exception:  # of settings that the processor refuses, which its call for an image reports
                self._tables[stated] = None
        return self._tables[stated]

    def _learn(self, settings: Mapping[str, Any]) -> torch.Tensor | None:
        """Make the table of `table` from the processor's results for a small image that has every byte in each channel.

        Returns None if the table does not reproduce the processor's values exactly.
        """
        about = {
            name: settings.get(name, getattr(self._image_processor, name)) for name in ("patch_size", "merge_size")
        }
        sample = _all_bytes(about["patch_size"] * about["merge_size"])
        values_PX = self._call(sample, settings)[PIXELS]
        codes_PX = _as_bytes(self._call(sample, {**settings, **AS_BYTES})[PIXELS])
        if codes_PX is None:
            return None
        num_frames = values_PX.shape[-1] // codes_PX.shape[-1]
        codes_PCQ = codes_PX.unflatten(-1, (NUM_CHANNELS, -1))
        values_PCQ = values_PX.unflatten(-1, (NUM_CHANNELS, num_frames, -1))[:, :, 0]
        table_CV = values_PX.new_zeros(NUM_CHANNELS, NUM_VALUES)
        for channel in range(NUM_CHANNELS):
            table_CV[channel, codes_PCQ[:, channel].flatten().long()] = values_PCQ[:, channel].flatten()
        return table_CV if torch.equal(look_up(codes_PCQ, table_CV, num_frames), values_PX) else None


def _leave_frames(settings: Mapping[str, Any]) -> bool:
    """Return whether settings keep the number of frames per patch, and have no nested groups such as images_kwargs."""
    return not any(name == "temporal_patch_size" or name.endswith("_kwargs") for name in settings)


def _all_bytes(multiple: int) -> np.ndarray[Any, Any]:
    """Return an image in which each channel has every byte value, uint8 [side, side, channels].

    multiple: the side is a multiple of it.
    """
    side = multiple * -(-16 // multiple)
    places = np.arange(side * side).reshape(side, side, 1)
    return ((places * 37 + np.arange(NUM_CHANNELS) * 11) % NUM_VALUES).astype(np.uint8)


def _as_bytes(pixels: torch.Tensor) -> torch.Tensor | None:
    """Return pixel values converted to uint8; None if any value is not an integer from 0 to 255."""
    if pixels.dtype == torch.uint8:
        return pixels
    values = (pixels.float() if pixels.is_floating_point() else pixels).numpy()
    with np.errstate(invalid="ignore"):  # of values that no byte has
        codes = values.astype(np.uint8)
    # Compared by numpy, which converts piece by piece: copies of millions of values take longer than the processor.
    return torch.from_numpy(codes) if bool((codes == values).all()) else None
