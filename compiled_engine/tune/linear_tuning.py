"""Find the fastest tiles of small-batch linears on this GPU. A layer's linears are timed together, in their order.

A kernel starts while the previous one ends (programmatic dependent launch), so a linear's best tiles depend on its
neighbours. The chain of linears is timed as one CUDA graph over several layers, each with different weights. Each
linear in turn takes the candidate that makes the whole chain fastest. Two more rounds repeat this with each linear's
best few candidates, since its neighbours have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, product

import torch

from compiled_engine.bench.bounds import device_rates
from compiled_engine.kernels.launch_arguments import next_power_of_2
from compiled_engine.passes.linear.small_batch_linear_op import WHOLE_AHEAD_BYTES, Tiles, launch, reference
from compiled_engine.process.progress import Progress
from compiled_engine.tune.compile_first import Launch, launches
from compiled_engine.tune.linears import (
    HEAD,
    REPEATS,
    SHARED_MEMORY,
    Chain,
    Linear,
    LinearCase,
    Outcome,
    TunedLinear,
    right,
)

# Most registers per thread for weights.
MOST_REGISTERS = 128
# Per round: the number of a linear's candidates to measure (None: all), and the repeats.
ROUNDS = ((None, 2), (10, 3), (5, 7))
Listed = Callable[[LinearCase], Sequence[Tiles]]


def candidates(case: LinearCase) -> list[Tiles]:
    """Return the tiles to measure for a case, all of which fit the registers and the shared memory of an SM.

    Kinds of tiles that were never fastest on an H200 are left out.
    """
    if case.num_tokens == 1:
        return _one_token(case)
    tokens = min(64, max(8, next_power_of_2(case.num_tokens)))
    found = [*_split_between_programs(case, tokens), *_split_between_warps(case, tokens)]
    return [*found, *_in_registers(case)] if tokens == 8 else found


def _one_token(case: LinearCase) -> list[Tiles]:
    halves = 2 if case.silu_mul else 1
    found = []
    for outputs, block_k, warps in product((1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8)):
        rows = outputs * halves
        # Elements of a tile per thread: too few do not saturate memory, too many exceed the registers.
        fits = block_k <= next_power_of_2(case.k) and 16 <= rows * block_k // (32 * warps) <= 128
        if fits and block_k >= 256 * warps:
            found.append(Tiles(1, rows, block_k, num_warps=warps))
    return found


def _split_between_programs(case: LinearCase, tokens: int) -> list[Tiles]:
    splits = (1, 2, 4) if case.num_rows <= 8192 and not case.silu_mul else (1,)
    sides = product((64, 128), (128, 256)) if tokens <= 8 else [*product((32, 64), (64, 128)), (32, 256), (128, 64)]
    found = []
    for (rows, block_k), split_k, stages in product(sides, splits, (3, 5)):
        programs = -(-case.num_rows // rows) * split_k
        step = (rows + tokens) * block_k * 2
        if (
            split_k * block_k * 2 <= case.k
            and programs >= 60
            and (split_k == 1 or programs <= 450)
            and step * stages >= 32 << 10
            and step * (stages - 1) <= SHARED_MEMORY
        ):
            found.append(Tiles(tokens, rows, block_k, 1, split_k, num_stages=stages))
    return found


def _split_between_warps(case: LinearCase, tokens: int) -> list[Tiles]:
    """Return tiles for up to eight tokens, with four groups of warps that each take a part of a step's columns.

    Stages of shared memory hold the tokens' columns as well as the weight's.
    """
    found = []
    for rows, block_k, stages, inside in product((16, 32), (128, 256), (3, 5), (False, True)):
        steps = case.k / (4 * block_k)
        memory = (rows + tokens) * 4 * block_k * 2 * (stages - 1 if steps > 1 else 1)
        if (
            tokens <= 8
            and (steps == 1 or (steps > 1 and steps.is_integer()))
            and (steps > 1 or stages == 3)
            and memory <= SHARED_MEMORY
            and (case.norm or not inside)
            and case.num_rows >= 60 * rows
        ):
            found.append(Tiles(tokens, rows, block_k, 4, num_stages=stages, norm_inside=inside))
    return found


def _in_registers(case: LinearCase) -> list[Tiles]:
    """Return tiles for up to eight tokens that read weights into registers, bypassing shared memory.

    Steps divide the columns evenly. The list is empty for weights above WHOLE_AHEAD_BYTES, for which such tiles were
    never fastest.
    """
    found: list[Tiles] = []
    if case.num_rows * case.k * 2 > WHOLE_AHEAD_BYTES:
        return found
    for outputs, groups, block_k in product((8, 16, 32), (2, 4, 8), (64, 128, 256, 512)):
        rows = outputs * (2 if case.silu_mul else 1)
        # Registers per thread for a step's weights: too few do not saturate memory, too many leave none for tokens.
        registers = rows * block_k // 64
        programs = case.num_rows // rows
        if (
            case.k % (groups * block_k) == 0
            and 8 <= registers <= MOST_REGISTERS
            and programs >= 60
            and groups * programs >= 400
        ):
            ahead = min(case.k // (groups * block_k), MOST_REGISTERS // registers)
            inside = {"norm_inside": True} if case.norm else {}
            found.append(Tiles(8, rows, block_k, groups, num_warps=groups, ahead=ahead, **inside))
    return found


def in_registers(tiles: object) -> bool:
    """Return whether tiles belong to the kernel that reads weights into registers."""
    return isinstance(tiles, Tiles) and tiles.ahead > 0


def linear_launches(cases: Sequence[LinearCase], listed: Listed) -> Iterator[Launch]:
    return launches(((case, listed(case)) for case in cases), _linear)


@torch.inference_mode()
def tune_linears(cases: Sequence[LinearCase], progress: Progress, listed: Listed) -> Iterator[Sequence[Outcome]]:
    """Yield the outcomes of cases that are timed together, with their fastest correct tiles, as soon as they are known.

    A case without a correct candidate, such as a very small weight, gets no tiles; small_batch_linear_op.choose_tiles
    then chooses them when the kernel runs. listed: returns the candidates of a case.
    """
    bytes_per_s = device_rates(torch.device("cuda"), torch.bfloat16).bytes_per_s
    with progress.stage("measure linears", total=sum(len(listed(case)) for case in cases)) as advance:
        for _, same in groupby(cases, key=lambda case: (case.num_tokens, case.name == HEAD)):
            together = list(same)
            tuned = {each.case: each for each in _tune(together, listed, bytes_per_s, advance)}
            yield [Outcome(case, tuned.get(case)) for case in together]


def _tune(
    cases: Sequence[LinearCase], listed: Listed, bytes_per_s: float, advance: Callable[[int], None]
) -> list[TunedLinear]:
    found = [(case, pool) for case in cases if (pool := _right_candidates(case, listed(case), advance))]
    if not found:
        return []
    cases, pools = zip(*found, strict=True)
    chain = Chain(cases)
    chosen = [pool[0] for pool in pools]
    times: list[dict[Tiles, float]] = [{} for _ in cases]
    for keep, repeats in ROUNDS:
        for i, pool in enumerate(pools):
            for tiles in sorted(pool, key=lambda tiles: times[i].get(tiles, 0.0))[:keep]:
                times[i][tiles] = chain.microseconds(
                    [_linear(each) for each in (*chosen[:i], tiles, *chosen[i + 1 :])], repeats
                )
            chosen[i] = min(times[i], key=times[i].__getitem__)
    return [_measured(case, tiles, bytes_per_s) for case, tiles in zip(cases, chosen, strict=True)]


def _linear(tiles: Tiles) -> Linear:
    return partial(launch, tiles=tiles)


def _right_candidates(case: LinearCase, pool: Sequence[Tiles], advance: Callable[[int], None]) -> list[Tiles]:
    """Return the candidates in `pool` whose results match the reference. advance: called with 1 for each candidate."""
    chain = Chain([case], layers=1)

    def counted() -> Iterator[Tiles]:
        for tiles in pool:
            advance(1)
            yield tiles

    return list(right(chain, counted(), _linear, chain.run([reference]).float()))


def _measured(case: LinearCase, tiles: Tiles, bytes_per_s: float) -> TunedLinear:
    chain = Chain([case])
    ours = chain.microseconds([_linear(tiles)], REPEATS)
    cublas = chain.microseconds([lambda x_TK, weight_NK, *others: torch.nn.functional.linear(x_TK, weight_NK)], REPEATS)
    return TunedLinear(case, tiles, ours, cublas, case.num_rows * case.k * 2 / bytes_per_s * 1e6)
