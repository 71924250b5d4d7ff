"""Launches Hopper's kernel for linears of up to 128 tokens, with tile sizes of the device's profile or of a rule."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from compiled_engine.kernels.boxes import Box
from compiled_engine.kernels.launch_arguments import LINEAR_COPYING, MOST, WARPS, cdiv, computing_registers, is_hopper
from compiled_engine.passes.framework.profile import DeviceProfile, load_profile
from compiled_engine.passes.linear.quantised_product import Scaling


def hopper_profile(dtype: torch.dtype, device: torch.device) -> DeviceProfile | None:
    """Return the profile of a Hopper device, for dtypes of two bytes; None for other devices and dtypes."""
    if dtype.itemsize != 2 or not is_hopper(device):
        return None
    return load_profile(torch.cuda.get_device_name(device))


def rows_for_boxes(x_TK: torch.Tensor) -> torch.Tensor:
    """Return x if TMA can copy its rows, otherwise a contiguous copy of x.

    The elements of a row must be consecutive, and rows must begin at multiples of 16 bytes.
    """
    if x_TK.stride(1) != 1 or x_TK.stride(0) * x_TK.element_size() % 16 or x_TK.data_ptr() % 16:
        return x_TK.clone(memory_format=torch.contiguous_format)
    return x_TK


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def layout_of_boxes(bits: int, rank: int) -> Any:
    """Return the shared-memory layout of TMA boxes with `rank` dimensions and elements of `bits` bits.

    See shared_layout. The result is cached, since creating a layout takes the host as long as a launch.
    """
    from compiled_engine.kernels.hopper_ring import shared_layout

    return shared_layout(bits, rank)


@cache
def box_of_results(tokens: int, outputs: int) -> Box:
    """Return the TMA box through which results [tokens, outputs] of 16 bits are written."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(swizzle_byte_width=min(128, 2 * outputs), element_bitwidth=16, rank=2)
    return Box((tokens, outputs), layout)


@cache
def columns_of_boxes(bits: int) -> int:
    """Return the number of columns of a TMA box of the weight or the tokens. bits: size of an element."""
    from compiled_engine.kernels.hopper_ring import step_of

    return int(step_of(bits))


# A launch takes the tiles measured for the smallest bucket that holds its tokens. Beyond the last the library is
# faster: its multiprocessors share tokens, whereas each program here reads all of them.
TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128)
# Most columns of a tensor-core product.
MOST_COLUMNS = 128
# An unmeasured shape takes the tiles of the nearest measured one, if rows and columns each differ by at most NEAR. The
# tiles are kept if the share of busy multiprocessors is at least AS_BUSY of that of the measured shape. Otherwise
# programs get fewer rows, and LEAST_BUSY is enough.
NEAR, AS_BUSY, LEAST_BUSY = 2.5, 0.75, 0.6
# Bytes of shared memory of a program, besides barriers.
SHARED_MEMORY = 226 << 10
# Share of multiprocessors that a launch should occupy.
BUSY = 0.9
# The rule for shapes with neither: on an NVIDIA H200 the kernel is faster than those for small batches for weights with
# MANY_ROWS, if more than LEAST_TOKENS tokens share them, if tiles keep MOSTLY_BUSY of the multiprocessors busy, or for
# several tokens and up to FEW_COLUMNS columns. For more than MOST_TOKENS tokens the rule was not measured.
MANY_ROWS, LEAST_TOKENS, MOSTLY_BUSY, FEW_COLUMNS, MOST_TOKENS = 2048, 32, 2 / 3, 6144, 64


@dataclass(frozen=True)
class HopperTiles:
    """Tile sizes of a program: `tokens` tokens and `groups` * 64 / `parts` rows of the weight, gate and up together.

    stages: stages of the ring buffer in shared memory, of `columns` columns each. parts: if more than 1, a tensor-core
    product of 64 rows takes 64 / parts rows of the weight, each divided into `parts` parts along K. products: number of
    tensor-core products that a stage holds, one after another along K.
    """

    groups: int  # 1 to 3
    tokens: int  # upper bound
    stages: int
    # Most per thread; 0: no limit. Fewer let neighbouring kernels run on the same multiprocessor.
    registers: int = 0
    parts: int = 1  # 1, 2, or 4 without gate and up
    products: int = 1

    @property
    def columns(self) -> int:
        """The number of columns in a stage, for 16-bit elements."""
        return columns_of_boxes(16) * self.parts * self.products

    @property
    def stage_bytes(self) -> int:
        return (64 * self.groups + self.parts * self.tokens) * self.products * 128

    def ending_bytes(self, gated: bool) -> int:
        """Return the bytes of shared memory that a program needs besides the stages: for results and sums of parts."""
        outputs = 64 // self.parts // (2 if gated else 1)
        return self.groups * self.tokens * (2 * outputs + (256 if self.parts > 1 else 0))

    def share_of_busy(self, num_rows: int, num_sms: int) -> float:
        """Return the average fraction of busy multiprocessors if each of `num_sms` runs one program at a time."""
        programs = cdiv(num_rows, 64 // self.parts * self.groups)
        return programs / (cdiv(programs, num_sms) * num_sms)

    def computing_registers(self) -> int:
        """Return the registers of a thread in a computing warp."""
        return computing_registers(self.groups, LINEAR_COPYING, self.registers or MOST)


def registers_for(groups: int, columns: int) -> int:
    """Return the limit on the registers per thread; 0: no limit.

    columns: columns of a tensor-core product: tokens times parts. Products of few columns get few registers, so that
    two programs can run on a multiprocessor.
    """
    if columns <= 32:
        return 64
    return 128 if groups == 1 else 0


@cache
def hopper_tiles(
    num_tokens: int, num_rows: int, k: int, gated: bool, dtype: torch.dtype, device: torch.device
) -> HopperTiles | None:
    """Return the tile sizes for a linear by the device's profile, see `tiles_for`, or else by `tiles_by_rule`.

    Returns None if the device is not a Hopper GPU, if `dtype` does not have two bytes, for more than 128 tokens, or if
    another kernel is faster.
    """
    if num_tokens > TOKEN_BUCKETS[-1] or dtype.itemsize != 2 or not is_hopper(device):
        return None
    profile, num_sms = hopper_profile(dtype, device), multiprocessors(device)
    tiles = None if profile is None else tiles_for(profile, num_tokens, num_rows, k, gated, num_sms)
    if tiles is None and (profile is None or (num_rows, k) not in _measured_shapes(profile, gated)):
        return tiles_by_rule(num_tokens, num_rows, k, gated, num_sms)
    return tiles


def _measured_shapes(profile: DeviceProfile, gated: bool) -> set[tuple[int, int]]:
    shapes = (*profile.tiles, *profile.hopper_tiles)
    return {(rows, columns) for _, rows, columns, is_gated in shapes if is_gated == gated}


def tiles_by_rule(num_tokens: int, num_rows: int, k: int, gated: bool, num_sms: int) -> HopperTiles | None:
    """Return the tile sizes for a weight that is near to no measured one; None if another kernel is faster.

    See MANY_ROWS, and undivided_tiles for the arguments.
    """
    fits = num_rows % (16 if gated else 8) == 0 and k % columns_of_boxes(16) == 0
    if not fits or num_rows < MANY_ROWS or num_tokens > MOST_TOKENS:
        return None
    tiles = undivided_tiles(num_tokens, num_rows, k, gated, num_sms)
    few_columns = num_tokens > 1 and k <= FEW_COLUMNS
    is_faster = num_tokens > LEAST_TOKENS or few_columns or tiles.share_of_busy(num_rows, num_sms) >= MOSTLY_BUSY
    return tiles if is_faster else None


@cache
def undivided_tiles(num_tokens: int, num_rows: int, k: int, gated: bool, num_sms: int) -> HopperTiles:
    """Return the largest tiles for up to 64 tokens that keep enough multiprocessors busy without parts.

    num_rows, k: sizes of the weight; num_rows counts gate and up together. num_sms: multiprocessors of the GPU.
    """
    tokens = max(8, next(bucket for bucket in TOKEN_BUCKETS if num_tokens <= bucket))
    groups = next((groups for groups in (3, 2) if cdiv(num_rows, 64 * groups) >= BUSY * num_sms), 1)
    most = 4 if groups == 1 and tokens <= 16 else 2
    products = next(count for count in (most, 2, 1) if k % (64 * count) == 0)
    tiles = HopperTiles(groups, tokens, 1, registers_for(groups, tokens), 1, products)
    stages = (SHARED_MEMORY - tiles.ending_bytes(gated)) // tiles.stage_bytes
    return replace(tiles, stages=min(stages, k // tiles.columns))


def tiles_for(
    profile: DeviceProfile, num_tokens: int, num_rows: int, k: int, gated: bool, num_sms: int
) -> HopperTiles | None:
    """Return the tile sizes for a linear of `num_tokens` tokens and a weight [num_rows, k].

    gated: num_rows counts gate and up together. Tile sizes measured for a similar shape are adapted. Returns None if
    another kernel is faster, if no similar shape was measured, or if its tile sizes cannot be adapted.
    """
    bucket = next(tokens for tokens in TOKEN_BUCKETS if num_tokens <= tokens)
    near = _nearest((num_rows, k), _measured_shapes(profile, gated))
    if near is None or (measured := profile.hopper_tiles.get((bucket, *near, gated))) is None:
        return None
    tiles = HopperTiles(**measured)
    return tiles if near == (num_rows, k) else _fitted(tiles, near, (num_rows, k), gated, num_sms)


def _nearest(shape: tuple[int, int], shapes: Collection[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the shape of `shapes` that is nearest to `shape`; None if none is near.

    The distance is the factor by which the rows differ times the factor by which the columns differ. A shape is near if
    both factors are at most NEAR.
    """

    def factors(other: tuple[int, int]) -> list[float]:
        return [max(here / there, there / here) for here, there in zip(shape, other, strict=True)]

    near = [other for other in shapes if max(factors(other)) <= NEAR]
    return min(near, key=lambda other: (math.prod(factors(other)), other), default=None)


def _fitted(
    tiles: HopperTiles, near: tuple[int, int], shape: tuple[int, int], gated: bool, num_sms: int
) -> HopperTiles | None:
    """Return `tiles`, measured for a weight of the shape `near`, adapted to `shape`, smaller if needed.

    Returns None if too few multiprocessors would be busy (see AS_BUSY), or if rows or columns are not divisible by the
    tile sizes.
    """
    num_rows, k = shape
    there = tiles.share_of_busy(near[0], num_sms)
    options = [tiles]
    if tiles.share_of_busy(num_rows, num_sms) < AS_BUSY * there:
        if tiles.groups > 1:
            options.append(_changed(tiles, groups=tiles.groups - 1))
        elif 2 * tiles.parts <= min(MOST_COLUMNS // tiles.tokens, 2 if gated else 4):
            options.append(_changed(tiles, parts=2 * tiles.parts, products=max(1, tiles.products // 2)))
    fitting = [option for option in options if k % option.columns == 0 and num_rows % (16 if gated else 8) == 0]
    best = max(fitting, key=lambda option: option.share_of_busy(num_rows, num_sms), default=None)
    if best is None or best.share_of_busy(num_rows, num_sms) < LEAST_BUSY * there:
        return None
    memory = tiles.stages * tiles.stage_bytes + tiles.ending_bytes(gated) - best.ending_bytes(gated)
    return replace(best, stages=min(memory // best.stage_bytes, k // best.columns))


def _changed(tiles: HopperTiles, **fields: int) -> HopperTiles:
    """Return the tile sizes with changed fields, and with the registers that `registers_for` gives for them."""
    tiles = replace(tiles, **fields)
    return replace(tiles, registers=registers_for(tiles.groups, tiles.parts * tiles.tokens))


def hopper_linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    gated: bool,
    activation: str,
    tiles: HopperTiles,
    residual_TM: torch.Tensor | None = None,
    scaling: Scaling | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return linear(x) + residual, [T, N], or with `gated` activation(gate) * up + residual, [T, N / 2].

    gate and up are the halves of linear(x). Weight and residual must be contiguous. K must be a multiple of 8; if
    tiles.parts or tiles.products is more than 1, of 64 * parts * products. N must be a multiple of 8; with `gated`, of
    16. T may be at most tiles.tokens.

    scaling: if given, x and the weight are 8-bit codes with these scales, per 128 columns or whole row, and the results
    have `dtype`. K must then be a multiple of 16; if parts or products is more than 1, of 128 * parts * products.

    Raises ValueError for `gated` with four parts, which would leave a program too few rows of gate and of up.
    """
    if gated and tiles.parts > 2:
        raise ValueError(f"parts is {tiles.parts}; allowed for gate and up: 1 or 2")
    from compiled_engine.kernels import hopper_linear_kernel as gluon  # Gluon takes a while to import

    num_tokens, k = x_TK.shape
    x_TK = rows_for_boxes(x_TK)
    num_rows = weight_NK.shape[0]
    outputs = num_rows // 2 if gated else num_rows
    out_TM = torch.empty((num_tokens, outputs), dtype=dtype or x_TK.dtype, device=x_TK.device)
    bits = 8 * x_TK.element_size()
    rows, step, block = gluon.ROWS.value, columns_of_boxes(bits), gluon.BLOCK.value
    parts, boxes = tiles.parts, tiles.parts * tiles.products
    of_weight, of_tokens = _boxes(tiles, bits, gated)
    if gated:
        shape, strides = [boxes, outputs // block, 2, block, k], [step, block * k, outputs * k, k, 1]
    else:
        shape, strides = [boxes, num_rows, k], [step, k, 1]
    weight = of_weight.of(weight_NK, shape, strides)
    x = of_tokens.of(x_TK, [boxes, num_tokens, k], [step, x_TK.stride(0), 1])
    gluon.hopper_linear_kernel[(cdiv(num_rows, tiles.groups * (rows // parts)),)](
        weight,
        x,
        out_TM,
        bias_N,
        residual_TM,
        num_tokens,
        outputs,
        K=k,
        GROUPS=tiles.groups,
        TOKENS=tiles.tokens,
        STAGES=tiles.stages,
        PARTS=parts,
        PRODUCTS=tiles.products,
        GATED=gated,
        ACTIVATION=activation,
        REGISTERS=tiles.computing_registers(),
        **({} if scaling is None else scaling.arguments),
        num_warps=WARPS,
        maxnreg=tiles.registers or None,
        launch_pdl=True,
    )
    return out_TM


@cache
def _boxes(tiles: HopperTiles, bits: int, gated: bool) -> tuple[Box, Box]:
    """Return (TMA box of the weight, TMA box of the tokens)."""
    from compiled_engine.kernels import hopper_linear_kernel as gluon

    parts, boxes, step = tiles.parts, tiles.parts * tiles.products, columns_of_boxes(bits)
    if gated:
        weight = Box((boxes, gluon.BLOCKS.value // parts, 2, gluon.BLOCK.value, step), layout_of_boxes(bits, 5))
    else:
        weight = Box((boxes, gluon.ROWS.value // parts, step), layout_of_boxes(bits, 3))
    return weight, Box((boxes, tiles.tokens, step), layout_of_boxes(bits, 3))
