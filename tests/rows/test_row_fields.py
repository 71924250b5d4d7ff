"""Rows of declared fields: a request finds initial values and what was staged for it, never those of the one before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from compiled_engine.rows.row_fields import FIRST_CAPACITY, RowField, RowFields


def make_rows() -> RowFields:
    rows = RowFields(4, "cpu")
    rows.declare(
        RowField("slot", initial=-1), RowField("scale", torch.float32, initial=1), RowField("seed", torch.int64)
    )
    return rows


def test_a_row_starts_with_initial_values_but_for_what_is_set() -> None:
    rows = make_rows()
    rows.set(2, slot=3, scale=0.5, seed=-(2**63))
    rows.writes.apply()
    assert rows["slot"].tolist() == [-1, -1, 3, -1]
    assert rows["seed"].tolist() == [0, 0, -(2**63), 0]
    rows.free(2)
    rows.start(2)
    rows.set(2, scale=0.25)
    rows.writes.apply()
    assert rows["slot"].tolist() == [-1] * 4
    assert rows["scale"].tolist() == [1, 1, 0.25, 1]
    assert rows["seed"].tolist() == [0] * 4


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda rows: None, False),
        (lambda rows: rows.set(1, slot=8), False),
        (lambda rows: rows.free(1), True),
        (lambda rows: rows.writes.discard(), True),
    ],
    ids=["started", "another row is set", "freed again", "the step failed"],
)
def test_a_start_resets_a_row_at_the_next_step_unless_it_was_for_nothing(
    change: Callable[[RowFields], None], kept: bool
) -> None:
    """Nothing else need be set for it."""
    rows = make_rows()
    rows.set(1, slot=3, scale=0.5, seed=7)
    rows.set(2, slot=4)
    rows.writes.apply()
    rows.start(1)
    change(rows)
    rows.writes.apply()
    assert (rows["scale"].tolist(), rows["seed"].tolist()) == (
        [1, 0.5 if kept else 1, 1, 1],
        [0, 7 if kept else 0, 0, 0],
    )
    assert int(rows["slot"][2]) == 4
    rows.set(1, seed=9)
    rows.writes.apply()  # each start counts once
    assert int(rows["seed"][1]) == 9
    rows.writes.apply()
    assert int(rows["seed"][1]) == 9


def test_a_row_may_start_with_values() -> None:
    rows = make_rows()
    rows.start(3, slot=5, scale=0.5)
    rows.set(3, scale=0.25)
    rows.writes.apply()
    assert rows["slot"].tolist() == [-1, -1, -1, 5]
    assert rows["scale"].tolist() == [1, 1, 1, 0.25]


def test_an_array_keeps_what_it_has_when_a_request_takes_its_row() -> None:
    rows = make_rows()
    rows.declare(RowField("table", shape=(2,), initial=-1))
    rows.write("table", 1, np.array([5, 6], np.int32))
    rows.writes.apply()
    rows.start(1)
    rows.lengthen("table", 3)
    rows.writes.apply()
    assert rows["table"].tolist() == [[-1] * 3, [-1, 5, 6], [-1] * 3, [-1] * 3]


def test_lists_are_fields_by_their_name() -> None:
    rows = make_rows()
    rows.declare_list("pairs", 3)
    assert "pairs" in rows
    assert {"pairs_start", "pairs_count"} <= {
        name for name in ("pairs_start", "pairs_count", "pairs_end") if name in rows
    }
    entries = rows.if_declared("pairs")
    assert entries is not None
    assert entries.shape == (FIRST_CAPACITY, 3)
    assert torch.equal(entries, rows["pairs"])
    slots = rows.if_declared("slot")
    assert slots is not None
    assert torch.equal(slots, rows["slot"])
    with pytest.raises(ValueError, match="'pairs_start'"):
        rows.declare_list("pairs", 2)


def test_what_is_staged_for_a_freed_row_is_not_written() -> None:
    rows = make_rows()
    rows.declare(RowField("table", shape=(4,)))
    rows.write("table", 1, np.array([5, 6], np.int32))
    rows.write("table", 2, np.array([7, 8], np.int32), offset=-2)
    rows.start(1)
    rows.set(1, slot=5)
    rows.free(1)
    rows.writes.apply()
    assert rows["table"].tolist() == [[0] * 4, [0] * 4, [0, 0, 7, 8], [0] * 4]
    assert rows["slot"].tolist() == [-1] * 4


def test_fields_have_names_of_their_own_and_may_come_late() -> None:
    rows = make_rows()
    with pytest.raises(ValueError, match="'slot'"):
        rows.declare(RowField("slot"))
    assert "counts" not in rows
    assert rows.if_declared("counts") is None
    late = RowField("counts", torch.int16, (3,))
    rows.declare(late)
    assert rows["counts"].nbytes == late.num_bytes(4) == 24


LISTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, FIRST_CAPACITY)), max_size=30)


@given(LISTS, st.sets(st.integers(0, 29)), st.sets(st.integers(0, 29)))
@example([(0, FIRST_CAPACITY), (0, 0), (1, FIRST_CAPACITY)], set(), {1})
@example([(0, 2), (0, FIRST_CAPACITY), (1, FIRST_CAPACITY)], set(), {1})
def test_lists_of_rows_that_come_and_go(changes: list[tuple[int, int]], applied: set[int], replaced: set[int]) -> None:
    """Memory is bounded by what the rows have at once. A request may get another list, or none any more."""
    rows = make_rows()
    rows.declare_list("pairs", 2)
    expected: dict[int, np.ndarray] = {}
    most = 0
    for step, (row, count) in enumerate(changes):
        if row in expected and step in replaced:
            expected[row] = np.arange(2 * count, dtype=np.int32).reshape(count, 2) + 1000 * step
            rows.write_list("pairs", row, expected[row])
            most = max(most, sum(map(len, expected.values())))
        elif row in expected:
            rows.free(row)
            del expected[row]
        else:
            expected[row] = np.arange(2 * count, dtype=np.int32).reshape(count, 2) + 1000 * step
            rows.start(row)
            rows.write_list("pairs", row, expected[row])
            most = max(most, sum(map(len, expected.values())))
        if step in applied:
            rows.writes.apply()
    rows.writes.apply()
    for row, entries in expected.items():
        start, count = int(rows["pairs_start"][row]), int(rows["pairs_count"][row])
        np.testing.assert_array_equal(rows["pairs"][start : start + count].numpy(), entries)
    assert len(rows["pairs"]) <= max(FIRST_CAPACITY, 2 * most)
