"""Device memory of CUDA graphs, predicted from a few captures before the KV cache is sized."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from compiled_engine.graphs.cuda_graphs.key import GraphKey, GraphKind

# Captures of one kind are sampled until their driver memory is this much: the driver gives it out in steps of 2 MiB.
ENOUGH_DRIVER_BYTES = 24 << 20
MOST_SAMPLES = 16
# Plausible driver memory per graph; other readings are caused by other processes.
PLAUSIBLE_DRIVER_BYTES = range(0, 64 << 20)


class MemoryReading(NamedTuple):
    """Bytes of the device: `pool` reserved by torch, which holds what captured kernels write; `driver` everything
    else, of which graphs take some for each of their nodes."""

    pool: int
    driver: int

    def since(self, before: MemoryReading) -> MemoryReading:
        """The increase in use."""
        return MemoryReading(self.pool - before.pool, self.driver - before.driver)


def enough_samples(readings: Sequence[MemoryReading]) -> bool:
    """Return whether a kind of graph has enough samples."""
    return len(readings) >= MOST_SAMPLES or _driver_mean(readings) * len(readings) >= ENOUGH_DRIVER_BYTES


def total_bytes(families: Iterable[tuple[Sequence[MemoryReading], int]]) -> int:
    """Predict all graphs from (readings, number of graphs) of each kind. The pool of the measured graphs also fits the
    others.
    """
    total = 0.0
    for readings, count in families:
        total += sum(reading.pool for reading in readings) + _driver_mean(readings) * count
    return int(total)


def _driver_mean(readings: Sequence[MemoryReading]) -> float:
    plausible = [reading.driver for reading in readings if reading.driver in PLAUSIBLE_DRIVER_BYTES]
    return sum(plausible) / len(plausible) if plausible else 0.0


def capture_order(key: GraphKey, decodes_first: bool) -> tuple[bool, bool, int, int]:
    """Sort key for the order of capture: graphs around attention first, or decodes first."""
    return (
        decodes_first or key.kind is GraphKind.FULL,
        key.is_decode is not decodes_first,
        -key.num_tokens,
        -key.max_seq_len,
    )


def families(keys: Iterable[GraphKey], decodes_first: bool) -> list[list[GraphKey]]:
    """Families of keys that differ only in size, the largest first, in the order of capture."""
    found: dict[tuple[GraphKind, bool, tuple[tuple[str, int], ...]], list[GraphKey]] = {}
    for key in sorted(keys, key=lambda key: capture_order(key, decodes_first)):
        found.setdefault((key.kind, key.is_decode, key.extra), []).append(key)
    return list(found.values())
