"""Pad a vision tower's inputs to fixed sizes, so that launches captured in a CUDA graph serve images of many sizes.

Padding patches follow those of the images. They belong to a row of attention that has no keys and whose output is
zeros, so the embeddings of images do not depend on padding patches. Rows of attention that are not needed are empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.nn.functional import pad

from compiled_engine.attention.inputs import StepTensor
from compiled_engine.vision import VisionDescription

# Numbers of patches for which a tower is captured. Below 2,048 patches the sizes are far apart, since the launches take
# about as long as the kernels. From 2,048 on padding is at most an eighth. Beyond the last size, kernels take longer.
PATCHES = (
    *(64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792),
    *range(2048, 4096, 256),
    *range(4096, 8193, 512),
)
# Most images in a call that is captured, for towers that read grids. Each image takes a row of attention.
MOST_IMAGES = 16
# Inputs that attention without a cache does not read.
_UNREAD = tuple(f"attention_inputs.{name}" for name in ("slot_mapping_T", "block_table_RB", "work_W", "host_3"))
_STARTS = ("attention_inputs.query_start_loc_R1", "window_starts_W1")


def patches_of_token(description: VisionDescription) -> int:
    """Return the number of patches of a token of the tower. A token is an embedding of a grid, or a tile."""
    return description.tile_patches if description.tile_size else description.merged_patches


def graph_sizes(description: VisionDescription, most_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens for which the tower is captured, ascending.

    A token is an embedding of a grid, or a tile. most_tokens: the most tokens in a call. The numbers follow from
    PATCHES, numbers of patches; if a tile has more patches than all of these, the tower is captured for one tile.
    """
    each = patches_of_token(description)
    sizes = {min(max(1, patches // each), most_tokens) for patches in PATCHES}
    if description.resolutions:  # in addition to the resolution's tiles, an image has a tile of the whole image
        fewest = 1 + min(height * width for height, width in description.resolutions) // description.tile_size**2
        sizes = {size for size in sizes if size >= fewest}
    return tuple(sorted(sizes))


def padded_sizes(description: VisionDescription, num_tokens: int) -> dict[str, int]:
    """Return the named sizes (attention.inputs.SIZES) of the tower's inputs that are padded to `num_tokens` tokens.

    A token is an embedding of a grid, or a tile. For grids, attention has a row for each image and one for padding; for
    tiles, it has a row for each tile. The number of windows suffices even for images that are one embedding wide, whose
    windows of s x s embeddings hold only s. The number of embeddings suffices if a further embedding ends each row of
    each tile.
    """
    num_rows = num_tokens if description.tile_size else min(num_tokens, MOST_IMAGES) + 1
    sizes = {"tokens": num_tokens, "requests": num_rows, "request_borders": num_rows + 1}
    sizes |= {"blocks_per_request": 1, "work": 1}
    if description.window_size:
        side = max(1, description.window_size // (description.patch_size * description.merge_size))
        num_windows = num_tokens // side + num_rows
        sizes |= {"windows": num_windows, "window_borders": num_windows + 1}
    if description.resolutions:
        lines = description.tile_size // description.patch_size
        sizes["embeddings"] = num_tokens * (description.tile_embeddings + lines)
    return sizes


def fits(
    description: VisionDescription,
    tensors: Iterable[StepTensor],
    inputs: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
) -> bool:
    """Return whether inputs can be padded to these sizes.

    tensors: declarations of the inputs. inputs: the result of `tower_inputs`. If there are fewer tokens than `sizes`
    states, padding needs a row of attention and a window of its own.
    """
    found = {
        dim: inputs[tensor.name].shape[number]
        for tensor in tensors
        for number, dim in enumerate(tensor.dims)
        if isinstance(dim, str)
    }
    padded = found["tokens"] < sizes["tokens"]
    return all(count + (padded and dim in ("requests", "windows")) <= sizes[dim] for dim, count in found.items())


def padded_inputs(
    description: VisionDescription, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return the inputs to write to a graph's buffers for a call, by name, padded where padding affects the result.

    inputs: the result of `tower_inputs`, which must fit `sizes`, see `fits`. Pixels, positions and table entries are
    not padded, since those of padding patches may have any valid values. Inputs that attention without a KV cache does
    not read are left out.
    """
    end = sizes["tokens"] * patches_of_token(description)
    found = {name: tensor for name, tensor in inputs.items() if name not in _UNREAD}
    for name in found.keys() & {*_STARTS}:
        length = sizes["request_borders" if name.startswith("attention") else "window_borders"]
        found[name] = _lengthened(found[name], length, end)
    for name, dim in (("attention_inputs.seq_lens_R", "requests"), ("window_lens_W", "windows")):
        if name in found:
            found[name] = _lengthened(found[name], sizes[dim], 0)
    if "window_order_E" in found:  # a permutation, which the tower inverts
        order_E = found["window_order_E"]
        found["window_order_E"] = torch.cat([order_E, torch.arange(len(order_E), sizes["tokens"])])
    if "order_E" in found:
        found["order_E"] = _lengthened(found["order_E"], sizes["embeddings"], 0)
    return found


def blank_inputs(description: VisionDescription, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return padded inputs, by name and on the CPU, for one image that takes all tokens of `sizes`.

    Pixels, positions and table entries are left out.
    """
    end = sizes["tokens"] * patches_of_token(description)
    starts, lens = torch.tensor([0, end], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
    blank = {"attention_inputs.query_start_loc_R1": starts, "attention_inputs.seq_lens_R": lens}
    if description.window_size:
        blank |= {"window_starts_W1": starts, "window_lens_W": lens}
        blank["window_order_E"] = torch.arange(sizes["tokens"])
    if description.resolutions:
        blank["order_E"] = torch.zeros(sizes["embeddings"], dtype=torch.int64)
    return padded_inputs(description, blank, sizes)


def _lengthened(values: torch.Tensor, length: int, value: int) -> torch.Tensor:
    return pad(values, (0, length - len(values)), value=value)
