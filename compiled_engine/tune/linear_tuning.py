"""Measures the tiles of small-batch linears on this GPU, in place: a layer's linears one after another, as they run.

A kernel starts while the one before it ends (programmatic dependent launch), so what is best for a linear depends on
its neighbours. Each linear in turn takes the candidate with which the whole chain, a CUDA graph over layers with
weights of their own, is fastest; then again with the best few, since the neighbours have changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby

import torch

from compiled_engine.bench.bounds import device_rates
from compiled_engine.passes.hopper_linear import HopperTiles
from compiled_engine.passes.hopper_product import ProductTiles
from compiled_engine.passes.small_batch_linear_op import Tiles, launch, reference
from compiled_engine.process.child import as_this_one
from compiled_engine.process.progress import Progress
from compiled_engine.tune.linear_candidates import LinearCase, candidates

# So many bytes of weights in turn that the L2 cache holds none of them.
WORKING_SET = 800 << 20
# How many of a linear's candidates are measured in each round, and how often.
ROUNDS = ((None, 2), (10, 3), (5, 7))

Linear = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class TunedLinear:
    """The fastest tiles of a case, microseconds of a launch, and of the bytes at the memory's bandwidth."""

    case: LinearCase
    tiles: Tiles | HopperTiles | ProductTiles
    microseconds: float
    cublas_microseconds: float
    bound_microseconds: float


class Chain:
    """Linears of which each reads what the one before it wrote, over as many layers as fill the working set."""

    def __init__(self, cases: Sequence[LinearCase], layers: int | None = None):
        size = sum(case.num_rows * case.k * 2 for case in cases)
        self.cases = cases
        self.generator = torch.Generator(device="cuda").manual_seed(0)
        self.layers = [
            [self._normal(case.num_rows, case.k) / case.k**0.5 for case in cases]
            for _ in range(layers or max(2, min(64, -(-WORKING_SET // size))))
        ]
        tokens = cases[0].num_tokens
        self.x_TK = self._normal(tokens, cases[0].k)
        self.residuals = [self._normal(tokens, case.num_rows) if case.residual else None for case in cases]
        self.norm_weights = [1 + self._normal(case.k) / 8 if case.norm else None for case in cases]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.bfloat16, device="cuda")

    def run(self, linears: Sequence[Linear], layers: int | None = None) -> torch.Tensor:
        x_TK = self.x_TK
        for weights in self.layers[:layers]:
            for i, case in enumerate(self.cases):
                # Of the qkv projection only q goes on; a linear measured alone may be too narrow for the next layer.
                x_TK = linears[i](
                    (x_TK if x_TK.shape[1] >= case.k else self.x_TK)[:, : case.k],
                    weights[i],
                    None,
                    self.norm_weights[i],
                    1e-6,
                    self.residuals[i],
                    case.silu_mul,
                )
        return x_TK

    def microseconds(self, linears: Sequence[Linear], repeats: int) -> float:
        """Of a layer: the median of the repeats."""
        self.run(linears, 1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(linears)
        graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(repeats):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(self.layers))
        graph.reset()
        return sorted(times)[repeats // 2]


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
                times[i][tiles] = chain.microseconds(_linears([*chosen[:i], tiles, *chosen[i + 1 :]]), repeats)
            chosen[i] = min(times[i], key=times[i].__getitem__)
    return [_measured(case, tiles, bytes_per_s) for case, tiles in zip(cases, chosen, strict=True)]


def _linears(tiles: Sequence[Tiles]) -> list[Linear]:
    return [partial(launch, tiles=each) for each in tiles]


def _right_candidates(case: LinearCase, advance: Callable[[int], None]) -> list[Tiles]:
    """Those that this device can hold and that compute what the reference computes."""
    chain = Chain([case], layers=1)
    expected = chain.run([reference]).float()
    right = []
    for tiles in candidates(case):
        advance(1)
        try:
            found = chain.run(_linears([tiles])).float()
        except Exception:  # out of shared memory, of registers
            continue
        if bool((found - expected).abs().max() <= 0.03 * expected.abs().max()):
            right.append(tiles)
    return right


def _measured(case: LinearCase, tiles: Tiles, bytes_per_s: float) -> TunedLinear:
    chain = Chain([case])
    ours = chain.microseconds(_linears([tiles]), 9)
    cublas = chain.microseconds([lambda x_TK, weight_NK, *others: torch.nn.functional.linear(x_TK, weight_NK)], 9)
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
    """In a process of its own: launch every `workers`-th candidate once."""
    cases = [LinearCase(**case) for case in json.loads(encoded)]
    share = [(case, tiles) for case in cases for tiles in candidates(case)][int(number) :: int(workers)]
    chain: Chain | None = None
    for case, tiles in share:
        if chain is None or chain.cases != [case]:
            chain = Chain([case], layers=1)
        try:
            chain.run(_linears([tiles]))
        except Exception:
            continue
