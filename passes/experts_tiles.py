"""Tiles of the experts' kernels, chosen only by shapes and dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_engine.kernels.launch_arguments import next_power_of_2

# Up to these numbers of tokens, tiles are those of a few, or of some tokens.
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
    """Choose tiles by the tokens of the step, divided among many experts, and the sizes that a program iterates
    over.
    """
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


def one_token_tiles(k: int, gate_up: bool) -> OneTokenTiles:
    """Tiles for the first or second product with k columns: the best on an NVIDIA H200 for k from 768 to 2,880."""
    if not gate_up:
        rows, block_k, num_warps = 2, 512, 2
    elif k % 1024 == 0:
        rows, block_k, num_warps = 4, 1024, 8
    else:  # smaller blocks leave less of the last one empty
        rows, block_k, num_warps = 8, 256, 8
    return OneTokenTiles(rows, min(block_k, next_power_of_2(k)), num_warps)
