"""Find linears of up to 128 tokens for which the kernel for Hopper is faster than the kernel used without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from compiled_engine.bench.bounds import device_rates
from compiled_engine.passes.framework.profile import LinearKey
from compiled_engine.passes.linear import silu_mul, small_batch_linear_op
from compiled_engine.passes.linear.hopper_linear import (
    MOST_COLUMNS,
    TOKEN_BUCKETS,
    HopperTiles,
    hopper_linear,
    registers_for,
)
from compiled_engine.passes.linear.small_batch_linear_op import Tiles, choose_tiles
from compiled_engine.passes.norm import rms_norm
from compiled_engine.process.progress import Progress
from compiled_engine.tune.compile_first import Launch, launches
from compiled_engine.tune.linears import (
    HEAD,
    SHARED_MEMORY,
    Chain,
    Linear,
    LinearCase,
    Outcome,
    TunedLinear,
    at_each,
    key,
)
from compiled_engine.tune.on_hopper import HopperKernel

# A kernel is chosen if it takes at most this fraction of the other kernel's time.
WORTH = 0.98
# Fewest columns of a tensor core product.
FEWEST_TOKENS = 8
# The small-batch range ends here.
SMALL_BATCH = small_batch_linear_op.TOKEN_BUCKETS[-1]
Listed = Callable[[LinearCase], Sequence[HopperTiles]]


def hopper_cases(linears: Sequence[LinearCase]) -> list[LinearCase]:
    """Return a case for each linear that may use the kernel for Hopper, and for each of TOKEN_BUCKETS.

    In small batches these are all linears, except that of the logits for a single token. In larger batches, only the
    linears of gate and up.
    """
    return [
        case
        for case in at_each(linears, TOKEN_BUCKETS)
        if case.silu_mul or (case.num_tokens <= SMALL_BATCH and (case.name != HEAD or case.num_tokens > 1))
    ]


def hopper_candidates(case: LinearCase) -> list[HopperTiles]:
    """Return the tiles to measure for a case. Kinds of tiles that were never fastest on an H200 are left out.

    A program takes either all of an SM's shared memory, or half of it, so that a program of the next kernel also fits.
    """
    tokens = max(FEWEST_TOKENS, next(most for most in TOKEN_BUCKETS if case.num_tokens <= most))
    found: dict[HopperTiles, None] = {}
    for groups, parts, products in product((1, 2, 3), (1, 2, 4), (1, 2, 4)):
        programs = -(-case.num_rows // (64 // parts * groups))
        fits = parts * tokens <= MOST_COLUMNS and (not case.silu_mul or parts < 4)
        whole = parts * products == 1 or case.k % (64 * parts * products) == 0
        won = (products < 4 or parts == 2) and (groups < 3 or parts == 1)
        if not (fits and whole and won and programs >= 60):
            continue
        tiles = HopperTiles(groups, tokens, 1, registers_for(groups, parts * tokens), parts, products)
        steps = -(-case.k // tiles.columns)
        for memory in (SHARED_MEMORY, SHARED_MEMORY // 2):
            stages = min((memory - tiles.ending_bytes(case.silu_mul)) // tiles.stage_bytes, steps)
            if stages >= min(3, steps):
                found[replace(tiles, stages=stages)] = None
    return list(found)


def hopper_launches(cases: Sequence[LinearCase], listed: Listed) -> Iterator[Launch]:
    return launches(((case, listed(case)) for case in cases), _kernel)


def tune_hopper_linears(
    cases: Sequence[LinearCase], small: Iterable[TunedLinear], progress: Progress, listed: Listed
) -> Iterator[Outcome]:
    """Yield the outcome of each case: tiles if the kernel for Hopper is worthwhile; see `HopperKernel.tune`.

    A case is measured with the norm before it. In small batches, the kernel is compared with the small-batch kernel and
    its tuned tiles, `small`. In larger batches it is compared with torch's linear, at the fewest and the most tokens.
    listed: returns the candidates of a case.
    """
    bytes_per_s = device_rates(torch.device("cuda"), torch.bfloat16).bytes_per_s
    known = {key(tuned.case): tuned.tiles for tuned in small if isinstance(tuned.tiles, Tiles)}
    return HopperKernel(
        "measure linears on Hopper",
        chains_of=_chains,
        candidates=listed,
        kernel=_kernel,
        before=lambda case: _library if case.num_tokens > SMALL_BATCH else partial(_small_batch, _tiles(case, known)),
        library=_library,
        bound_us=lambda case: case.num_rows * case.k * 2 / bytes_per_s * 1e6,
        worth=WORTH,
    ).tune(cases, progress)


def _chains(case: LinearCase) -> list[Chain]:
    ends = (SMALL_BATCH + 1, case.num_tokens) if case.num_tokens > SMALL_BATCH else (case.num_tokens,)
    return [Chain([replace(case, num_tokens=tokens)]) for tokens in ends]


def _kernel(tiles: HopperTiles) -> Linear:
    return partial(_on_hopper, tiles)


def _tiles(case: LinearCase, known: Mapping[LinearKey, Tiles]) -> Tiles:
    """Return the small-batch kernel's tiles for a case: tuned tiles if known, otherwise those of choose_tiles."""
    bucket = next(tokens for tokens in small_batch_linear_op.TOKEN_BUCKETS if case.num_tokens <= tokens)
    shape = case.num_rows, case.k, case.silu_mul
    return known.get((bucket, *shape)) or choose_tiles(case.num_tokens, *shape, torch.bfloat16)


def _normed(x_TK: torch.Tensor, norm_weight_K: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x_TK if norm_weight_K is None else rms_norm.launch(x_TK, norm_weight_K, eps)


def _on_hopper(
    tiles: HopperTiles,
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    eps: float,
    residual_TM: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    return hopper_linear(_normed(x_TK, norm_weight_K, eps), weight_NK, bias_N, gated, "silu", tiles, residual_TM)


def _library(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    eps: float,
    residual_TM: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    y_TN = torch.nn.functional.linear(_normed(x_TK, norm_weight_K, eps), weight_NK, bias_N)
    y_TN = silu_mul.launch(y_TN) if gated else y_TN
    return y_TN if residual_TM is None else residual_TM + y_TN


def _small_batch(tiles: Tiles, *arguments: object) -> torch.Tensor:
    launch: Linear = small_batch_linear_op.launch
    return launch(*arguments, tiles=tiles)
