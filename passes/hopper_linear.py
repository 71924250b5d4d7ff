"""Linears of 33 to 128 tokens on Hopper: where its own kernel is the fastest, by the device's profile; its launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from compiled_engine.kernels.block_sizes import cdiv
from compiled_engine.passes.profile import load_profile

# With fewer tokens the kernels of small_batch_linear are as fast, with more the library's, whose multiprocessors share
# the tokens that each of these programs reads for itself.
FEWEST = 33
# A launch takes the tiles that were measured for the least of these that is not below its number of tokens.
TOKEN_BUCKETS = (64, 128)
# Registers of a multiprocessor, and of a thread that copies; threads of a warp, and warps of a group.
REGISTERS, COPYING, WARP, WARPS = 1 << 16, 24, 32, 4


@dataclass(frozen=True)
class HopperTiles:
    """A program takes `groups` (1 to 3) times 64 rows of the weight, with gate and up half of them each, and up to
    `tokens` tokens, in `stages` stages of shared memory. registers: of a thread, fewer than there are where the kernels
    before and after it are to run beside it; 0: all."""

    groups: int
    tokens: int
    stages: int
    registers: int = 0

    def computing_registers(self) -> int:
        """Of a thread that computes: what is left by the four warps that copy, three of which are idle."""
        warps = WARPS * (self.groups + 1)
        each = min(self.registers or 255, REGISTERS // (warps * WARP))
        return min(240, (each * warps - COPYING * WARPS) // (WARPS * self.groups) // 8 * 8)


@cache
def hopper_tiles(
    num_tokens: int, num_rows: int, k: int, gated: bool, dtype: torch.dtype, device: torch.device
) -> HopperTiles | None:
    """For a [num_tokens, k] x [num_rows, k] product, with `gated` gate and up counted together; None where another
    kernel is faster, or nothing was measured."""
    if not FEWEST <= num_tokens <= TOKEN_BUCKETS[-1] or dtype.itemsize != 2 or device.type != "cuda":
        return None
    profile = load_profile(torch.cuda.get_device_name(device))
    if profile is None or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    bucket = next(tokens for tokens in TOKEN_BUCKETS if num_tokens <= tokens)
    measured = profile.hopper_tiles.get((bucket, num_rows, k, gated))
    return None if measured is None else HopperTiles(**measured)


def hopper_linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    gated: bool,
    activation: str,
    tiles: HopperTiles,
) -> torch.Tensor:
    """linear(x), or with `gated` activation(gate) * up of its halves: [T, N] or [T, N / 2].

    The weight is contiguous, K a multiple of 8, and N of 8 or, with `gated`, of 16; T is at most that of the tiles.
    """
    # Gluon takes a while to import, and only a Hopper needs it.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from compiled_engine.passes import hopper_linear_kernel as kernels

    num_tokens, k = x_TK.shape
    if x_TK.stride(1) != 1 or x_TK.stride(0) % 8 or x_TK.data_ptr() % 16:
        x_TK = x_TK.clone(memory_format=torch.contiguous_format)
    num_rows = weight_NK.shape[0]
    outputs = num_rows // 2 if gated else num_rows
    out_TM = x_TK.new_empty((num_tokens, outputs))
    rows, step, block = kernels.ROWS.value, kernels.STEP.value, kernels.BLOCK.value
    if gated:
        weight = TensorDescriptor(
            weight_NK,
            [outputs // block, 2, block, k],
            [block * k, outputs * k, k, 1],
            [kernels.BLOCKS.value, 2, block, step],
            kernels.BLOCKS_SHARED.value,
        )
    else:
        weight = TensorDescriptor(weight_NK, [num_rows, k], [k, 1], [rows, step], kernels.SHARED.value)
    kernels.hopper_linear_kernel[(cdiv(num_rows, tiles.groups * rows),)](
        weight,
        TensorDescriptor(x_TK, [num_tokens, k], [x_TK.stride(0), 1], [tiles.tokens, step], kernels.SHARED.value),
        out_TM,
        bias_N,
        num_tokens,
        outputs,
        K=k,
        GROUPS=tiles.groups,
        TOKENS=tiles.tokens,
        STAGES=tiles.stages,
        GATED=gated,
        ACTIVATION=activation,
        REGISTERS=tiles.computing_registers(),
        num_warps=WARPS,
        maxnreg=tiles.registers or None,
        launch_pdl=True,
    )
    return out_TM
