"""What a program of the experts' kernels computes, chosen by shapes and dtype alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_engine.kernels.block_sizes import cdiv, next_power_of_2

# Up to so many tokens, tiles are those of a few tokens, or of some.
FEW_TOKENS, SOME_TOKENS = 64, 1024


@dataclass(frozen=True)
class GroupedTiles:
    """Tokens and rows of the weight of a program, and how it is compiled."""

    tokens: int
    rows: int
    block_k: int
    num_warps: int
    num_stages: int


def grouped_tiles(num_tokens: int, dtype: torch.dtype, hidden_size: int = 0, width: int = 0) -> GroupedTiles:
    """By the tokens of the step, which many experts share, and the sizes that a program steps through."""
    if dtype == torch.float32:
        return GroupedTiles(tokens=16, rows=32, block_k=32, num_warps=4, num_stages=2)
    if num_tokens <= FEW_TOKENS:
        if hidden_size % 128 or width % 128:
            return GroupedTiles(tokens=16, rows=64, block_k=64, num_warps=4, num_stages=6)
        return GroupedTiles(tokens=16, rows=64, block_k=128, num_warps=4, num_stages=4)
    if num_tokens <= SOME_TOKENS:
        return GroupedTiles(tokens=64, rows=64, block_k=64, num_warps=4, num_stages=4)
    return GroupedTiles(tokens=128, rows=128, block_k=64, num_warps=8, num_stages=3)


@dataclass(frozen=True)
class OneTokenTiles:
    """Outputs and columns of a program, and its warps."""

    rows: int
    block_k: int
    num_warps: int


def one_token_tiles(k: int, most: int) -> OneTokenTiles:
    """For products of k columns: blocks of up to `most` of them, fewer where that leaves less of the last one empty."""
    sizes = [1 << bits for bits in range(6, 12) if 1 << bits <= min(most, next_power_of_2(k))]
    block_k = min(sizes or [next_power_of_2(k)], key=lambda size: (cdiv(k, size) * size, -size))
    return OneTokenTiles(rows=4, block_k=max(block_k, min(512, next_power_of_2(k))), num_warps=8 if most > 1024 else 4)
