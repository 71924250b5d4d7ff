"""Pixels as bytes, with a table of the values that the processor gives them.

Many processors only scale and shift resized pixels, so a channel has at most 256 values. Bytes are a quarter of the
values in bf16 with two frames, and looking the values up in the table gives the processor's own bits.

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
    """Return the values of the codes, [P, C * num_frames * Q], on their device and in the dtype of the table.

    num_frames: frames of a patch, which are all equal.
    """
    num_patches, num_channels, size = codes_PCQ.shape
    values = table_CV.new_empty(num_patches, num_channels, num_frames, size)
    for channel, values_V in enumerate(table_CV):
        places = codes_PCQ[:, channel].int().flatten()
        values[:, channel] = values_V.index_select(0, places).view(num_patches, 1, size)
    return values.flatten(1)
