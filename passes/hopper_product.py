"""Products of many tokens on Hopper: the launch of the kernel, and its tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from compiled_engine.kernels.block_sizes import cdiv

REGISTERS, COPYING, WARP, WARPS = 1 << 16, 24, 32, 4
CHUNK = 128


@dataclass(frozen=True)
class ProductTiles:
    """A tile is `groups` (2 or 3) times `rows` (64 or 128) rows of the weight, gate and up counted together, times
    the sum of `parts` tokens (one to three powers of two). It passes in `stages` stages of 64 columns. `together`
    token tiles share the rows of the weight in the order of tiles."""

    groups: int
    rows: int
    parts: tuple[int, ...]
    stages: int
    together: int = 8

    @property
    def tokens(self) -> int:
        return sum(self.parts)

    def computing_registers(self) -> int:
        warps = WARPS * (self.groups + 1)
        each = min(255, REGISTERS // (warps * WARP)) // 8 * 8
        return min(240, (each * warps - COPYING * WARPS) // (WARPS * self.groups) // 8 * 8)


def hopper_product(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, gated: bool, activation: str, tiles: ProductTiles
) -> torch.Tensor:
    """linear(x), or with `gated` activation(gate) * up of its halves: [T, N] or [T, N / 2]."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from compiled_engine.passes import hopper_product_kernel as kernel
    from compiled_engine.passes.hopper_linear_ring import BLOCK, SHARED, STEP

    num_tokens, k = x_TK.shape
    if x_TK.stride(1) != 1 or x_TK.stride(0) % 8 or x_TK.data_ptr() % 16:
        x_TK = x_TK.clone(memory_format=torch.contiguous_format)
    num_rows = weight_NK.shape[0]
    outputs, block, step, shared = (num_rows // 2 if gated else num_rows), BLOCK.value, STEP.value, SHARED.value
    out_TM = x_TK.new_empty((num_tokens, outputs))
    if gated:
        weight = TensorDescriptor(
            weight_NK,
            [outputs // block, 2, block, k],
            [block * k, outputs * k, k, 1],
            [tiles.rows // (2 * block), 2, block, step],
            kernel.BOX_SHARED.value,
        )
    else:
        weight = TensorDescriptor(weight_NK, [num_rows, k], [k, 1], [tiles.rows, step], shared)
    width = tiles.rows // 2 if gated else tiles.rows
    out_shared = out_layout(width)
    x_shape, x_strides = [num_tokens, k], [x_TK.stride(0), 1]
    out_shape, out_strides = [num_tokens, outputs], [outputs, 1]
    parts = (*tiles.parts, 0, 0)[:3]
    sources = [TensorDescriptor(x_TK, x_shape, x_strides, [p, step], shared) if p else None for p in parts]
    results = [
        TensorDescriptor(out_TM, out_shape, out_strides, [min(p, CHUNK), width], out_shared) if p else None
        for p in parts
    ]
    token_tiles, row_tiles = cdiv(num_tokens, tiles.tokens), cdiv(num_rows, tiles.groups * tiles.rows)
    kernel.hopper_product_kernel[(min(_multiprocessors(x_TK.device), token_tiles * row_tiles),)](
        weight,
        *sources,
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
        num_warps=WARPS,
        launch_pdl=True,
    )
    return out_TM


@cache
def out_layout(width: int) -> object:
    """How a tile of results stands in shared memory, `width` of them in a row."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=2)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
