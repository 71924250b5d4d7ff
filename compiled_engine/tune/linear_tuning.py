"""Measures the tiles of small-batch linears on this GPU: chained launches on distinct weights in a CUDA graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from compiled_engine.passes.small_batch_linear_launch import Tiles, launch
from compiled_engine.passes.small_batch_linear_op import reference
from compiled_engine.progress import Progress
from compiled_engine.tune.linear_candidates import LinearCase, candidates

# So many bytes of weights in turn that the L2 cache holds none of them.
WORKING_SET = 400 << 20
REPEATS = 5


@dataclass(frozen=True)
class TunedLinear:
    """The fastest tiles of a case, microseconds of a launch, and of the bytes at the memory's bandwidth."""

    case: LinearCase
    tiles: Tiles
    microseconds: float
    cublas_microseconds: float
    bound_microseconds: float


class _Operands:
    """A case's inputs, and as many weights as fill the working set."""

    def __init__(self, case: LinearCase, copies: int | None = None):
        outputs = case.num_rows // 2 if case.silu_mul else case.num_rows
        size = case.num_rows * case.k * 2
        copies = copies or max(2, min(64, -(-WORKING_SET // size)))
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        generator = torch.Generator(device="cuda").manual_seed(0)
        self.x_TK = torch.randn(case.num_tokens, case.k, generator=generator, **options)
        self.weights = [
            torch.randn(case.num_rows, case.k, generator=generator, **options) / case.k**0.5 for _ in range(copies)
        ]
        self.norm_weight_K = torch.ones(case.k, **options) if case.norm else None
        self.residual_TM = torch.randn(case.num_tokens, outputs, generator=generator, **options)
        self.case = case

    def arguments(
        self, weight_NK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor | None, float, torch.Tensor | None, bool]:
        residual = self.residual_TM if self.case.residual else None
        return self.x_TK, weight_NK, None, self.norm_weight_K, 1e-6, residual, self.case.silu_mul


@torch.inference_mode()
def tune_linears(cases: Sequence[LinearCase], progress: Progress, workers: int | None = None) -> list[TunedLinear]:
    """The fastest right tiles for each case. Candidates are compiled by other processes first."""
    compile_candidates(len(os.sched_getaffinity(0)) - 1 if workers is None else workers, cases, progress)
    tuned = []
    total = sum(len(candidates(case)) for case in cases)
    with progress.stage("measure linears", total=total) as advance:
        for case in cases:
            tuned.append(_tune(case, advance))
    return tuned


def _tune(case: LinearCase, advance: Callable[[int], None]) -> TunedLinear:
    operands = _Operands(case)
    expected = reference(*operands.arguments(operands.weights[0])).float()
    allowed = 0.03 * float(expected.abs().max())
    times: dict[Tiles, float] = {}
    for tiles in candidates(case):
        advance(1)
        try:
            found = launch(*operands.arguments(operands.weights[0]), tiles=tiles).float()
        except Exception:  # tiles that this device cannot hold
            continue
        if bool((found - expected).abs().max() <= allowed):
            times[tiles] = _microseconds(operands, partial(launch, tiles=tiles))
    best = sorted(times, key=times.__getitem__)[:4]
    again = {tiles: _microseconds(operands, partial(launch, tiles=tiles), REPEATS) for tiles in best}
    tiles = min(again, key=again.__getitem__)
    plain = _microseconds(
        operands, lambda x_TK, weight_NK, *others: torch.nn.functional.linear(x_TK, weight_NK), REPEATS
    )
    size = case.num_rows * case.k * 2
    return TunedLinear(case, tiles, again[tiles], plain, size / 4.3e6)


def _microseconds(operands: _Operands, linear: Callable[..., torch.Tensor], repeats: int = 2) -> float:
    """Of one launch in a chain over all weights: the least of the repeats."""
    linear(*operands.arguments(operands.weights[0]))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight_NK in operands.weights:
            linear(*operands.arguments(weight_NK))
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    least = float("inf")
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) * 1e3 / len(operands.weights))
    graph.reset()
    return least


def compile_candidates(workers: int, cases: Sequence[LinearCase], progress: Progress) -> None:
    """Fill Triton's cache from several processes: one compiles a candidate in about a second."""
    if workers < 2:
        return
    source = "import sys; from compiled_engine.tune.linear_tuning import compile_share; compile_share(*sys.argv[1:])"
    encoded = json.dumps([asdict(case) for case in cases])
    command = [sys.executable, "-P", "-c", source, encoded]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
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
    operands: _Operands | None = None
    for case, tiles in share:
        if operands is None or operands.case != case:
            operands = _Operands(case, copies=1)
        try:
            launch(*operands.arguments(operands.weights[0]), tiles=tiles)
        except Exception:
            continue
