"""Launches the small-batch linear's kernels: which one, with what tiles. A function of shapes, dtype and device alone.

The tiles are those of the device's profile, or of a rule; nothing is tuned at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from compiled_engine.passes import rms_norm
from compiled_engine.passes.dependent_launch import may_launch_early
from compiled_engine.passes.profile import load_profile
from compiled_engine.passes.small_batch_linear_kernels import few_tokens_kernel, one_token_kernel

# Programs that may be waiting for their splits at once: rows tiles times token tiles of one launch.
MAX_TILES = 1 << 16


@dataclass(frozen=True)
class Tiles:
    """What a program computes, and how it is compiled. `tokens` 1 is the kernel for a single token."""

    tokens: int
    rows: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3


# A launch takes the tiles that were measured for the least of these that is not below its number of tokens.
TOKEN_BUCKETS = (1, 8, 32)


def choose_tiles(num_tokens: int, num_rows: int, k: int, silu_mul: bool, dtype: torch.dtype, device: str = "") -> Tiles:
    """Tiles for a [num_tokens, k] x [num_rows, k] product; with silu_mul num_rows counts gate and up together.

    Those that were measured on a device of that name, or, for any other, what has done well on an NVIDIA H200.
    """
    if dtype == torch.float32 and num_tokens > 1:
        return Tiles(tokens=16, rows=16, block_k=64, num_warps=4, num_stages=2)
    bucket = next((tokens for tokens in TOKEN_BUCKETS if num_tokens <= tokens), 64)
    profile = load_profile(device) if device else None
    measured = profile.tiles.get((bucket, num_rows, k, silu_mul)) if profile else None
    if measured is not None:
        return Tiles(**measured)
    outputs = num_rows // 2 if silu_mul else num_rows
    few = outputs <= 4096  # too few rows for large tiles to reach every multiprocessor
    if bucket == 1:
        return Tiles(1, rows=2, block_k=min(triton.next_power_of_2(k), 2048), num_warps=8 if few else 4)
    block_k = min(128 if bucket > 8 else 256, max(64, triton.next_power_of_2(k) // 4))
    split_k = 4 if few and not silu_mul and k >= 8 * block_k else 1
    return Tiles(bucket, rows=32 if few else 64, block_k=block_k, split_k=split_k, num_warps=4, num_stages=3)


def launch(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    eps: float,
    residual_TM: torch.Tensor | None,
    silu_mul: bool,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """As small_batch_linear_op.reference; x with rows of consecutive elements, the others contiguous."""
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    if residual_TM is not None and not residual_TM.is_contiguous():
        residual_TM = residual_TM.contiguous()
    num_tokens, k = x_TK.shape
    num_rows = weight_NK.shape[0]
    norm = norm_weight_K is not None
    if tiles is None:
        tiles = choose_tiles(num_tokens, num_rows, k, silu_mul, x_TK.dtype, _device_name(x_TK.device))
    outputs = num_rows // 2 if silu_mul else num_rows
    out_TM = torch.empty((num_tokens, outputs), dtype=x_TK.dtype, device=x_TK.device)
    dependent_launch = may_launch_early(x_TK.device)
    options = {"launch_pdl": True} if dependent_launch else {}
    if tiles.tokens == 1:
        one_token_kernel[(triton.cdiv(outputs, tiles.rows),)](
            x_TK,
            weight_NK,
            bias_N,
            norm_weight_K,
            residual_TM,
            out_TM,
            eps,
            outputs,
            K=k,
            BIAS=bias_N is not None,
            NORM=norm,
            RESIDUAL=residual_TM is not None,
            SILU_MUL=silu_mul,
            ROWS=tiles.rows,
            BLOCK_K=tiles.block_k,
            DEPENDENT_LAUNCH=dependent_launch,
            num_warps=tiles.num_warps,
            **options,
        )
        return out_TM
    if norm_weight_K is not None:
        x_TK = rms_norm.launch(x_TK, norm_weight_K, eps)
    row_tiles, token_tiles = triton.cdiv(outputs, tiles.rows), triton.cdiv(num_tokens, tiles.tokens)
    partial = counter = out_TM
    if tiles.split_k > 1:
        if row_tiles * token_tiles > MAX_TILES:
            raise ValueError(f"split_k is {tiles.split_k} for {row_tiles * token_tiles} tiles; allowed: {MAX_TILES}")
        partial = torch.empty((tiles.split_k, num_tokens, outputs), dtype=torch.float32, device=x_TK.device)
        counter = _counters(x_TK.device, torch.cuda.current_stream(x_TK.device).cuda_stream)
    few_tokens_kernel[(row_tiles, tiles.split_k, token_tiles)](
        x_TK,
        weight_NK,
        bias_N,
        residual_TM,
        out_TM,
        partial,
        counter,
        outputs,
        num_tokens,
        x_TK.stride(0),
        K=k,
        BIAS=bias_N is not None,
        RESIDUAL=residual_TM is not None,
        SILU_MUL=silu_mul,
        TOKENS=tiles.tokens,
        ROWS=tiles.rows,
        BLOCK_K=tiles.block_k,
        SPLIT_K=tiles.split_k,
        NUM_STAGES=tiles.num_stages,
        DEPENDENT_LAUNCH=dependent_launch,
        num_warps=tiles.num_warps,
        **options,
    )
    return out_TM


@cache
def _counters(device: torch.device, stream: int) -> torch.Tensor:
    """Arrivals at each tile, zero between launches; one set for each stream, on which launches follow one another."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
