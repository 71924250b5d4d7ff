"""Capture sizes from a histogram: what is within the limits, what a graph costs, and what is no histogram."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiled_engine.config import GraphMode
from compiled_engine.graphs.capture_plan import CaptureBudget
from compiled_engine.graphs.capture_sizes import (
    FULL_COST_PER_LAYER,
    LIMIT,
    SEGMENTED_COST_PER_LAYER,
    planned_capture_sizes,
    read_histogram,
)


def test_batches_up_to_the_limits_count() -> None:
    histogram = {"decodes": {3: 1, 256: 1, 257: 1}, "mixed": {40: 1, 512: 1, 513: 1}}
    sizes = planned_capture_sizes(histogram, CaptureBudget(), GraphMode.FULL_AND_PIECEWISE, 28, 256, 512)
    assert sizes == ((3, 256), (40, 512))


@pytest.mark.parametrize(
    ("mode", "mixed_cost"),
    [(GraphMode.FULL, FULL_COST_PER_LAYER), (GraphMode.FULL_AND_PIECEWISE, SEGMENTED_COST_PER_LAYER)],
)
@pytest.mark.parametrize("unit", [0, 1])
def test_a_graph_costs_by_the_layer_and_its_kind(mode: GraphMode, mixed_cost: tuple[float, int], unit: int) -> None:
    histogram = {"decodes": {8: 1}, "mixed": dict.fromkeys(range(10, 20), 1)}
    enough = 28 * (FULL_COST_PER_LAYER[unit] + 4 * mixed_cost[unit]) * 1.001
    budget = CaptureBudget(seconds=enough) if unit == 0 else CaptureBudget(bytes=enough)
    decodes, mixed = planned_capture_sizes(histogram, budget, mode, 28, 256, 512)
    assert (decodes, len(mixed)) == ((8,), 4)


@pytest.mark.parametrize("data", [{}, {"decodes": {}, "sizes": {}}, {"decodes": {"8": LIMIT}}, {"mixed": {"8": 1.5}}])
def test_what_is_no_histogram(data: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"capture_histogram .* allowed: "):
        read_histogram(path)
