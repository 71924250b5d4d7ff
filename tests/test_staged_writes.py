"""Staged writes are made by the next apply, of several to a place the last one; those that were discarded are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compiled_engine.runner.staged_writes import CAPACITY, StagedWrites


def test_the_last_write_to_a_place_counts_and_what_is_discarded_does_not() -> None:
    writes = StagedWrites(96, torch.device("cpu"))
    values, table = writes.field(5), writes.field(3, 4)
    values.stage(0, np.array([1, 2, 3], np.int32))
    table.stage_one(1, 7)
    writes.discard()
    table.stage(2, np.array([8, 9], np.int32), offset=1)
    values.stage(1, np.array([4], np.int32))
    values.stage(1, np.array([5, 6], np.int32))
    assert values.tensor.tolist() == [0] * 5
    writes.apply()
    assert values.tensor.tolist() == [0, 5, 6, 0, 0]
    assert table.tensor.tolist() == [[0] * 4, [0] * 4, [0, 8, 9, 0]]
    values.tensor.zero_()
    writes.apply()  # each write is made once
    assert values.tensor.tolist() == [0] * 5


@pytest.mark.parametrize("count", [CAPACITY // 2, CAPACITY // 2 + 1, 2 * CAPACITY + 3])
def test_a_long_write_is_made_in_parts(count: int) -> None:
    writes = StagedWrites(count, torch.device("cpu"))
    field = writes.field(count)
    field.stage(0, np.arange(count, dtype=np.int32))
    writes.apply()
    assert torch.equal(field.tensor, torch.arange(count, dtype=torch.int32))


def test_a_field_that_does_not_fit_is_refused() -> None:
    writes = StagedWrites(64, torch.device("cpu"))
    with pytest.raises(ValueError, match="a field of 577 elements does not fit into the 576 left"):
        writes.field(577)
