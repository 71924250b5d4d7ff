"""The numbers of tokens for which a Hopper's own kernel computes gate, up and silu * up faster than the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from compiled_engine.bench.bounds import device_rates
from compiled_engine.config import ModelConfig
from compiled_engine.passes.linear import silu_mul
from compiled_engine.passes.linear.hopper_linear import TOKEN_BUCKETS as FEW_TOKENS
from compiled_engine.passes.linear.hopper_linear import HopperTiles, hopper_linear, multiprocessors
from compiled_engine.passes.linear.hopper_product import (
    MANY,
    MOST_COLUMNS,
    MOST_SUMS,
    SHARED_MEMORY,
    STEP_BYTES,
    TOKEN_BUCKETS,
    ProductTiles,
    hopper_product,
)
from compiled_engine.process.progress import Progress
from compiled_engine.tune.linears import Chain, Linear, LinearCase, TunedLinear, cases_of, tune_on_hopper

# A kernel is chosen if it takes at most this share of the previous time.
WORTH = 0.985
# Tokens that are measured for all batches beyond the last bucket.
TOKENS_OF_MANY = 8192
# Shapes of tiles that are tried for a case, in orders that differ where there are many token tiles.
CANDIDATES = 8
SHAPES = ((2, 64), (3, 64), (2, 128))
PARTS: tuple[tuple[int, ...], ...] = (
    *((256, 128), (256, 32), (256, 16), (256,), (128, 128), (128, 64), (128, 32, 16), (128, 32), (128, 16), (128,)),
    *((64, 32), (64, 16), (64,)),
)
# Clocks of a step at least; bytes in a clock that all multiprocessors read from the L2 cache and from memory; the share
# of the shorter ones of these and of computing that the longest does not hide.
STEP_CLOCKS, CACHE_BYTES, MEMORY_BYTES, BESIDE = 150, 3800, 2350, 0.15
MOST_STAGES = 10
# Up to this many token tiles, those whose last part is not used are no candidates.
FEW_TILES = 8


def product_cases(model: ModelConfig, num_ranks: int = 1) -> list[LinearCase]:
    """Gate and up for each bucket; the last one's number of tokens is MANY."""
    cases = [case for tokens in (*TOKEN_BUCKETS, MANY) for case in cases_of(model, tokens, num_ranks)]
    return [case for case in cases if case.silu_mul]


def product_candidates(case: LinearCase, num_sms: int) -> list[ProductTiles]:
    """Return the tiles that should take the fewest clocks: by what each multiprocessor computes, and what all read."""
    tokens, steps = tokens_measured(case), -(-case.k * 2 // STEP_BYTES)
    found: list[tuple[float, list[ProductTiles]]] = []
    for (groups, rows), parts in product(SHAPES, PARTS):
        width, height = sum(parts), groups * rows
        token_tiles = -(-tokens // width)
        unused = token_tiles * width - tokens
        if rows * width // 128 > MOST_SUMS[groups] or parts[0] > MOST_COLUMNS[groups]:
            continue
        stages = stages_that_fit(groups, rows, parts)
        last_unused = len(parts) > 1 and unused >= parts[-1] and token_tiles <= FEW_TILES
        if stages is None or unused >= max(tokens, 64) or last_unused:
            continue
        programs = token_tiles * -(-case.num_rows // height)
        waves = -(-programs // num_sms)
        busy = min(1.0, programs / (waves * num_sms) + 0.2)
        step_clocks = groups * rows / 64 * sum(4 * max(part / 2, 16 + part / 4) for part in parts)
        clocks = (
            waves * steps * max(step_clocks, STEP_CLOCKS),
            programs * steps * (height + width) * STEP_BYTES / CACHE_BYTES / busy,
            case.num_rows * case.k * 2 / MEMORY_BYTES / busy,
        )
        orders = (8, 16) if token_tiles > 8 else (8,)
        tiles = [ProductTiles(groups, rows, parts, *stages, together) for together in orders]
        found.append((max(clocks) + BESIDE * sum(clocks), tiles))
    found.sort(key=lambda item: item[0])
    return [tiles for _, alike in found[:CANDIDATES] for tiles in alike]


def stages_that_fit(groups: int, rows: int, parts: tuple[int, ...]) -> tuple[int, int] | None:
    """Stages of the weight and of tokens: as many as there is room for beside two places for results, or, where these
    are fewer than four, beside one; what is left is for up to two more of the weight. None for fewer than three."""
    place, weight = ProductTiles(groups, rows, parts, 2, 2).place(True), groups * rows * STEP_BYTES
    stage = weight + sum(parts) * STEP_BYTES
    for places, least in ((2, 4), (1, 3)):
        left = SHARED_MEMORY - places * place
        stages = min(MOST_STAGES, left // stage)
        if stages >= least:
            more = (left - stages * stage) // weight if stages < MOST_STAGES else 0
            return stages + min(2, more), stages
    return None


def tokens_measured(case: LinearCase) -> int:
    return TOKENS_OF_MANY if case.num_tokens == MANY else case.num_tokens


@torch.inference_mode()
def tune_products(cases: Sequence[LinearCase], linears: Sequence[TunedLinear], progress: Progress) -> list[TunedLinear]:
    """See `tune_on_hopper`. Large products draw as much power as the device may: what is measured for long is what it
    sustains. linears: Hopper's for few tokens, where they were faster than the library."""
    device = torch.device("cuda", torch.cuda.current_device())
    num_sms, rates = multiprocessors(device), device_rates(device, torch.bfloat16)

    def bound_us(case: LinearCase) -> float:
        size = case.num_rows * case.k * 2
        return max(size * tokens_measured(case) / rates.flops_per_s, size / rates.bytes_per_s) * 1e6

    return tune_on_hopper(
        "measure products on Hopper",
        cases,
        progress,
        chain_of=lambda case: Chain([replace(case, num_tokens=tokens_measured(case), norm=False)]),
        candidates=lambda case: product_candidates(case, num_sms),
        kernel=lambda tiles: partial(_product, tiles),
        before=lambda case: _before(case, linears),
        library=_library,
        bound_us=bound_us,
        worth=WORTH,
    )


def _product(tiles: ProductTiles, x_TK: torch.Tensor, weight_NK: torch.Tensor, *others: object) -> torch.Tensor:
    return hopper_product(x_TK, weight_NK, True, "silu", tiles)


def _before(case: LinearCase, linears: Sequence[TunedLinear]) -> Linear:
    """The kernel that runs without this one."""
    for tuned in linears:
        few = tuned.case
        fits = case.num_tokens <= few.num_tokens == FEW_TOKENS[-1] and few.silu_mul
        if fits and (few.num_rows, few.k) == (case.num_rows, case.k) and isinstance(tuned.tiles, HopperTiles):
            return partial(_few, tuned.tiles)
    return _library


def _few(tiles: HopperTiles, x_TK: torch.Tensor, weight_NK: torch.Tensor, *others: object) -> torch.Tensor:
    return hopper_linear(x_TK, weight_NK, None, True, "silu", tiles)


def _library(x_TK: torch.Tensor, weight_NK: torch.Tensor, *others: object) -> torch.Tensor:
    return silu_mul.launch(torch.nn.functional.linear(x_TK, weight_NK))
