"""Represents pixels as bytes (codes), with a table of the values that the processor computes from them.

Many processors only scale and shift resized pixels, so a channel has at most 256 different values. Codes take a quarter
of the memory of bf16 values of two equal frames, and the table gives exactly the values of the processor.

Letters in names: P patches, C channels, Q pixels of a channel in a patch, V values of a byte.
"""

from __future__ import annotations

import torch

PIXELS = "pixel_values"  # as the processor returns them
CODES = "pixel_codes"  # uint8 [P, C, Q], in place of pixel values
TABLE = "pixel_table"  # [C, V]
OF_PIXELS = (PIXELS, CODES, TABLE)
NUM_VALUES = 256


def look_up(codes_PCQ: torch.Tensor, table_CV: torch.Tensor, num_frames: int) -> torch.Tensor:
    """Return the pixel values for codes, [P, C * num_frames * Q], in the dtype of the table.

    Codes and table must be on the same device. num_frames: number of frames of a patch, which are all equal.
    """
    num_patches, num_channels, size = codes_PCQ.shape
    values = table_CV.new_empty(num_patches, num_channels, num_frames, size)
    for channel, values_V in enumerate(table_CV):
        places = codes_PCQ[:, channel].int().flatten()
        values[:, channel] = values_V.index_select(0, places).view(num_patches, 1, size)
    return values.flatten(1)
