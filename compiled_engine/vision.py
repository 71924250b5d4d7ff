"""Description of a multimodal checkpoint's vision tower.

models/vision/description.py reads a config.json into these values.
"""

from __future__ import annotations

from dataclasses import dataclass

# Longer side to shorter side of an image. Processors scale the shorter side to a fixed size, so a thin image becomes a
# huge one.
MOST_ASPECT = 200


@dataclass(frozen=True)
class VisionDescription:
    """A vision tower, and the way in which the text model reads the tower's embeddings.

    A tower reads grids or tiles. A grid is an image cut into patches; it may have any number of rows and columns. A
    tile is an image, or a part of one, of a fixed size. `tile_size` is 0 for grids.
    """

    architecture: str  # of the checkpoint
    family: str  # a name in models/vision/families.py
    image_token_id: int  # the placeholder in prompts, one for each embedding
    embedding_size: int  # elements of an embedding, as many as the text model's hidden states have
    patch_size: int  # pixels on a side
    num_layers: int
    num_heads: int
    head_dim: int
    num_channels: int = 3
    # Further embeddings of each position, which are added to the hidden states behind the text model's first layers.
    levels: int = 0
    # Number of rotary frequencies for positions in time, height and width; None: the text model has one position per
    # token.
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool = False  # the frequencies of the three dimensions alternate
    both_ways: bool = False  # an image's tokens see the image's later tokens too
    both_ways_in_windows: bool = False  # only in layers with a sliding window, and only within it
    # In each layer, image tokens have the layer's embedding of this token (Gemma 4); None: layers have no embeddings.
    layer_token_id: int | None = None
    # Grids.
    temporal_patch_size: int = 1  # frames in a patch
    merge_size: int = 1  # rows, and columns, of patches that become one embedding
    window_size: int = 0  # side of the windows of attention, in pixels; 0: no windows
    table_side: int = 0  # side of the table of learnt positions, which is interpolated; 0: no table
    stated_positions: bool = False  # the processor states each patch's position, row by row, and pads its patches
    most_rows: int = 0  # of patches, and most columns; 0: no limit
    # Tiles.
    tile_size: int = 0  # pixels on a side
    tile_patches: int = 0  # patches of a tile, the class token included
    tile_embeddings: int = 0  # embeddings of a tile
    # Pairs (height, width) in pixels; an image is scaled to the best of them (LLaVA-NeXT). Its tiles follow a tile of
    # the whole image. Embeddings of padding are left out, and each row of embeddings ends in a further embedding.
    resolutions: tuple[tuple[int, int], ...] = ()

    @property
    def row_size(self) -> int:
        """Number of elements for each position of the prompt: its embedding, then `levels` further embeddings."""
        return (1 + self.levels) * self.embedding_size

    @property
    def merged_patches(self) -> int:
        """Number of a grid's patches that become one embedding."""
        return self.merge_size**2

    @property
    def patch_elements(self) -> int:
        """Number of elements of a patch in the processor's output for a grid."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def input_elements(self) -> int:
        """Number of elements of the processor's output for each embedding, rounded up."""
        if self.tile_size:
            return -(-self.num_channels * self.tile_size**2 // self.tile_embeddings)
        return self.merged_patches * self.patch_elements

    def most_embeddings(self, max_pixels: int, max_tiles: int = 1) -> int:
        """Return the largest number of embeddings of an image.

        max_pixels: most pixels of an image, for a tower that reads grids. max_tiles: most tiles of an image, for a
        tower that reads tiles. If the tower has `resolutions`, neither has an effect.
        """
        if self.resolutions:
            return max(self._most_of(height, width) for height, width in self.resolutions)
        if self.tile_size:
            return max_tiles * self.tile_embeddings
        return max_pixels // (self.patch_size * self.merge_size) ** 2

    def most_tiles(self, num_embeddings: int) -> int:
        """Return an upper bound on the number of tiles of images that together have `num_embeddings` embeddings.

        The bound is at least one tile or, if the tower has `resolutions`, the tiles of one image. It relies on every
        image having at least the embeddings of one tile.
        """
        whole = max(1, num_embeddings // self.tile_embeddings)
        return whole * self._most_tiles_of_image() if self.resolutions else whole

    def _most_tiles_of_image(self) -> int:
        return 1 + max(height * width for height, width in self.resolutions) // self.tile_size**2

    def _most_of(self, height: int, width: int) -> int:
        """Return the number of embeddings of an image that fills the resolution (height, width)."""
        rows, columns = height // self.patch_size, width // self.patch_size
        return self.tile_embeddings + rows * (columns + 1)
