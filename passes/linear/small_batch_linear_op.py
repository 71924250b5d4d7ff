"""Defines the op small_batch_linear: a linear fused with a norm before it, and silu * up or a residual add after it.

The op is opaque to Inductor. The kernel and its tile sizes are chosen at launch, by shapes, dtype and device alone.
Tile sizes come from the device's profile or from a rule; nothing is tuned at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.framework.profile import load_profile
from compiled_engine.passes.linear import small_batch_linear_cpu
from compiled_engine.passes.linear.hopper_linear import hopper_linear, hopper_tiles
from compiled_engine.passes.linear.silu_mul import reference as silu_mul_reference
from compiled_engine.passes.linear.small_batch_linear_gemv import one_token_kernel
from compiled_engine.passes.linear.small_batch_linear_tiles import few_tokens_kernel
from compiled_engine.passes.norm import rms_norm

# A launch takes the tiles measured for the smallest bucket that holds its tokens.
TOKEN_BUCKETS = (1, 8, 32, 64)
# Before waiting, a kernel prefetches a weight of up to WHOLE_AHEAD_BYTES into the L2 cache as a whole. Of a larger one,
# each program prefetches the first bytes of its part.
WHOLE_AHEAD_BYTES = 16 << 20
FIRST_AHEAD_BYTES = 16 << 10
# Most tiles of a launch with split K.
MAX_TILES = 1 << 16


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of a program, and the options with which its kernel is compiled.

    Raises ValueError for values that contradict each other.
    """

    tokens: int  # 1: the kernel for a single token
    rows: int  # of the weight; even with silu * up, half of them gate
    block_k: int
    groups: int = 1  # a step takes groups * block_k columns, with warps of its own for each group
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3
    # Compute the norm in this kernel rather than in one before it; ignored in float16, except for one token.
    norm_inside: bool = False
    ahead: int = 0  # Steps of weights that a thread loads ahead into registers; 0: weights go through shared memory.

    def __post_init__(self) -> None:
        if self.norm_inside and self.split_k > 1:
            raise ValueError(f"norm_inside with split_k {self.split_k}: no split sees a whole row; allowed: split_k 1")
        if self.ahead and (self.tokens, self.split_k) != (8, 1):
            given = f"ahead {self.ahead} with tokens {self.tokens} and split_k {self.split_k}"
            raise ValueError(f"{given}: that kernel serves up to eight tokens; allowed: tokens 8 and split_k 1")


@cache
def choose_tiles(num_tokens: int, num_rows: int, k: int, silu_mul: bool, dtype: torch.dtype, device: str = "") -> Tiles:
    """Return the tile sizes for a linear of `num_tokens` tokens and a weight [num_rows, k].

    silu_mul: num_rows counts gate and up together. The tile sizes are those measured on the device named `device`. If
    nothing was measured, if `device` is "", and for several tokens in float32, they follow a rule found on an NVIDIA
    H200. Tiles of this rule need less than 100 KiB of shared memory.
    """
    if dtype == torch.float32 and num_tokens > 1:
        return Tiles(tokens=16, rows=16, block_k=64, num_stages=2)
    bucket = next((tokens for tokens in TOKEN_BUCKETS if num_tokens <= tokens), TOKEN_BUCKETS[-1])
    profile = load_profile(device) if device else None
    measured: dict[str, Any] | None = profile.tiles.get((bucket, num_rows, k, silu_mul)) if profile else None
    if measured is not None and num_tokens <= bucket:
        return Tiles(**measured)
    width = next_power_of_2(k)
    outputs = num_rows // 2 if silu_mul else num_rows
    if bucket == 1:
        # More warps make up for too few rows to occupy every multiprocessor.
        num_warps = 8 if outputs <= 4096 else 4
        return Tiles(1, rows=4 if silu_mul else 2, block_k=min(width, 2048), num_warps=num_warps)
    if bucket == 8:
        block_k = min(128 if silu_mul and k > 1024 else 256, max(16, width // 4))
        return Tiles(8, rows=32 if silu_mul else 16, block_k=block_k, groups=4, norm_inside=k <= 1024)
    # With few outputs K is split, or most multiprocessors would be idle.
    split_k = 1
    if not silu_mul and num_tokens <= bucket and k >= 1024:
        split_k = 4 if outputs <= 2048 else 2 if outputs <= 4096 else 1
    block_k = min(width, 128)
    if bucket == 32:
        return Tiles(32, rows=64, block_k=block_k, split_k=split_k, num_stages=4)
    return Tiles(64, rows=32 if outputs <= 4096 else 64, block_k=block_k, split_k=split_k, num_stages=3)


def reference(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    eps: float,
    residual_TM: torch.Tensor | None,
    silu_mul: bool,
    activation: str = "silu",
    norm_offset: float = 0.0,
    norm_wide: bool = False,
) -> torch.Tensor:
    """Return [T, M], computed in steps: RMSNorm(x) * norm_weight, a linear, activation(gate) * up, plus the residual.

    gate and up are the halves of the linear's result. Steps whose argument is None or False are left out. M is N, or
    N / 2 with silu_mul. Results of steps are rounded to the dtype of x, as in textbook models. activation: see
    silu_mul.activate. norm_offset, norm_wide: see rms_norm.
    """
    if norm_weight_K is not None:
        x_TK = rms_norm.reference(x_TK, norm_weight_K, eps, norm_offset, norm_wide)
    y_TN = torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    if silu_mul:
        y_TN = silu_mul_reference(y_TN, activation)
    return y_TN if residual_TM is None else residual_TM + y_TN


def on_cpu(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    eps: float,
    residual_TM: torch.Tensor | None,
    silu_mul: bool,
    activation: str = "silu",
    norm_offset: float = 0.0,
    norm_wide: bool = False,
) -> torch.Tensor:
    """Return a linear with its norm, activation and residual, [T, M]; see `reference`.

    The C++ kernel computes it if it supports the arguments, otherwise torch's ops do.
    """
    before = x_TK, weight_NK, bias_N, norm_weight_K, eps, residual_TM
    out_TM = small_batch_linear_cpu.kernel_launch(*before, activation if silu_mul else None, norm_offset)
    return reference(*before, silu_mul, activation, norm_offset, norm_wide) if out_TM is None else out_TM


def launch(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    eps: float,
    residual_TM: torch.Tensor | None,
    silu_mul: bool,
    activation: str = "silu",
    norm_offset: float = 0.0,
    norm_wide: bool = False,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Return a linear with its norm, activation and residual, [T, M], computed by the kernels; see `reference`.

    Weights must be contiguous. tiles: if None, those of choose_tiles. Raises ValueError if K is split and there are
    more than MAX_TILES tiles.
    """
    if x_TK.stride()[1] != 1:
        x_TK = x_TK.contiguous()
    if residual_TM is not None and not residual_TM.is_contiguous():
        residual_TM = residual_TM.contiguous()
    num_tokens, k = x_TK.shape
    num_rows = weight_NK.shape[0]
    if tiles is None:
        tiles = choose_tiles(num_tokens, num_rows, k, silu_mul, x_TK.dtype, _device_name(x_TK.device))
        on_hopper = None
        if not tiles.ahead:
            on_hopper = hopper_tiles(num_tokens, num_rows, k, silu_mul, x_TK.dtype, x_TK.device)
        if on_hopper is not None:
            if norm_weight_K is not None:
                x_TK = rms_norm.launch(x_TK, norm_weight_K, eps, norm_offset, norm_wide)
            return hopper_linear(x_TK, weight_NK, bias_N, silu_mul, activation, on_hopper, residual_TM)
    outputs = num_rows // 2 if silu_mul else num_rows
    row_tiles, token_tiles = cdiv(num_rows, tiles.rows), cdiv(num_tokens, tiles.tokens)
    out_TM = x_TK.new_empty((num_tokens, outputs))
    # The kernel for several tokens rounds x * norm weight before applying the norm's scale; float16 may overflow there.
    norm_inside = tiles.tokens == 1 or (tiles.norm_inside and x_TK.dtype != torch.float16)
    if norm_weight_K is not None and not norm_inside:
        x_TK, norm_weight_K = rms_norm.launch(x_TK, norm_weight_K, eps, norm_offset, norm_wide), None
    sizes: dict[str, Any] = {
        "K": k,
        "BIAS": bias_N is not None,
        "NORM": norm_weight_K is not None,
        "RESIDUAL": residual_TM is not None,
        "SILU_MUL": silu_mul,
        "ACTIVATION": activation,
        "OFFSET": norm_offset,
        "ROWS": tiles.rows,
        "BLOCK_K": tiles.block_k,
        "num_warps": tiles.num_warps,
    }
    operands = (x_TK, weight_NK, bias_N, norm_weight_K, residual_TM, out_TM)
    if tiles.ahead:
        from compiled_engine.passes.linear.small_batch_linear_registers import register_linear_kernel  # imports Gluon

        counts = outputs, num_tokens, x_TK.stride()[0]
        sizes |= {"GROUPS": tiles.groups, "AHEAD": tiles.ahead, "launch_pdl": True}
        register_linear_kernel[(row_tiles,)](*operands, eps, *counts, **sizes)
        return out_TM
    options = sizes | {"enable_fp_fusion": True, **dependent_launch(x_TK.device)}
    if tiles.tokens == 1:
        one_token_kernel[(row_tiles,)](*operands, eps, outputs, **options)
        return out_TM
    partial, counters = None, out_TM
    if tiles.split_k > 1:
        if row_tiles * token_tiles > MAX_TILES:
            raise ValueError(f"{row_tiles * token_tiles} tiles with split_k {tiles.split_k}; allowed: {MAX_TILES}")
        shape = (row_tiles * token_tiles, tiles.split_k, tiles.tokens, tiles.rows)
        partial = torch.empty(shape, dtype=torch.float32, device=x_TK.device)
        stream = torch.cuda.current_stream(x_TK.device).cuda_stream if x_TK.device.type == "cuda" else 0
        counters = _counters(x_TK.device, stream)
    ahead = columns_ahead(num_rows, k, weight_NK.element_size(), tiles) if options["DEPENDENT_LAUNCH"] else 0
    few_tokens_kernel[(row_tiles, tiles.split_k, token_tiles)](
        *operands,
        partial,
        counters,
        eps,
        outputs,
        num_tokens,
        x_TK.stride()[0],
        TOKENS=tiles.tokens,
        GROUPS=tiles.groups,
        SPLIT_K=tiles.split_k,
        NUM_STAGES=tiles.num_stages,
        COLUMNS_AHEAD=ahead,
        **options,
    )
    return out_TM


@cache
def columns_ahead(num_rows: int, k: int, element_size: int, tiles: Tiles) -> int:
    """Return how many columns of each row few_tokens_kernel prefetches; 0 if rows are not aligned to 16 bytes."""
    if k * element_size % 16:
        return 0
    step = tiles.groups * tiles.block_k
    part = cdiv(k, tiles.split_k * step) * step
    if num_rows * k * element_size <= WHOLE_AHEAD_BYTES:
        return part
    return min(part, FIRST_AHEAD_BYTES // (tiles.rows * element_size) // 8 * 8)


@cache
def _counters(device: torch.device, stream: int) -> torch.Tensor:
    """Return counters of each tile's finished splits of K, int32 [MAX_TILES]. They are zero between launches.

    Each stream has counters of its own, since launches on different streams may overlap.
    """
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _fake(x_TK: torch.Tensor, weight_NK: torch.Tensor, silu_mul: bool) -> torch.Tensor:
    return x_TK.new_empty((x_TK.shape[0], weight_NK.shape[0] // (2 if silu_mul else 1)))


small_batch_linear = define_op(
    "small_batch_linear(Tensor x_TK, Tensor weight_NK, Tensor? bias_N, Tensor? norm_weight_K, float eps, "
    'Tensor? residual_TM, bool silu_mul, str activation="silu", float norm_offset=0.0, bool norm_wide=False) -> Tensor',
    cpu=on_cpu,
    cuda=launch,
    fake=_fake,
    reference=reference,
)
