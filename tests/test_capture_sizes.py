"""Capture sizes planned from a histogram: the least padding of all choices within the budget, by brute force."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.config import GraphMode
from compiled_engine.graphs.capture_plan import CaptureBudget, GraphFamily, plan_capture_sizes
from compiled_engine.graphs.capture_sizes import planned_capture_sizes, read_histogram

HISTOGRAMS = st.dictionaries(st.integers(1, 40), st.integers(0, 50), max_size=6)


def padding(histogram: dict[int, int], sizes: tuple[int, ...]) -> int:
    return sum(count * (min(s for s in sizes if s >= size) - size) for size, count in histogram.items() if count)


def least_padding(histogram: dict[int, int], most: int) -> int:
    """Over every set of at most `most` of the sizes that occurred, the largest included."""
    occurred = sorted(size for size, count in histogram.items() if count)
    if not occurred:
        return 0
    return min(
        padding(histogram, (*chosen, occurred[-1]))
        for count in range(min(most, len(occurred)))
        for chosen in itertools.combinations(occurred[:-1], count)
    )


@given(HISTOGRAMS, st.integers(1, 7))
def test_one_family_has_the_least_padding(histogram: dict[int, int], graphs: int) -> None:
    (sizes,) = plan_capture_sizes([GraphFamily(histogram)], CaptureBudget(graphs=graphs))
    occurred = [size for size, count in histogram.items() if count]
    assert len(sizes) <= graphs
    assert set(sizes) <= set(occurred)
    if occurred:
        assert max(sizes) == max(occurred)
        assert padding(histogram, sizes) == least_padding(histogram, graphs)


@given(HISTOGRAMS, HISTOGRAMS, st.integers(2, 8))
def test_two_families_share_the_budget(first: dict[int, int], second: dict[int, int], graphs: int) -> None:
    plans = plan_capture_sizes([GraphFamily(first), GraphFamily(second)], CaptureBudget(graphs=graphs))
    assert sum(map(len, plans)) <= graphs
    got = sum(padding(h, sizes) for h, sizes in zip((first, second), plans, strict=True))
    splits = [(a, graphs - a) for a in range(1, graphs)]
    assert got <= min(least_padding(first, a) + least_padding(second, b) for a, b in splits)


def test_seconds_and_bytes_bound_the_plan_too() -> None:
    histogram = dict.fromkeys(range(1, 21), 1)
    for budget in (CaptureBudget(seconds=1.0), CaptureBudget(bytes=50)):
        (sizes,) = plan_capture_sizes([GraphFamily(histogram, seconds=0.2, bytes=10)], budget)
        assert len(sizes) == 5
    with pytest.raises(ValueError, match="does not allow one graph for each kind of batch; allow more"):
        plan_capture_sizes([GraphFamily(histogram, seconds=0.2)], CaptureBudget(seconds=0.1))


def plan(mode: GraphMode, **budget: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    histogram = {"decodes": {3: 10, 7: 10, 300: 1}, "mixed": {40: 5, 100: 5, 9000: 7}}
    return planned_capture_sizes(histogram, CaptureBudget(**budget), mode, 28, 256, 512)


def test_modes_take_the_batches_that_they_capture() -> None:
    assert plan(GraphMode.FULL_AND_PIECEWISE) == ((3, 7), (40, 100))
    assert plan(GraphMode.FULL_DECODE_ONLY) == ((3, 7), ())
    assert plan(GraphMode.PIECEWISE) == ((), (3, 7, 40, 100))
    assert plan(GraphMode.FULL_AND_PIECEWISE, graphs=2) == ((7,), (100,))


def test_a_histogram_is_read_from_metrics_too(tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    histogram = {"decodes": {"8": 3}, "mixed": {}}
    for data in (histogram, {"batch_histogram": histogram}, {"metrics": {"batch_histogram": histogram}}):
        path.write_text(json.dumps(data))
        assert read_histogram(path) == {"decodes": {8: 3}, "mixed": {}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has no histogram; allowed: an object with 'decodes' and 'mixed'"),
        ('{"sizes": {}}', "has no histogram"),
        ('{"decodes": {"0": 1}}', "has '0': 1 under 'decodes'; allowed: a size of at least 1"),
        ('{"decodes": {"x": 1}}', "has 'x': 1 under 'decodes'"),
        ('{"mixed": {"8": -1}}', "has '8': -1 under 'mixed'"),
        ('{"mixed": 3}', "has 3: None under 'mixed'"),
    ],
)
def test_a_histogram_that_is_none_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_histogram(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_histogram(tmp_path / "none.json")
