"""The runner's kernels: equal to their references on random batches, under the interpreter and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreter import loops_to_a_loaded_bound
from runner_cases import check

from compiled_engine.runner.staged_writes import CAPACITY, NUM_BUFFERS, StagedWrites


@loops_to_a_loaded_bound
def test_kernels_equal_their_references_in_the_interpreter() -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.path.dirname(__file__),
    }
    run = subprocess.run(
        [sys.executable, "-m", "runner_cases"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_kernels_equal_their_references_on_a_gpu(seed: int) -> None:
    check(seed, torch.device("cuda"))


WRITES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=40)


@given(WRITES)
def test_staged_writes_arrive_together(lengths: list[tuple[int, int]]) -> None:
    check_writes(lengths, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_staged_writes_arrive_on_a_gpu(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = [(int(row), int(length)) for row, length in generator.integers(0, (10, 13), (60, 2))]
    check_writes(lengths, torch.device("cuda"))


def check_writes(lengths: list[tuple[int, int]], device: torch.device) -> None:
    """Rows of a field are written from their start, some of them several times; again and again without a wait."""
    writes = StagedWrites(1000, device)
    writes.field(3)
    field, other = writes.field(10, 12), writes.field(5)
    expected, copies, wanted = np.zeros((10, 12), np.int32), [], []
    for repeat in range(2 * NUM_BUFFERS):
        last = {}
        for number, (row, length) in enumerate(lengths):
            values = np.arange(1, length + 1, dtype=np.int32) + 100 * number + 10_000 * repeat
            field.stage(row, values)
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
    assert other.tensor.tolist() == [0] * 5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_more_than_a_buffer_holds(device: str) -> None:
    writes = StagedWrites(3 * CAPACITY, torch.device(device))
    field = writes.field(2, CAPACITY + 100)
    values = np.arange(CAPACITY + 100, dtype=np.int32)
    field.stage(0, values)
    field.stage(1, values[::-1].copy())
    writes.apply()
    assert torch.equal(field.tensor.cpu(), torch.from_numpy(np.stack((values, values[::-1]))))


def test_fields_do_not_overlap_and_must_fit() -> None:
    writes = StagedWrites(64, torch.device("cpu"))
    a, b = writes.field(5), writes.field(40)
    a.tensor.fill_(1)
    b.stage_one(2, 7)
    writes.apply()
    assert a.tensor.tolist() == [1] * 5
    assert b.tensor.tolist() == [0, 0, 7, *[0] * 37]
    with pytest.raises(ValueError, match="does not fit"):
        writes.field(10_000)
