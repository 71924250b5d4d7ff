"""Which sizes are captured: by the default rule, or planned from the batch sizes that occurred."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_engine.config import GraphMode
from compiled_engine.graphs.cuda_graphs.plan import CaptureBudget, GraphFamily, plan_capture_sizes

# The most tokens of a mixed batch that are captured: beyond, the device has work for longer than launching takes.
MAX_CAPTURED_TOKENS = 512
# Of a histogram's sizes and counts, so that their products stay within 64 bits.
LIMIT = 1 << 40
# What one more graph takes beside the memory that all share, for each layer of the model: (seconds, bytes), measured
# on an H200 with the default passes.
FULL_COST_PER_LAYER = (0.5e-3, 40 << 10)
SEGMENTED_COST_PER_LAYER = (1.0e-3, 70 << 10)


def default_capture_sizes(limit: int) -> tuple[int, ...]:
    """1, 2, 4, 8 to 256 in steps of 8, then in steps of 16, up to and including `limit`."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, limit + 1, 16)]
    return tuple(sorted({size for size in sizes if size <= limit} | {limit}))


def planned_capture_sizes(
    histogram: Mapping[str, Mapping[int, int]],
    budget: CaptureBudget,
    mode: GraphMode,
    num_layers: int,
    most_decodes: int,
    most_tokens: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(decode sizes, token sizes) with the least padding over what occurred. Batches beyond the limits are left out.

    Raises ValueError where the budget does not allow a graph for each kind of batch.
    """
    decodes = {size: count for size, count in histogram["decodes"].items() if size <= most_decodes}
    mixed = {size: count for size, count in histogram["mixed"].items() if size <= most_tokens}
    if not mode.captures_decodes:
        mixed = {size: mixed.get(size, 0) + decodes.get(size, 0) for size in {*mixed, *decodes}}
        decodes = {}
    if not mode.captures_mixed:
        mixed = {}
    of_mixed = FULL_COST_PER_LAYER if mode is GraphMode.FULL else SEGMENTED_COST_PER_LAYER
    families = [
        GraphFamily(histogram_, seconds * num_layers, size * num_layers)
        for histogram_, (seconds, size) in ((decodes, FULL_COST_PER_LAYER), (mixed, of_mixed))
    ]
    decode_sizes, token_sizes = plan_capture_sizes(families, budget)
    return decode_sizes, token_sizes


def read_histogram(path: Path) -> dict[str, dict[int, int]]:
    """{"decodes": {requests: count}, "mixed": {tokens: count}} from a JSON file; raises ValueError naming what is
    wrong in it. A file with the engine's metrics, or what `generate --json` prints, is taken too."""
    try:
        data: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"capture_histogram is {str(path)!r}, which cannot be read as JSON: {error}") from error
    for name in ("metrics", "batch_histogram"):
        if isinstance(data, dict) and name in data:
            data = data[name]
    if not isinstance(data, dict) or not {"decodes", "mixed"} >= data.keys() or not data:
        raise ValueError(
            f"capture_histogram {str(path)!r} has no histogram; allowed: an object with 'decodes' and 'mixed', each "
            "from a batch size to how often it occurred"
        )
    return {name: _counts(path, name, data.get(name, {})) for name in ("decodes", "mixed")}


def _is_natural(size: Any) -> bool:
    return str(size).isdecimal() and len(str(size)) < len(str(LIMIT))


def _counts(path: Path, name: str, counts: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    for size, count in counts.items() if isinstance(counts, dict) else [(counts, None)]:
        if not (_is_natural(size) and int(size) > 0 and isinstance(count, int) and 0 <= count < LIMIT):
            raise ValueError(
                f"capture_histogram {str(path)!r} has {size!r}: {count!r} under {name!r}; allowed: a size of at least "
                f"1 and a count of at least 0, below {LIMIT}"
            )
        found[int(size)] = count
    return found
