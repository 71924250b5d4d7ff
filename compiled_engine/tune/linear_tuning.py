"""The tiles of small-batch linears, measured on this GPU, in place: a layer's linears one after another, as they run.

A kernel starts while the one before it ends (programmatic dependent launch), so what is best for a linear depends on
its neighbours. Each linear in turn takes the candidate with which the whole chain, a CUDA graph over layers with
weights of their own, is fastest; then again with the best few, since the neighbours have changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby, product

import torch

from compiled_engine.bench.bounds import device_rates
from compiled_engine.kernels.launch_arguments import next_power_of_2
from compiled_engine.passes.linear.small_batch_linear_op import Tiles, launch, reference
from compiled_engine.process.child import as_this_one
from compiled_engine.process.progress import Progress
from compiled_engine.tune.linears import REPEATS, SHARED_MEMORY, Chain, Linear, LinearCase, TunedLinear, right

# How many of a linear's candidates are measured in each round, and how often.
ROUNDS = ((None, 2), (10, 3), (5, 7))


def candidates(case: LinearCase) -> list[Tiles]:
    """Tiles that fit the registers and the shared memory of an SM, and give every SM something to do."""
    if case.num_tokens == 1:
        return _one_token(case)
    tokens = min(64, max(8, next_power_of_2(case.num_tokens)))
    return [*_split_between_programs(case, tokens), *_split_between_warps(case, tokens)]


def _one_token(case: LinearCase) -> list[Tiles]:
    halves = 2 if case.silu_mul else 1
    found = []
    for outputs, block_k, warps in product((1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8)):
        rows = outputs * halves
        # Elements of a tile per thread: too few leave the memory idle, too many fill the registers.
        if block_k <= next_power_of_2(case.k) and 16 <= rows * block_k // (32 * warps) <= 128:
            found.append(Tiles(1, rows, block_k, num_warps=warps))
    return found


def _split_between_programs(case: LinearCase, tokens: int) -> list[Tiles]:
    splits = (1, 2, 4, 8) if case.num_rows <= 8192 and not case.silu_mul else (1,)
    norm_inside = (False, True) if case.norm and tokens <= 8 else (False,)
    found = []
    for rows, block_k, split_k, stages, inside in product((32, 64, 128), (64, 128, 256), splits, (3, 5), norm_inside):
        programs = -(-case.num_rows // rows) * split_k
        step = (rows + tokens) * block_k * 2
        if (
            split_k * block_k * 2 <= case.k
            and programs >= 60
            and (split_k == 1 or programs <= 450)
            and step * stages >= 32 << 10
            and step * (stages - 1) <= SHARED_MEMORY
            and not (inside and split_k > 1)
        ):
            found.append(Tiles(tokens, rows, block_k, 1, split_k, num_stages=stages, norm_inside=inside))
    return found


def _split_between_warps(case: LinearCase, tokens: int) -> list[Tiles]:
    """Tiles for few tokens: theirs is as deep as the weight's, whatever the number of its rows."""
    found = []
    for rows, block_k, stages, inside in product((16, 32), (64, 128, 256), (3, 5), (False, True)):
        steps = case.k / (4 * block_k)
        memory = (rows + tokens) * 4 * block_k * 2 * (stages - 1 if steps > 1 else 1)
        if (
            tokens <= 8
            and (steps == 1 or (steps > 1 and steps.is_integer()))
            and (steps > 1 or stages == 3)
            and memory <= SHARED_MEMORY
            and (case.norm or not inside)
            and rows * block_k >= 2048
            and case.num_rows >= 60 * rows
        ):
            found.append(Tiles(tokens, rows, block_k, 4, num_stages=stages, norm_inside=inside))
    return found


@torch.inference_mode()
def tune_linears(cases: Sequence[LinearCase], progress: Progress, workers: int | None = None) -> list[TunedLinear]:
    """The fastest right tiles for each case. Candidates are compiled by other processes first."""
    compile_candidates(len(os.sched_getaffinity(0)) - 1 if workers is None else workers, cases, progress)
    tuned = []
    bytes_per_s = device_rates(torch.device("cuda"), torch.bfloat16).bytes_per_s
    with progress.stage("measure linears", total=sum(len(candidates(case)) for case in cases)) as advance:
        for _, same in groupby(cases, key=lambda case: (case.num_tokens, case.name == "head")):
            tuned += _tune(list(same), bytes_per_s, advance)
    return tuned


def _tune(cases: Sequence[LinearCase], bytes_per_s: float, advance: Callable[[int], None]) -> list[TunedLinear]:
    chain = Chain(cases)
    pools = [_right_candidates(case, advance) for case in cases]
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


def _right_candidates(case: LinearCase, advance: Callable[[int], None]) -> list[Tiles]:
    """The candidates that compute what the reference computes."""
    chain = Chain([case], layers=1)

    def counted() -> Iterator[Tiles]:
        for tiles in candidates(case):
            advance(1)
            yield tiles

    return list(right(chain, counted(), _linear, chain.run([reference]).float()))


def _measured(case: LinearCase, tiles: Tiles, bytes_per_s: float) -> TunedLinear:
    chain = Chain([case])
    ours = chain.microseconds([_linear(tiles)], REPEATS)
    cublas = chain.microseconds([lambda x_TK, weight_NK, *others: torch.nn.functional.linear(x_TK, weight_NK)], REPEATS)
    return TunedLinear(case, tiles, ours, cublas, case.num_rows * case.k * 2 / bytes_per_s * 1e6)


def compile_candidates(workers: int, cases: Sequence[LinearCase], progress: Progress) -> None:
    """Fill Triton's cache from several processes: one compiles a candidate in less than a second."""
    if workers < 2:
        return
    source = "import sys; from compiled_engine.tune.linear_tuning import compile_share; compile_share(*sys.argv[1:])"
    encoded = json.dumps([asdict(case) for case in cases])
    command = [sys.executable, "-P", "-c", source, encoded]
    environment = os.environ | as_this_one()
    with progress.stage("compile candidates", total=workers) as advance:
        processes = [subprocess.Popen([*command, str(i), str(workers)], env=environment) for i in range(workers)]
        for process in processes:
            process.wait()
            advance(1)


@torch.inference_mode()
def compile_share(encoded: str, number: str, workers: str) -> None:
    """Launch every `workers`-th candidate once, in a process of its own."""
    cases = [LinearCase(**case) for case in json.loads(encoded)]
    share = [(case, tiles) for case in cases for tiles in candidates(case)][int(number) :: int(workers)]
    chain: Chain | None = None
    for case, tiles in share:
        if chain is None or chain.cases != [case]:
            chain = Chain([case], layers=1)
        try:
            chain.run([_linear(tiles)])
        except Exception:
            continue
