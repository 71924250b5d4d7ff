"""Tune kernels for Hopper: the code that is common to all of them.

A candidate is timed if its results match those of the kernel that would run without it. The fastest candidate is taken
if its gain is worthwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import truediv
from typing import Generic

import torch

from compiled_engine.process.progress import Progress
from compiled_engine.tune.linears import (
    REPEATS,
    AnyTiles,
    Chain,
    Linear,
    LinearCase,
    Outcome,
    Smallest,
    TunedLinear,
    right,
)

# All candidates are measured with few repeats, and the fastest of them again.
FEW_REPEATS, FINALISTS = 3, 5


def is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def worthwhile(times: Mapping[AnyTiles, Sequence[float]], before: Sequence[float], worth: float) -> AnyTiles | None:
    """Return the tiles with the largest worst-case gain, or None if that gain is too small.

    The gain is large enough if, at every number of tokens, the tiles take at most `worth` times as long as the linear
    that would run without this kernel. times, before: microseconds at each number of tokens, of the tiles and of that
    linear.
    """
    shares = {tiles: max(map(truediv, found, before)) for tiles, found in times.items()}
    best = min(shares, key=shares.__getitem__, default=None)
    return None if best is None or shares[best] > worth else best


@dataclass(frozen=True)
class HopperKernel(Generic[AnyTiles]):
    """A kernel for Hopper to be tuned, its candidates, and the linears with which it is compared."""

    stage: str
    # one chain per number of tokens at which tiles must be worthwhile, the case's own last
    chains_of: Callable[[LinearCase], Sequence[Chain]]
    candidates: Callable[[LinearCase], Iterable[AnyTiles]]
    kernel: Callable[[AnyTiles], Linear]  # the linear with these tiles
    before: Callable[[LinearCase], Linear]  # the linear that runs without this kernel
    library: Linear  # cuBLAS, for the profile's readers
    bound_us: Callable[[LinearCase], float]  # least time that the device allows
    worth: float  # see `worthwhile`
    sustained_ms: float = 0.0  # see Chain.microseconds

    @torch.inference_mode()
    def tune(self, cases: Sequence[LinearCase], progress: Progress) -> Iterator[Outcome]:
        """Yield the outcome of each case as soon as it is known: the best correct tiles, or None if not worthwhile.

        Nothing is measured or yielded if the device is not a Hopper GPU.
        """
        if not is_hopper():
            return
        with progress.stage(self.stage, total=len(cases)) as advance:
            for case in cases:
                yield Outcome(case, self._tuned(case))
                advance(1)

    def _tuned(self, case: LinearCase) -> TunedLinear | None:
        chains, current = self.chains_of(case), self.before(case)
        pool = list(self.candidates(case))
        for chain in chains:
            pool = list(right(chain, pool, self.kernel, chain.run([current], 1).float()))
        pool.sort(key=lambda tiles: chains[-1].microseconds([self.kernel(tiles)], FEW_REPEATS))

        def timed(linear: Linear) -> list[float]:
            return [chain.microseconds([linear], REPEATS, self.sustained_ms) for chain in chains]

        times = {tiles: timed(self.kernel(tiles)) for tiles in pool[:FINALISTS]}
        before = timed(current)
        best = worthwhile(times, before, self.worth)
        if best is None:
            return None
        library = before if current is self.library else timed(self.library)
        smallest = Smallest(chains[0].cases[0].num_tokens, times[best][0], library[0]) if len(chains) > 1 else None
        return TunedLinear(case, best, times[best][-1], library[-1], self.bound_us(case), smallest)
