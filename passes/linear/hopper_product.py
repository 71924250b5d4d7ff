"""Launches Hopper's kernel for linears of over 64 tokens, where the device's profile has tile sizes for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from compiled_engine.kernels.boxes import Box
from compiled_engine.kernels.launch_arguments import PRODUCT_COPYING, WARPS, cdiv, computing_registers
from compiled_engine.passes.linear.hopper_linear import (
    box_of_results,
    columns_of_boxes,
    hopper_profile,
    layout_of_boxes,
    multiprocessors,
    rows_for_boxes,
)
from compiled_engine.passes.linear.quantised_product import Scaling

# Tiles are measured for the fewest and the most tokens of a bucket. Buckets end at TOKEN_BUCKETS and at MANY; the first
# begins after FEW. The library's time rises at multiples of 64 and of 128 tokens; 288 is two tiles of 144.
FEW = 64
TOKEN_BUCKETS = (96, 128, 192, 256, 288, 320, 384, 448, 512, 640, 768, 896, 1024, 1152, 2048, 4096)
MANY = 1 << 20


# Most registers of a thread for sums, by groups of warps; ptxas spills more.
MOST_SUMS = {2: 192, 3: 128}
# Most columns of a tensor-core product, by groups of warps.
MOST_COLUMNS = {2: 256, 3: 128}
# A part of 256 takes two places of 128 tokens in shared memory; a part smaller than this after it would leave one.
LEAST_BESIDE_256 = 64


@dataclass(frozen=True)
class ProductTiles:
    """Tile sizes of a program: `groups` * `rows` rows of the weight, gate and up together, and sum(`parts`) tokens.

    stages: stages of the ring buffer in shared memory, of 64 columns each. A thread needs rows * tokens / 128 registers
    for sums, at most MOST_SUMS. Raises ValueError for values beyond the limits that the fields' comments give.
    """

    groups: int  # 2 or 3
    rows: int  # 64 or 128
    # One to three powers of two from 16 on, descending; at most 256, or 128 with three groups; after 256 at least 64.
    parts: tuple[int, ...]
    stages: int  # at least 2
    together: int = 8  # token tiles that use the same rows one after another

    def __post_init__(self) -> None:
        for name, allowed in (("groups", tuple(MOST_SUMS)), ("rows", (64, 128))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {', '.join(map(str, allowed))}")
        for name, least in (("stages", 2), ("together", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: at least {least}")
        self._check_parts()

    def _check_parts(self) -> None:
        most, of = MOST_COLUMNS[self.groups], f"of {self.groups} groups of {self.rows} rows"
        known = all(16 <= part <= most and part & (part - 1) == 0 for part in self.parts)
        if not (known and 1 <= len(self.parts) <= 3 and self.parts == tuple(sorted(self.parts, reverse=True))):
            raise ValueError(
                f"parts is {self.parts} {of}; allowed: one to three powers of two, 16 to {most}, descending"
            )
        if self.parts[0] == 256 and min(self.parts[:2]) < LEAST_BESIDE_256:
            raise ValueError(f"parts is {self.parts}; allowed after 256: at least {LEAST_BESIDE_256}")
        if self.rows * self.tokens // 128 > MOST_SUMS[self.groups]:
            tokens = MOST_SUMS[self.groups] * 128 // self.rows
            raise ValueError(f"parts is {self.parts} {of}; allowed: up to {tokens} tokens together")

    @property
    def tokens(self) -> int:
        return sum(self.parts)

    def computing_registers(self) -> int:
        """Return the registers of a thread in a computing warp."""
        return computing_registers(self.groups, PRODUCT_COPYING)


@cache
def product_tiles(
    num_tokens: int, num_rows: int, k: int, gated: bool, dtype: torch.dtype, device: torch.device
) -> ProductTiles | None:
    """Return the measured tile sizes for a linear of `num_tokens` tokens and a weight [num_rows, k].

    gated: num_rows counts gate and up together. Returns None for few tokens, if another kernel is faster, if `dtype`
    does not have two bytes, or if the device or the shape was not measured.
    """
    profile = hopper_profile(dtype, device) if num_tokens > FEW else None
    measured = None if profile is None else profile.product(num_tokens, num_rows, k, gated)
    return None if measured is None else ProductTiles(**measured | {"parts": tuple(measured["parts"])})


def hopper_product(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    gated: bool,
    activation: str,
    tiles: ProductTiles,
    scaling: Scaling | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return linear(x), [T, N], or with `gated` activation(gate) * up of the two halves of linear(x), [T, N / 2].

    The weight must be contiguous. K must be a multiple of 8; N a multiple of 8, or with `gated` of 16.

    scaling: if given, x and the weight are 8-bit codes with these scales, per 128 columns or whole row, and the results
    have `dtype`. K must then be a multiple of 16, and `tiles` must have two groups and one part of up to 128 tokens.
    """
    from compiled_engine.kernels import hopper_product_kernel as kernels  # Gluon takes a while to import

    num_tokens, k = x_TK.shape
    x_TK = rows_for_boxes(x_TK)
    num_rows = weight_NK.shape[0]
    outputs, block = (num_rows // 2 if gated else num_rows), kernels.BLOCK.value
    of_weight, of_tokens, of_results = _boxes(tiles, 8 * x_TK.element_size(), gated, scaling is not None)
    out_TM = torch.empty((num_tokens, outputs), dtype=dtype or x_TK.dtype, device=x_TK.device)
    if gated:
        shape, strides = [outputs // block, 2, block, k], [block * k, outputs * k, k, 1]
    else:
        shape, strides = [num_rows, k], [k, 1]
    weight = of_weight.of(weight_NK, shape, strides)
    parts = (*tiles.parts, 0, 0)[:3]
    shape, strides = [num_tokens, k], [x_TK.stride(0), 1]
    tokens = [box and box.of(x_TK, shape, strides) for box in of_tokens]
    shape, strides = [num_tokens, outputs], [outputs, 1]
    results = [box and box.of(out_TM, shape, strides) for box in of_results]
    token_tiles, row_tiles = cdiv(num_tokens, tiles.tokens), cdiv(num_rows, tiles.groups * tiles.rows)
    kernels.hopper_product_kernel[(min(multiprocessors(x_TK.device), token_tiles * row_tiles),)](
        weight,
        *tokens,
        *results,
        token_tiles,
        row_tiles,
        K=k,
        GROUPS=tiles.groups,
        ROWS=tiles.rows,
        PART0=parts[0],
        PART1=parts[1],
        PART2=parts[2],
        STAGES=tiles.stages,
        GATED=gated,
        ACTIVATION=activation,
        TOGETHER=tiles.together,
        REGISTERS=tiles.computing_registers(),
        **({} if scaling is None else scaling.arguments | {"num_outputs": outputs}),
        num_warps=WARPS,
        launch_pdl=True,
    )
    return out_TM


@cache
def _boxes(tiles: ProductTiles, bits: int, gated: bool, scaled: bool) -> tuple[Box, list[Box | None], list[Box | None]]:
    """Return (TMA box of the weight, boxes of the tokens, boxes of the results).

    Tokens and results have a list of three boxes, one per part; None for a part that the tile does not have. scaled: x
    and the weight are codes with scales.
    """
    from compiled_engine.kernels import hopper_product_kernel as kernels

    rows, block, step = tiles.rows // 2 if gated else tiles.rows, kernels.BLOCK.value, columns_of_boxes(bits)
    if gated:
        weight = Box((rows // block, 2, block, step), layout_of_boxes(bits, 4))
    else:
        weight = Box((rows, step), layout_of_boxes(bits, 2))
    chunk = kernels.chunk_of(tiles.rows, gated)
    if scaled:  # the results of 64 rows at a time
        chunk, rows = tiles.parts[0], 32 if gated else 64
    parts = (*tiles.parts, 0, 0)[:3]
    tokens = [Box((part, step), layout_of_boxes(bits, 2)) if part else None for part in parts]
    return weight, tokens, [box_of_results(min(part, chunk), rows) if part else None for part in parts]
