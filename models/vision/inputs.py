"""Compute a vision tower's inputs from the processor's output for several images.

All inputs that depend on the sizes of the images are computed here, on the host, so that one graph serves images of all
sizes. For towers that read grids, the first dimension of most inputs counts embeddings; merged_patches consecutive
patches become one embedding. Letters in names: E embeddings, U patches of an embedding, X elements of a patch, W
windows, N tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from compiled_engine.attention.inputs import ATTENTION_TENSORS, StepTensor, packed_inputs
from compiled_engine.models.foreign.description import IMPORTING
from compiled_engine.models.vision.pixel_codes import CODES, NUM_VALUES, PIXELS, TABLE, look_up
from compiled_engine.vision import MOST_ASPECT, VisionDescription

# Names of the processor's output, besides PIXELS.
GRIDS, SIZES, MASK = "image_grid_thw", "image_sizes", "pixel_attention_mask"
POSITIONS = "image_position_ids"  # [1, patches, 2], columns and rows, -1 for padding


def num_embeddings(description: VisionDescription, image: Mapping[str, torch.Tensor]) -> int:
    """Return the number of embeddings that the tower computes for an image. image: the processor's output for it."""
    if description.resolutions:
        return len(ends_of_rows(description, image))
    if description.tile_size:
        return tiles_of(description, image).shape[0] * description.tile_embeddings
    return math.prod(_grid_of_patches(description, image)) // description.merged_patches


def check_image(description: VisionDescription, image: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless the tower can read an image.

    image: the processor's output for the image; its pixels may be on the meta device.
    """
    name = description.architecture
    sizes = (SIZES,) if description.resolutions else () if description.tile_size else (_name_of_grids(description),)
    is_coded = takes_codes(description) and CODES in image
    pixels = (CODES, TABLE) if is_coded else (PIXELS,)
    if missing := {*pixels, *sizes} - image.keys():
        raise ValueError(f"the processor's output lacks {', '.join(sorted(missing))}, which {name} needs")
    shape = tuple(image[pixels[0]].shape)
    if description.tile_size:
        tile = (description.num_channels, description.tile_size, description.tile_size)
        if len(shape) < 3 or shape[-3:] != tile or 0 in shape:
            raise ValueError(
                f"the processor's output has the shape {list(shape)}; allowed for {name}: tiles {list(tile)}"
            )
        num_tiles, needed_tiles = len(tiles_of(description, image)), 1
        if description.resolutions:
            needed_tiles += math.prod(_grid_of_tiles(description, image))
        if num_tiles < needed_tiles:
            raise ValueError(f"the processor's output has {num_tiles} tiles; allowed for {name}: {needed_tiles}")
        return
    grid = _grid_of_patches(description, image)
    merge = description.merge_size
    if len(grid) != 3 or min(grid) < 1 or grid[1] % merge or grid[2] % merge:
        raise ValueError(f"the processor's output has the grid {grid}; allowed for {name}: multiples of {merge}")
    if (most := description.most_rows) and max(grid) > most:
        raise ValueError(f"the processor's output has the grid {grid}; allowed for {name}: at most {most} on a side")
    expected: tuple[int, ...] = (math.prod(grid), description.patch_elements)
    if is_coded:
        expected = (math.prod(grid), description.num_channels, description.patch_size**2)
        table = (description.num_channels, NUM_VALUES)
        if tuple(image[TABLE].shape) != table:
            raise ValueError(f"the table of pixels has the shape {list(image[TABLE].shape)}; allowed: {list(table)}")
    if description.stated_positions:
        expected = (1, image[POSITIONS].shape[1], description.patch_elements)
        if not torch.equal(image[POSITIONS].long(), _stated_positions(grid, expected[1])):
            raise ValueError(f"the processor's output has other positions than those of a grid {grid}, row by row")
    if shape != expected:
        raise ValueError(f"the processor's output has the shape {list(shape)}; allowed for {name}: {list(expected)}")


def takes_codes(description: VisionDescription) -> bool:
    """Return whether the tower's images may have codes in place of pixels, see pixel_codes.py.

    This holds for towers that read grids, unless the processor pads the grids' patches.
    """
    return not description.tile_size and not description.stated_positions


def tiles_of(description: VisionDescription, image: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return an image's tiles, [N, channels, height, width], without tiles that are only padding.

    Raises ValueError if a part of a tile is padding.
    """
    size = description.tile_size
    tiles = image[PIXELS].reshape(-1, description.num_channels, size, size)
    if description.resolutions:  # padding may follow
        return tiles[: 1 + math.prod(_grid_of_tiles(description, image))]
    if MASK in image and not image[MASK].all():
        raise ValueError(f"an image of {description.architecture} has padding; allowed: images cut into whole tiles")
    return tiles


def _name_of_grids(description: VisionDescription) -> str:
    return POSITIONS if description.stated_positions else GRIDS


def _grid_of_patches(description: VisionDescription, image: Mapping[str, torch.Tensor]) -> list[int]:
    """Return [frames, rows, columns], the numbers of patches of an image in time, height and width."""
    stated = image[_name_of_grids(description)]
    if not description.stated_positions:
        return stated.flatten().tolist()
    columns, rows = (stated.flatten(0, -2).amax(0) + 1).tolist()
    return [1, rows, columns]


def _stated_positions(grid: Sequence[int], length: int) -> torch.Tensor:
    """Return the positions (column, row) of a grid's patches, row by row, padded with -1: [1, length, 2].

    grid: frames, rows and columns.
    """
    _, rows, columns = grid
    found = torch.full((max(length, rows * columns), 2), -1)
    places = torch.arange(rows * columns)
    found[: rows * columns] = torch.stack((places % columns, places // columns), dim=-1)
    return found.unsqueeze(0)


def _by_embedding(description: VisionDescription, image: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the pixels of an image's patches, grouped by embedding and without padding, [E, U, X]."""
    if not description.stated_positions:
        if CODES in image:
            pixels_PX = look_up(image[CODES], image[TABLE], description.temporal_patch_size)
        else:
            pixels_PX = image[PIXELS]
        return pixels_PX.unflatten(0, (-1, description.merged_patches))
    merge, (_, rows, columns) = description.merge_size, _grid_of_patches(description, image)
    pixels_PX = image[PIXELS].flatten(0, -2)[: rows * columns]
    by_row = pixels_PX.view(rows // merge, merge, columns // merge, merge, description.patch_elements)
    return by_row.transpose(1, 2).reshape(-1, description.merged_patches, description.patch_elements)


def ends_of_rows(description: VisionDescription, image: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Return the order in which LLaVA-NeXT reads an image's embeddings, int [E].

    A number n > 0 stands for embedding n - 1 of the tiles, and 0 for the learned embedding that ends a row
    (`image_newline`). The order begins with the tile of the whole image, without row ends. The other tiles, side by
    side, form the image in a higher resolution; its rows follow, without padding, each with a 0 at its end.
    """
    rows, columns = _grid_of_tiles(description, image)
    side, size = math.isqrt(description.tile_embeddings), description.tile_embeddings
    whole = np.arange(1, 1 + size)
    parts = np.arange(1 + size, 1 + size * (1 + rows * columns)).reshape(rows, columns, side, side)
    lines = parts.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
    height, width = image[SIZES].flatten().tolist()
    if width / height > lines.shape[1] / lines.shape[0]:
        padding = (lines.shape[0] - int(round(height * (lines.shape[1] / width), 7))) // 2
        lines = lines[padding : lines.shape[0] - padding]
    else:
        padding = (lines.shape[1] - int(round(width * (lines.shape[0] / height), 7))) // 2
        lines = lines[:, padding : lines.shape[1] - padding]
    return np.concatenate([whole, np.pad(lines, ((0, 0), (0, 1))).flatten()])


def _grid_of_tiles(description: VisionDescription, image: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Return (rows, columns), the numbers of tiles of the resolution that is best for an image (LLaVA-NeXT).

    The best resolution keeps the most of the image's pixels. If several do, it is the one with the smallest area that
    the image does not cover.
    """
    height, width = image[SIZES].flatten().tolist()

    def kept_and_wasted(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - math.prod(resolution)

    best = max(description.resolutions, key=kept_and_wasted)
    return best[0] // description.tile_size, best[1] // description.tile_size


def blank_image(description: VisionDescription, num_embeddings: int) -> dict[str, torch.Tensor]:
    """Return the processor's output for a black image that has about `num_embeddings` embeddings, and not more.

    The image has more only if a single tile, or the smallest resolution, has more. A grid is about as wide as it is
    high.
    """
    if description.resolutions:
        fitting = [each for each in _sizes(description) if each.num_embeddings <= num_embeddings]
        return _blank_of_size(description, max(fitting, default=min(_sizes(description))))
    if description.tile_size:
        size = description.tile_size
        num_tiles = max(1, num_embeddings // description.tile_embeddings)
        return {PIXELS: torch.zeros(num_tiles, description.num_channels, size, size)}
    most = description.most_rows // description.merge_size or num_embeddings
    rows = max(1, min(math.isqrt(num_embeddings), most))
    columns = max(1, min(num_embeddings // rows, most))
    grid = [1, rows * description.merge_size, columns * description.merge_size]
    if description.stated_positions:
        length = math.prod(grid)
        pixels = torch.zeros(1, length, description.patch_elements)
        return {PIXELS: pixels, POSITIONS: _stated_positions(grid, length)}
    codes = torch.zeros(math.prod(grid), description.num_channels, description.patch_size**2, dtype=torch.uint8)
    return {CODES: codes, TABLE: torch.zeros(description.num_channels, NUM_VALUES), GRIDS: torch.tensor([grid])}


def largest_images(description: VisionDescription, num_embeddings: int) -> list[dict[str, torch.Tensor]]:
    """Return the processor's outputs for equal black images with as many tiles as possible.

    Together the images have at most `num_embeddings` embeddings. For towers without `resolutions`, and if even the
    smallest image has more embeddings, a single image is returned, see `blank_image`.
    """
    fitting = [each for each in _sizes(description) if each.num_embeddings <= num_embeddings]
    if not fitting:
        return [blank_image(description, num_embeddings)]
    size = max(fitting, key=lambda each: num_embeddings // each.num_embeddings * each.num_tiles)
    return [_blank_of_size(description, size)] * (num_embeddings // size.num_embeddings)


class _Size(NamedTuple):
    """A size of images in pixels, for towers with `resolutions`, with the image's numbers of tiles and embeddings."""

    num_tiles: int
    num_embeddings: int
    height: int
    width: int


def _sizes(description: VisionDescription) -> list[_Size]:
    """Return three sizes of images for each resolution; [] for towers without resolutions.

    One image fills the resolution. One has the resolution's height and is as narrow as an image may be (MOST_ASPECT).
    One has its width and is as low as an image may be.
    """
    found = []
    for height, width in description.resolutions:
        for size in ((height, width), (height, -(-height // MOST_ASPECT)), (-(-width // MOST_ASPECT), width)):
            given = {SIZES: torch.tensor([size])}
            num_tiles = 1 + math.prod(_grid_of_tiles(description, given))
            found.append(_Size(num_tiles, len(ends_of_rows(description, given)), *size))
    return found


def _blank_of_size(description: VisionDescription, size: _Size) -> dict[str, torch.Tensor]:
    pixels = torch.zeros(size.num_tiles, description.num_channels, description.tile_size, description.tile_size)
    return {PIXELS: pixels, SIZES: torch.tensor([[size.height, size.width]])}


def tower_tensors(description: VisionDescription, dtype: torch.dtype) -> tuple[StepTensor, ...]:
    """Return declarations of the tower's inputs.

    A dimension with the name "tokens" counts embeddings for towers that read grids, and tiles otherwise. dtype: of the
    tower and of the pixels.
    """
    if description.tile_size:
        size = description.tile_size
        order = (StepTensor("order_E", ("embeddings",), torch.int64),) if description.resolutions else ()
        pixels = StepTensor("pixels_NCHW", ("tokens", description.num_channels, size, size), dtype)
        return (pixels, *ATTENTION_TENSORS, *order)
    merged = description.merged_patches
    table = (
        StepTensor("table_rows_EU4", ("tokens", merged, 4), torch.int64),
        StepTensor("table_weights_EU4", ("tokens", merged, 4), torch.float32),
    )
    windows = (
        StepTensor("window_order_E", ("tokens",), torch.int64),
        StepTensor("window_starts_W1", ("window_borders",), torch.int32),
        StepTensor("window_lens_W", ("windows",), torch.int32),
    )
    return (
        StepTensor("pixels_EUX", ("tokens", merged, description.patch_elements), dtype),
        StepTensor("positions_EU2", ("tokens", merged, 2), torch.int64),
        *ATTENTION_TENSORS,
        *(table if description.table_side else ()),
        *(windows if description.window_size else ()),
    )


def tower_arguments(description: VisionDescription) -> tuple[str, ...]:
    """Return the names of the arguments of the tower's forward, in order."""
    tensors = tower_tensors(description, torch.float32)
    return tuple(dict.fromkeys(tensor.name.partition(".")[0] for tensor in tensors))


def tower_inputs(
    description: VisionDescription, images: Sequence[Mapping[str, torch.Tensor]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the tower's inputs for these images, by the names in `tower_tensors`.

    images: the processor's output for each image, in one of these forms. Grids: image_grid_thw [1, 3] or [3], and
    pixel_values [patches, elements] or their codes. Grids with stated positions: pixel_values [1, patches, elements]
    and image_position_ids [1, patches, 2]. Tiles: pixel_values of one or several tiles. dtype: of the tower.

    The pixels of all images may be on any one device, and remain there; all other tensors are on the CPU.
    """
    found = (_of_tiles if description.tile_size else _of_grids)(description, images)
    tensors = tower_tensors(description, dtype)
    return {tensor.name: found[tensor.name].to(tensor.dtype) for tensor in tensors}


def _of_tiles(description: VisionDescription, images: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tiles = [tiles_of(description, image) for image in images]
    count = sum(map(len, tiles))
    found = {"pixels_NCHW": _joined(tiles), **packed_inputs(count, [description.tile_patches] * count)}
    if description.resolutions:
        starts = accumulate((len(each) * description.tile_embeddings for each in tiles), initial=0)
        order = [
            _shifted(ends_of_rows(description, image), start) for image, start in zip(images, starts, strict=False)
        ]
        found["order_E"] = torch.from_numpy(np.concatenate(order))
    return found


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the concatenation of the images' tensors. The tensor of a single image is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _shifted(rows: np.ndarray, start: int) -> np.ndarray:
    """Return the result `rows` of `ends_of_rows`, with embeddings counted from `start` on; zeros stay.

    start: the number of embeddings of the tiles of preceding images.
    """
    return np.where(rows > 0, rows + start, 0)


def _of_grids(description: VisionDescription, images: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    grids = [tuple(_grid_of_patches(description, image)) for image in images]
    pixels_EUX = _joined([_by_embedding(description, image) for image in images])
    lens = [height * width for frames, height, width in grids for _ in range(frames)]
    found = {"pixels_EUX": pixels_EUX, **packed_inputs(len(pixels_EUX), lens)}
    places = [_of_grid(description, grid) for grid in grids]
    found |= {name: _joined([each[name] for each in places]) for name in places[0]}
    if description.window_size:
        found["window_order_E"], found["window_starts_W1"] = _vision_utils().get_vision_window_index(
            torch.tensor(grids), description.merge_size, description.window_size, description.patch_size
        )
        found["window_lens_W"] = found["window_starts_W1"].diff()
    return found


@lru_cache(maxsize=32)  # images often have the same few sizes
def _of_grid(description: VisionDescription, grid: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return the inputs that depend only on an image's grid, and not on other images: positions and table entries.

    grid: frames, rows and columns. The returned tensors are cached, so they must not be changed.
    """
    grids_13 = torch.tensor([grid])
    merge, merged = description.merge_size, description.merged_patches
    positions_P2 = _vision_utils().get_vision_position_ids(grids_13, merge)
    if description.stated_positions:
        positions_P2 = positions_P2.flip(-1)  # columns come before rows
    found = {"positions_EU2": positions_P2.unflatten(0, (-1, merged))}
    if description.table_side:
        rows_P4, weights_P4 = _vision_utils().get_vision_interpolation_indices_and_weights(
            grids_13, description.table_side, align_corners=True, spatial_merge_size=merge
        )
        found["table_rows_EU4"] = rows_P4.unflatten(0, (-1, merged))
        found["table_weights_EU4"] = weights_P4.unflatten(0, (-1, merged))
    return found


def _vision_utils() -> Any:
    with IMPORTING:
        from transformers import vision_utils  # takes seconds, and only multimodal models need it

        return vision_utils
