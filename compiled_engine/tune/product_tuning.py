"""Find the numbers of tokens for which `hopper_product` computes silu(gate) * up fastest, and its tiles there.

`hopper_product` is compared with torch's linear followed by the kernel of silu_mul, and for few tokens with
`hopper_linear` where that is tuned. Gate and up are one linear with a packed weight, a gated linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from compiled_engine.bench.bounds import device_rates
from compiled_engine.passes.linear import silu_mul
from compiled_engine.passes.linear.hopper_linear import TOKEN_BUCKETS as FEW_TOKENS
from compiled_engine.passes.linear.hopper_linear import HopperTiles, hopper_linear
from compiled_engine.passes.linear.hopper_product import (
    FEW,
    MANY,
    MOST_COLUMNS,
    MOST_SUMS,
    TOKEN_BUCKETS,
    ProductTiles,
    hopper_product,
)
from compiled_engine.process.progress import Progress
from compiled_engine.tune.compile_first import Launch, launches
from compiled_engine.tune.linears import Chain, Linear, LinearCase, Outcome, TunedLinear, at_each, key
from compiled_engine.tune.on_hopper import HopperKernel

# A kernel is chosen if it takes at most this fraction of the other kernel's time, at both ends of its bucket.
WORTH = 0.98
# Tokens measured for all batches beyond the last bucket.
TOKENS_OF_MANY = 8192
# Load before each measurement: under sustained load a device reaches its power limit and lowers its clock.
SUSTAINED_MS = 20.0
# Bytes of shared memory per program, without barriers; most candidates of a case.
SHARED_MEMORY, CANDIDATES = (227 << 10) - 256, 16
# Cost of reading one element of a tile's column, relative to computing one.
READING = 16
PARTS: tuple[tuple[int, ...], ...] = (
    *((256, 128), (256,), (128, 128), (128, 64), (128, 32, 16), (128, 32), (128, 16), (128,)),
    *((64, 32), (64, 16), (64,)),
)
# Token tiles that take the same rows one after another, and the number tried if there are more of them.
TOGETHER, MORE_TOGETHER = 8, 16
Listed = Callable[[LinearCase], Sequence[ProductTiles]]


def product_cases(linears: Sequence[LinearCase]) -> list[LinearCase]:
    """Return a case for each linear of gate and up and each range of token counts.

    A case's num_tokens is the last count of its range; MANY stands for the range of all larger counts.
    """
    return [case for case in at_each(linears, (*TOKEN_BUCKETS, MANY)) if case.silu_mul]


def product_candidates(case: LinearCase, num_sms: int) -> list[ProductTiles]:
    """Return the most promising tile sizes for a case, at most CANDIDATES, the best first.

    They are ranked by the work of the busiest multiprocessor: the area of the result that it computes, and what it
    reads for that. num_sms: number of multiprocessors.
    """
    _, tokens = ends_of(case)
    found: list[tuple[float, ProductTiles]] = []
    for (groups, rows), parts, together in product(((2, 64), (3, 64), (2, 128)), PARTS, (TOGETHER, MORE_TOGETHER)):
        width = sum(parts)
        if rows * width // 128 > MOST_SUMS[groups] or parts[0] > MOST_COLUMNS[groups]:
            continue
        tiles = -(-tokens // width), -(-case.num_rows // (groups * rows))
        if together > TOGETHER and tiles[0] <= MORE_TOGETHER:
            continue  # gives nearly the same order of tiles
        results = groups * rows // 2 * 2 * (256 if parts[0] == 256 else 128 + sum(part for part in parts if part <= 32))
        stages = min(6, (SHARED_MEMORY - results) // ((groups * rows + width) * 128))
        area = -(-tiles[0] * tiles[1] // num_sms) * groups * rows * width
        if stages >= 3:
            read = READING * (1 / (groups * rows) + 1 / width)
            found.append((area * (1 + read), ProductTiles(groups, rows, parts, stages, together)))
    found.sort(key=lambda item: item[0])
    return [tiles for _, tiles in found[:CANDIDATES]]


def ends_of(case: LinearCase) -> tuple[int, int]:
    """Return the fewest and the most tokens that are measured for the case's range of token counts."""
    first = (FEW, *TOKEN_BUCKETS)[(*TOKEN_BUCKETS, MANY).index(case.num_tokens)] + 1
    return first, TOKENS_OF_MANY if case.num_tokens == MANY else case.num_tokens


def product_launches(cases: Sequence[LinearCase], listed: Listed) -> Iterator[Launch]:
    return launches(((_measured(case, ends_of(case)[1]), listed(case)) for case in cases), _kernel)


def tune_products(
    cases: Sequence[LinearCase], linears: Iterable[TunedLinear], progress: Progress, listed: Listed
) -> Iterator[Outcome]:
    """Yield the outcome of each case: tiles if `hopper_product` is worthwhile; see `HopperKernel.tune`.

    The kernel is compared with torch's linear at both ends of each range of token counts. linears: the linears for
    which hopper_tuning found tiles. In ranges for few tokens, the kernel is compared with `hopper_linear`
    instead, if `linears` has tiles for the weight. listed: returns the candidates of a case.
    """
    rates = device_rates(torch.device("cuda"), torch.bfloat16)
    few = {key(tuned.case): tuned.tiles for tuned in linears if isinstance(tuned.tiles, HopperTiles)}

    def before(case: LinearCase) -> Linear:
        if case.num_tokens > FEW_TOKENS[-1]:
            return _library
        tiles = few.get(key(replace(case, num_tokens=FEW_TOKENS[-1])))
        return _library if tiles is None else partial(_few, tiles)

    def bound_us(case: LinearCase) -> float:
        size = case.num_rows * case.k * 2
        return max(size * ends_of(case)[1] / rates.flops_per_s, size / rates.bytes_per_s) * 1e6

    return HopperKernel(
        "measure products on Hopper",
        chains_of=lambda case: [Chain([_measured(case, tokens)]) for tokens in ends_of(case)],
        candidates=listed,
        kernel=_kernel,
        before=before,
        library=_library,
        bound_us=bound_us,
        worth=WORTH,
        sustained_ms=SUSTAINED_MS,
    ).tune(cases, progress)


def _measured(case: LinearCase, num_tokens: int) -> LinearCase:
    return replace(case, num_tokens=num_tokens, norm=False)


def _kernel(tiles: ProductTiles) -> Linear:
    return partial(_product, tiles)


def _product(tiles: ProductTiles, x_TK: torch.Tensor, weight_NK: torch.Tensor, *others: object) -> torch.Tensor:
    return hopper_product(x_TK, weight_NK, True, "silu", tiles)


def _few(tiles: HopperTiles, x_TK: torch.Tensor, weight_NK: torch.Tensor, *others: object) -> torch.Tensor:
    return hopper_linear(x_TK, weight_NK, None, True, "silu", tiles)


def _library(x_TK: torch.Tensor, weight_NK: torch.Tensor, *others: object) -> torch.Tensor:
    return silu_mul.launch(torch.nn.functional.linear(x_TK, weight_NK))
