"""Compute the positions of a prompt's tokens in three dimensions: time, height and width.

The method is that of Qwen2-VL (Wang et al., arXiv:2409.12191, section 2.1). A text token has the same position in all
three dimensions. The position of an image token is the image's start plus the token's frame in time, its row in height
and its column in width. The text after an image begins at the image's start plus the number of rows or columns,
whichever is larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from compiled_engine.vision import VisionDescription


def image_positions(
    description: VisionDescription, prompt_token_ids: Sequence[int], images: Sequence[Mapping[str, torch.Tensor]]
) -> tuple[torch.Tensor, int]:
    """Return positions of the prompt's L tokens, int32 [3, L], and an offset for later tokens.

    The position of a token after the prompt is its index plus the offset, in all three dimensions. images: the
    processor's output for each image, in the order of the prompt, with image_grid_thw [1, 3] or [3], int. Raises
    ValueError if the prompt's placeholders do not match the images.
    """
    is_image_L = np.asarray(prompt_token_ids) == description.image_token_id
    positions_3L = np.empty((3, len(is_image_L)), np.int32)
    token, position = 0, 0
    for image in images:
        frames, height, width = image["image_grid_thw"].flatten().tolist()
        rows, columns = height // description.merge_size, width // description.merge_size
        length = frames * rows * columns
        start = token + int(is_image_L[token:].argmax()) if is_image_L[token:].any() else len(is_image_L)
        if not is_image_L[start : start + length].all() or start + length > len(is_image_L):
            raise ValueError(f"an image has {length} embeddings, but the prompt has fewer placeholders in a row for it")
        positions_3L[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        positions_3L[:, start : start + length] = position + np.indices((frames, rows, columns)).reshape(3, -1)
        position += max(rows, columns)
        token = start + length
    if is_image_L[token:].any():
        raise ValueError(f"the prompt has more placeholders than its {len(images)} images have embeddings")
    positions_3L[:, token:] = np.arange(position, position + len(is_image_L) - token)
    offset = int(positions_3L.max(initial=-1)) + 1 - len(is_image_L)
    return torch.from_numpy(positions_3L), offset
