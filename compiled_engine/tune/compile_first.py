"""Compile all candidate kernels in several processes before the first is measured, since each takes a second or
more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial

import torch

from compiled_engine.kernels.cache_folder import kernels_in
from compiled_engine.kernels.compile_ahead import KernelWorkers, compiled_by
from compiled_engine.process.cores import usable_cores
from compiled_engine.process.progress import Progress
from compiled_engine.tune.linears import AnyTiles, Chain, Linear, LinearCase

Launch = Callable[[], object]


def launches(
    cases: Iterable[tuple[LinearCase, Iterable[AnyTiles]]], kernel: Callable[[AnyTiles], Linear]
) -> Iterator[Launch]:
    """Yield a function that launches `kernel` with one candidate's tiles, for each candidate of each case."""
    for case, candidates in cases:
        chain = Chain([case], layers=1)
        for tiles in candidates:
            yield partial(chain.run, [kernel(tiles)])


@torch.inference_mode()
def compile_first(many: Sequence[Iterator[Launch]], progress: Progress) -> None:
    """Compile and load the kernels that the functions in `many` launch, without launching them.

    Kernels that cannot be built are skipped.
    """
    count = usable_cores()
    device = torch.cuda.current_device()
    with (
        kernels_in(None),  # CheckedFiles lets threads load launchers concurrently
        ThreadPoolExecutor(count, initializer=torch.cuda.set_device, initargs=(device,)) as threads,
        KernelWorkers(count if count > 1 else 0, None) as workers,
    ):
        workers.start()
        with compiled_by(workers, threads) as kernels:
            for launch in (launch for some in many for launch in some):
                with suppress(Exception):
                    launch()
            jobs = kernels.load()
            with progress.stage("compile candidates", total=len(jobs)) as advance:
                for job in as_completed(jobs):
                    job.exception()
                    advance(1)
