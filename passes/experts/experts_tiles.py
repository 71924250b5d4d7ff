"""Tile sizes of the kernels of experts, by the number of tokens in a step and the weights' format."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from compiled_engine.kernels.launch_arguments import next_power_of_2

# Up to these token counts, tiles are those for few, or for some tokens. The choice depends on shapes and dtype alone.
FEW_TOKENS, SOME_TOKENS = 64, 1024
# The most tokens whose experts in MXFP4 are computed without tensor cores, each token by itself. More tokens share so
# many experts that decoding them once is faster.
MOST_VECTOR_TOKENS = 3
# The most tokens whose experts of 8 or 16 bits are read for each token by itself, and how many times as much is read as
# if each expert were read once, at most.
MOST_BY_TOKEN, MOST_READS = 8, 1.15
# Steps of more tokens decode weights in MXFP4 before the product, if experts have LEAST_TO_DECODE tokens on average.
MOST_DECODED_IN_TILES, LEAST_TO_DECODE = 2048, 256
# Token counts after which tiles change.
TOKEN_COUNTS = (1, MOST_VECTOR_TOKENS, MOST_BY_TOKEN, 32, FEW_TOKENS, 128, 256, 512, SOME_TOKENS, MOST_DECODED_IN_TILES)


@dataclass(frozen=True)
class GroupedTiles:
    """Tile sizes of grouped_kernel, in tokens (each with one of its experts) and weight rows, and compile options.

    rows_first: rows of the weight are on the left of the product even where a tile has enough tokens for the left.
    """

    tokens: int
    rows: int
    block_k: int
    num_warps: int
    num_stages: int
    rows_first: bool = False


def _tokens_per_expert(num_tokens: int, share: float) -> float:
    """Return the mean number of tokens per expert in a step of the next larger of TOKEN_COUNTS.

    share: fraction of the experts that a token chooses.
    """
    return share * next((count for count in TOKEN_COUNTS if num_tokens <= count), math.inf)


def grouped_tiles(
    num_tokens: int,
    dtype: torch.dtype,
    share: float,
    hidden_size: int = 0,
    width: int = 0,
    *,
    coded: bool = False,
    large: bool = False,
) -> GroupedTiles:
    """Choose tiles by the mean number of tokens per expert, and by the numbers of columns of both weights.

    share: see _tokens_per_expert. coded: whether the weights are 8-bit codes. large: whether shared memory has room for
    the largest tiles, as on Hopper.

    A tile computes as much for few tokens as for many, so it has hardly more tokens than an expert. Tiles of values are
    the fastest on an NVIDIA H200 for 64, 128 and 256 experts.
    """
    if dtype == torch.float32:
        return GroupedTiles(tokens=16, rows=32, block_k=32, num_warps=4, num_stages=2)
    per_expert = _tokens_per_expert(num_tokens, share)
    if per_expert <= 8 or num_tokens <= FEW_TOKENS:
        if hidden_size % 128 or width % 128:
            return GroupedTiles(tokens=16, rows=64, block_k=64, num_warps=4, num_stages=6)
        if coded:  # for which larger tiles were not measured
            return GroupedTiles(tokens=16, rows=64, block_k=128, num_warps=4, num_stages=4)
        return GroupedTiles(tokens=16, rows=128, block_k=128, num_warps=8, num_stages=3)
    if coded:
        if num_tokens <= SOME_TOKENS:
            return GroupedTiles(tokens=64, rows=64, block_k=64, num_warps=4, num_stages=4)
        return GroupedTiles(tokens=128, rows=128, block_k=64, num_warps=8, num_stages=3)
    if per_expert <= 16:
        return GroupedTiles(tokens=32, rows=128, block_k=64, num_warps=4, num_stages=5)
    if per_expert <= 32:
        return GroupedTiles(tokens=64, rows=128, block_k=64, num_warps=8, num_stages=4)
    rows = 256 if large else 128
    return GroupedTiles(tokens=128, rows=rows, block_k=64, num_warps=8, num_stages=3)


def invariant_tiles(
    num_tokens: int, dtype: torch.dtype, share: float, hidden_size: int, width: int, *, coded: bool, hopper: bool
) -> GroupedTiles:
    """Choose tiles in which a token's sums are added in one order for any number of tokens. For arguments see above.

    hopper: whether the GPU is a Hopper. There every tile of values multiplies 16 columns at a time and adds them to one
    sum, whichever operand is on the left, which the start verifies. Tiles of codes, whose products of a step are scaled
    before they are added, have steps of the same columns. These and those of other GPUs are the tiles of
    invariant_product, whose number of tokens alone decides the columns of a tensor core's instruction.
    """
    if hopper and not coded and dtype != torch.float32:
        if num_tokens == 1:  # the fastest for one token's eight experts of 768 columns
            return GroupedTiles(tokens=8, rows=128, block_k=256, num_warps=4, num_stages=3)
        return grouped_tiles(num_tokens, dtype, share, hidden_size, width, large=True)
    if dtype == torch.float32:
        return GroupedTiles(tokens=16, rows=32, block_k=32, num_warps=4, num_stages=2, rows_first=True)
    if num_tokens <= FEW_TOKENS:
        return GroupedTiles(tokens=16, rows=64, block_k=64, num_warps=4, num_stages=4, rows_first=True)
    if num_tokens <= SOME_TOKENS:
        return GroupedTiles(tokens=64, rows=64, block_k=64, num_warps=4, num_stages=4, rows_first=True)
    return GroupedTiles(tokens=128, rows=128, block_k=64, num_warps=8, num_stages=3, rows_first=True)


def packed_tiles(num_tokens: int, dtype: torch.dtype, share: float, by_exponents: bool) -> GroupedTiles:
    """Choose tiles for codes of four bits, by the mean number of tokens per expert.

    share: see _tokens_per_expert. by_exponents: whether the scales are those of MXFP4.

    With few tokens, decoding takes most of the time, so a block usually has all tokens of an expert. Two warps compute
    small matrix products, in which a thread decodes four bytes at once; more warps compute those of 64 rows.
    """
    per_expert = _tokens_per_expert(num_tokens, share)
    if dtype == torch.float32:
        return GroupedTiles(tokens=16, rows=32, block_k=32, num_warps=4, num_stages=2)
    if num_tokens == 1:  # smaller blocks, to occupy every multiprocessor
        return GroupedTiles(tokens=8, rows=32, block_k=128, num_warps=2, num_stages=6)
    if per_expert <= 4:
        return GroupedTiles(tokens=8, rows=64, block_k=128, num_warps=2, num_stages=4)
    if per_expert <= 10:
        return GroupedTiles(tokens=16, rows=64, block_k=128, num_warps=2, num_stages=4)
    if per_expert <= 64:
        return GroupedTiles(tokens=64, rows=128, block_k=128, num_warps=8, num_stages=3)
    if per_expert <= 192 or not by_exponents:
        return GroupedTiles(tokens=128, rows=128, block_k=128, num_warps=8, num_stages=3)
    return GroupedTiles(tokens=256, rows=128, block_k=64, num_warps=8, num_stages=3)


def decodes_first(num_tokens: int, share: float) -> bool:
    """Return whether MXFP4 weights are decoded to 16 bits before the product.

    They are in steps of more than MOST_DECODED_IN_TILES tokens, if experts have LEAST_TO_DECODE tokens on average. The
    average is taken at MOST_DECODED_IN_TILES tokens, since kernels do not change beyond the largest of TOKEN_COUNTS.
    share: fraction of the experts that a token chooses.
    """
    return num_tokens > MOST_DECODED_IN_TILES and share * MOST_DECODED_IN_TILES >= LEAST_TO_DECODE


def words_tiles(num_tokens: int, dtype: torch.dtype, share: float) -> GroupedTiles:
    """Choose tiles for MXFP4 codes that are decoded in whole words.

    The mean number of tokens per expert decides. share: see _tokens_per_expert. Blocks of more than 64 tokens are
    slower, since each thread keeps the sums of all tokens of a block, besides the values that it decodes.
    """
    per_expert = _tokens_per_expert(num_tokens, share)
    if dtype == torch.float32:
        return GroupedTiles(tokens=16, rows=32, block_k=128, num_warps=2, num_stages=2)
    if per_expert <= 4:
        return GroupedTiles(tokens=8, rows=64, block_k=256, num_warps=2, num_stages=3)
    if per_expert <= 10:
        return GroupedTiles(tokens=16, rows=64, block_k=256, num_warps=4, num_stages=3)
    if per_expert <= 32:
        return GroupedTiles(tokens=32, rows=128, block_k=128, num_warps=4, num_stages=3)
    return GroupedTiles(tokens=64, rows=128, block_k=128, num_warps=4, num_stages=3)


def computed_by_token(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Return whether experts of 8 or 16 bits are computed for each token by itself: if few tokens share an expert.

    The number of different experts is that of tokens which choose at random.
    """
    if num_tokens > MOST_BY_TOKEN:
        return False
    different = num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)
    return num_tokens == 1 or num_tokens * top_k <= MOST_READS * different


@dataclass(frozen=True)
class ByTokenTiles:
    """The outputs of a program of a kernel by token, the columns that it multiplies at a time, and its warps."""

    rows: int
    block_k: int
    num_warps: int


def by_token_tiles(k: int, gate_up: bool) -> ByTokenTiles:
    """Return tiles for tokens by themselves and a weight of k columns.

    For a single token they are the best on an NVIDIA H200, for k from 768 to 2,880.

    gate_up: whether the tiles are for the experts' first linear; otherwise they are for the second.
    """
    if not gate_up:
        rows, block_k, num_warps = 2, 512, 2
    elif k % 1024 == 0:
        rows, block_k, num_warps = 4, 1024, 8
    else:  # smaller blocks leave less of the last one empty
        rows, block_k, num_warps = 8, 256, 8
    return ByTokenTiles(rows, min(block_k, next_power_of_2(k)), num_warps)
