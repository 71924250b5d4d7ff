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
from compiled_engine.passes.linear.hopper_linear import multiprocessors
from compiled_engine.passes.linear.hopper_product import (
    MANY,
    MOST_COLUMNS,
    MOST_SUMS,
    TOKEN_BUCKETS,
    ProductTiles,
    hopper_product,
)
from compiled_engine.process.progress import Progress
from compiled_engine.tune.linears import Chain, LinearCase, TunedLinear, cases_of, tune_on_hopper

# A kernel is chosen if it takes at most this share of the previous time.
WORTH = 0.985
# Tokens that are measured for all batches beyond the last bucket.
TOKENS_OF_MANY = 8192
# Bytes of shared memory for a program, barriers aside; candidates of a case.
SHARED_MEMORY, CANDIDATES = (227 << 10) - 256, 12
# The cost of reading an element of a tile and column, in units of computing it.
READING = 16
PARTS = ((256,), (128, 128), (128, 64), (128, 32, 16), (128, 16), (128,), (64, 32))


def product_cases(model: ModelConfig, num_ranks: int = 1) -> list[LinearCase]:
    """Gate and up for each bucket; the last one's number of tokens is MANY."""
    cases = [case for tokens in (*TOKEN_BUCKETS, MANY) for case in cases_of(model, tokens, num_ranks)]
    return [case for case in cases if case.silu_mul]


def product_candidates(case: LinearCase, num_sms: int) -> list[ProductTiles]:
    """Return the most promising tiles: each multiprocessor has little area to compute, and little to read for it."""
    tokens = tokens_measured(case)
    found: list[tuple[float, ProductTiles]] = []
    for (groups, rows), parts, together in product(((2, 64), (3, 64), (2, 128)), PARTS, (4, 8, 16)):
        width = sum(parts)
        if rows * width // 128 > MOST_SUMS[groups] or parts[0] > MOST_COLUMNS[groups]:
            continue
        tiles = -(-tokens // width), -(-case.num_rows // (groups * rows))
        if together > 4 and together // 2 >= tiles[0]:
            continue  # the same order of tiles
        results = groups * rows // 2 * 2 * (256 if parts[0] == 256 else 128 + sum(part for part in parts if part <= 32))
        stages = min(6, (SHARED_MEMORY - results) // ((groups * rows + width) * 128))
        area = -(-tiles[0] * tiles[1] // num_sms) * groups * rows * width
        if stages >= 3:
            read = READING * (1 / (groups * rows) + 1 / width)
            found.append((area * (1 + read), ProductTiles(groups, rows, parts, stages, together)))
    found.sort(key=lambda item: item[0])
    return [tiles for _, tiles in found[:CANDIDATES]]


def tokens_measured(case: LinearCase) -> int:
    return TOKENS_OF_MANY if case.num_tokens == MANY else case.num_tokens


@torch.inference_mode()
def tune_products(cases: Sequence[LinearCase], progress: Progress) -> list[TunedLinear]:
    """See `tune_on_hopper`. Large products draw as much power as the device may: what is measured for long is what it
    sustains."""
    device = torch.device("cuda", torch.cuda.current_device())
    num_sms, flops_per_s = multiprocessors(device), device_rates(device, torch.bfloat16).flops_per_s
    return tune_on_hopper(
        "measure products on Hopper",
        cases,
        progress,
        chain_of=lambda case: Chain([replace(case, num_tokens=tokens_measured(case), norm=False)]),
        candidates=lambda case: product_candidates(case, num_sms),
        kernel=lambda tiles: partial(_product, tiles),
        before=lambda case: _library,
        library=_library,
        bound_us=lambda case: case.num_rows * case.k * 2 * tokens_measured(case) / flops_per_s * 1e6,
        worth=WORTH,
    )


def _product(tiles: ProductTiles, x_TK: torch.Tensor, weight_NK: torch.Tensor, *others: object) -> torch.Tensor:
    return hopper_product(x_TK, weight_NK, True, "silu", tiles)


def _library(x_TK: torch.Tensor, weight_NK: torch.Tensor, *others: object) -> torch.Tensor:
    return silu_mul.launch(torch.nn.functional.linear(x_TK, weight_NK))
