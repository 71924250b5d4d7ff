"""Computes linears of batch-invariant engines by Hopper's kernels, with tiles that all add in the same order.

One kernel computes few tokens, another many. In both, tensor cores multiply 16 columns at a time and add them to one
sum, from the first column to the last, unless a tile divides the columns into parts. So a token has the same bits in
all tiles without parts, which the start verifies for each tile that a weight has (see bit_check.py). A small weight
needs parts to occupy a GPU with few tokens; invariant_product computes it.
"""

from __future__ import annotations

from functools import cache

import torch

from compiled_engine.kernels.launch_arguments import cdiv, is_hopper
from compiled_engine.passes.linear.hopper_linear import hopper_linear, multiprocessors, undivided_tiles
from compiled_engine.passes.linear.hopper_product import ProductTiles, hopper_product

# Fewest rows of a weight that these kernels compute.
LEAST_ROWS = 4096
# Up to these token counts a weight has the same tiles: hopper_linear's for FEW, hopper_product's for MANY. More tokens
# than the last have the tiles for prompts.
FEW, MANY = (8, 16, 32, 64), (96, 128, 192, 256, 384, 512, 768, 1024)
# Microseconds that a tile takes for 4,096 columns on an H200 while every multiprocessor computes one, without gate and
# up, and with them. A tile of 192 rows leaves no memory for the results of 192 tokens without a gate.
COSTS = {
    False: {
        ProductTiles(2, 64, (64,), 8): 16.3,
        ProductTiles(2, 64, (64, 32), 7): 21.9,
        ProductTiles(2, 64, (128,), 6): 24.5,
        ProductTiles(2, 128, (128,), 4): 42.0,
        ProductTiles(3, 64, (128, 128), 3): 62.0,
    },
    True: {
        ProductTiles(2, 64, (64,), 8): 16.3,
        ProductTiles(2, 64, (128,), 6): 24.5,
        ProductTiles(3, 64, (128,), 5): 37.0,
        ProductTiles(3, 64, (128, 64), 4): 51.0,
    },
}
OF_PROMPTS = {False: ProductTiles(3, 64, (128, 128), 3), True: ProductTiles(3, 64, (128, 64), 4)}
# Token counts that together select every tile of a weight.
TOKEN_COUNTS = (*FEW, *MANY, MANY[-1] + 1)


def is_served(weight_NK: torch.Tensor, bias_N: torch.Tensor | None, gated: bool) -> bool:
    """Return whether Hopper's kernels compute a linear. The answer holds for any number of tokens."""
    (num_rows, k), even = weight_NK.shape, 16 if gated else 8
    fits = bias_N is None and num_rows >= LEAST_ROWS and num_rows % even == 0 and k % 64 == 0
    return fits and weight_NK.element_size() == 2 and weight_NK.is_contiguous() and is_hopper(weight_NK.device)


@cache
def many_tiles(num_tokens: int, num_rows: int, gated: bool, num_sms: int) -> ProductTiles:
    """Return the tiles of hopper_product with the least estimated time; see undivided_tiles for the arguments.

    The estimate is the number of tiles that a multiprocessor computes one after another, times a tile's time in COSTS.
    Prompts have the tiles that take the least time for a token and a row.
    """
    most = next((tokens for tokens in MANY if num_tokens <= tokens), None)
    if most is None:
        return OF_PROMPTS[gated]

    def cost(tiles: ProductTiles) -> float:
        count = cdiv(most, tiles.tokens) * cdiv(num_rows, tiles.groups * tiles.rows)
        return cdiv(count, num_sms) * COSTS[gated][tiles]

    return min(COSTS[gated], key=cost)


def launch(x_TK: torch.Tensor, weight_NK: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Return linear(x), [T, N]; with an activation, activation(gate) * up of its two halves, [T, N / 2].

    `is_served` must be true.
    """
    (num_tokens, k), num_rows, gated = x_TK.shape, weight_NK.shape[0], activation is not None
    num_sms = multiprocessors(x_TK.device)
    if num_tokens <= FEW[-1]:
        few = undivided_tiles(num_tokens, num_rows, k, gated, num_sms)
        return hopper_linear(x_TK, weight_NK, None, gated, activation or "", few)
    many = many_tiles(num_tokens, num_rows, gated, num_sms)
    return hopper_product(x_TK, weight_NK, gated, activation or "", many)
