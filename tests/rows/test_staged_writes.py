"""Staged writes are made by the next apply, of several to a place the last one; those that were discarded are not."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret

from compiled_engine.rows.staged_writes import (
    LONG_WORDS,
    MAX_WORDS,
    MAX_WRITES,
    NUM_BUFFERS,
    StagedWrites,
    download,
    upload,
)

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def check_writes(lengths: list[tuple[int, int]], device: torch.device, triton: bool | None = None) -> None:
    """Write rows of a field from their start, some several times, repeatedly and without waiting."""
    writes = StagedWrites(device, triton)
    field, other = writes.field(10, 12), writes.field(5)
    numbers, large = writes.field(10, dtype=torch.float32, initial=0.5), writes.field(10, dtype=torch.int64)
    small = writes.field(10, 3, dtype=torch.int16)  # rows that begin within a word
    expected, copies, wanted = np.zeros((10, 12), np.int32), [], []
    for repeat in range(2 * NUM_BUFFERS):
        last = {}
        for number, (row, length) in enumerate(lengths):
            values = np.arange(1, length + 1, dtype=np.int32) + 100 * number + 10_000 * repeat
            field.stage(row, values)
            numbers.set(row, length / 4)
            large.set(row, length - 2**40)
            small.stage(row, np.full(3, -length, np.int16))
            if length:
                last[row] = values
        if repeat % 3 == 2:
            writes.discard()
        else:
            for row, values in last.items():
                expected[row, : len(values)] = values
        writes.apply()
        copies.append(field.tensor.clone())
        wanted.append(expected.copy())
    for copy, want in zip(copies, wanted, strict=True):
        np.testing.assert_array_equal(copy.cpu().numpy(), want)
    newest = dict(lengths)
    assert other.tensor.tolist() == [0] * 5
    assert numbers.tensor.tolist() == [newest[row] / 4 if row in newest else 0.5 for row in range(10)]
    assert large.tensor.tolist() == [newest[row] - 2**40 if row in newest else 0 for row in range(10)]
    assert small.tensor.tolist() == [[-newest.get(row, 0)] * 3 for row in range(10)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=40))
def test_staged_writes_arrive_together(lengths: list[tuple[int, int]]) -> None:
    check_writes(lengths, CPU)


@loops_to_a_loaded_bound
def test_staged_writes_arrive_in_the_interpreter() -> None:
    program = (
        "import torch, test_staged_writes as cases\n"
        "cases.check_writes([(3, 12), (0, 5), (3, 7), (9, 1), (4, 0)], cases.CPU, triton=True)\n"
        "cases.check_large('cpu', triton=True)\n"
        "cases.check_many('cpu', 20, triton=True)\n"
        "print('equal')"
    )
    run = interpret(__file__, "-c", program)
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_staged_writes_arrive_on_a_gpu(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = [(int(row), int(length)) for row, length in generator.integers(0, (10, 13), (60, 2))]
    check_writes(lengths, torch.device("cuda"))


def check_large(device: str, triton: bool | None = None) -> None:
    """Write more than a buffer holds, and writes long enough to be copies."""
    writes = StagedWrites(torch.device(device), triton)
    lengths = [MAX_WORDS + 100, LONG_WORDS + 1, *[LONG_WORDS] * (MAX_WORDS // LONG_WORDS), LONG_WORDS - 1, 3]
    field = writes.field(len(lengths), MAX_WORDS + 100)
    for row, length in enumerate(lengths):
        field.stage(row, np.arange(row, row + length, dtype=np.int32))
    writes.apply()
    for row, length in enumerate(lengths):
        assert torch.equal(field.tensor[row, :length].cpu(), torch.arange(row, row + length, dtype=torch.int32))
        assert not field.tensor[row, length:].any()


def check_many(device: str, count: int, triton: bool | None = None) -> None:
    writes = StagedWrites(torch.device(device), triton)
    field = writes.field(count)
    for row in range(count):
        field.set(row, row + 1)
    writes.apply()
    assert torch.equal(field.tensor.cpu(), torch.arange(1, count + 1, dtype=torch.int32))


@pytest.mark.parametrize("device", DEVICES)
def test_more_than_a_buffer_holds(device: str) -> None:
    check_large(device)
    check_many(device, MAX_WRITES + 5)


def test_the_last_write_to_a_place_counts_and_what_is_discarded_does_not() -> None:
    writes = StagedWrites(CPU)
    values, table = writes.field(5), writes.field(3, 4)
    values.stage(0, np.array([1, 2, 3], np.int32))
    table.stage(1, np.array([7], np.int32))
    values.set(4, 1)
    writes.discard()
    table.stage(2, np.array([8, 9], np.int32), offset=1)
    table.stage(0, np.array([5, 6], np.int32), offset=-2)
    values.stage(1, np.array([4], np.int32))
    values.stage(1, np.array([5, 6], np.int32))
    assert values.tensor.tolist() == [0] * 5
    writes.apply()
    assert values.tensor.tolist() == [0, 5, 6, 0, 0]
    assert table.tensor.tolist() == [[0, 0, 5, 6], [0] * 4, [0, 8, 9, 0]]
    values.tensor.zero_()
    writes.apply()  # each write is made once
    assert values.tensor.tolist() == [0] * 5


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.int16])
def test_values_of_another_type_than_the_field_are_refused(dtype: torch.dtype) -> None:
    field = StagedWrites(CPU).field(2, 3, dtype=dtype)
    other = np.zeros(3, np.int32)
    with pytest.raises(ValueError, match=f"must have the field's dtype {field.numpy_dtype}, got int32"):
        field.stage(0, other)


def test_what_is_uploaded_may_be_changed_at_once() -> None:
    values = np.arange(6, dtype=np.int32).reshape(2, 3).T
    on_device = upload(values, CPU)
    values[:] = -1
    assert on_device.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert on_device.is_contiguous()
    assert download(on_device) is on_device


def test_what_is_forgotten_is_a_rows_alone() -> None:
    writes = StagedWrites(CPU)
    one, other = writes.field(2, 2), writes.field(2, 2)
    for field in (one, other):
        for row in range(2):
            field.stage(row, np.array([5, 6], np.int32))
    one.forget(1)
    writes.apply()
    assert (one.tensor.tolist(), other.tensor.tolist()) == ([[5, 6], [0, 0]], [[5, 6], [5, 6]])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_longer_row_ends_as_it_did(lengths: list[int]) -> None:
    writes = StagedWrites(CPU)
    field = writes.field(2, lengths[0], initial=-1)
    field.stage(1, np.arange(lengths[0], dtype=np.int32))
    writes.apply()
    for before, length in pairwise(lengths):
        field.stage(0, np.array([before], np.int32), offset=-1)
        field.lengthen(length)
    writes.discard()
    writes.apply()
    longest = max(lengths)
    assert field.tensor.tolist() == [[-1] * longest, [-1] * (longest - lengths[0]) + [*range(lengths[0])]]
