"""The copies of a rank: rows come back as they were, and are copied while the files of others are read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from compiled_engine.features.kv_offload.block_files import BlockFiles
from compiled_engine.features.kv_offload.extras import BLOCKS, Arrived, Copies
from compiled_engine.features.kv_offload.host_rows import HostRows
from compiled_engine.features.kv_offload.step_host_blocks import StepHostBlocks
from compiled_engine.process.progress import SilentProgress

ROWS, WIDTH = 20, 24
NAMES = [f"{row:02}ab" for row in range(ROWS)]


class Rank:
    """A rank with two layers, whose rows have files, and whose copies on the device were erased."""

    def __init__(self, folder: Path) -> None:
        cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
        self.expected = [torch.randint(1, 256, (ROWS, WIDTH), dtype=torch.uint8, generator=generator) for _ in range(2)]
        self.tensors = [each.clone() for each in self.expected]
        self.copies = StepHostBlocks({BLOCKS: HostRows(lambda: self.tensors, 2 * ROWS, cpu)}, cpu, 0)
        self.copies.start_up(SilentProgress())
        self.copies.allocate(ROWS)
        self.copies.open_files(str(folder))
        self.files = BlockFiles(folder / "0")
        written: list[tuple[str, bool]] = []
        written: list[tuple[str, bool]] = []
        self.copies.save(1, {BLOCKS: Copies([*range(ROWS)], [*range(ROWS)], [*enumerate(NAMES)])})
        self.until(lambda arrived: written.extend(arrived.written) or len(written) == ROWS)
        assert {*written} == {(name, True) for name in NAMES}
        for tensor in self.tensors:
            tensor.zero_()

    def until(self, is_enough: Callable[[Arrived], bool]) -> None:
        """Ask what has arrived until `is_enough`."""
        deadline = time.monotonic() + 60
        while not is_enough(self.copies.arrived()):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def load(self, from_files: int) -> None:
        """Load all rows, the first `from_files` from files into new slots, the others from the slots of the save."""
        slots = [ROWS + row if row < from_files else row for row in range(ROWS)]
        names = [(slots[row], NAMES[row]) for row in range(from_files)]
        self.copies.load(7, {BLOCKS: Copies(slots, [*range(ROWS)], names)})

    def wrong_rows(self) -> set[int]:
        pairs = zip(self.tensors, self.expected, strict=True)
        return {row for found, expected in pairs for row in range(ROWS) if not torch.equal(found[row], expected[row])}


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.copies.close()


def test_rows_are_copied_while_other_files_are_read(rank: Rank) -> None:
    """One file is a pipe, whose reader waits for the test."""
    slow = rank.files.path_of(NAMES[-1])
    contents = slow.read_bytes()
    slow.unlink()
    os.mkfifo(slow)
    rank.load(ROWS)
    seen: list[Arrived] = []
    try:
        rank.until(lambda arrived: seen.append(arrived) or len(rank.wrong_rows()) <= 2)  # of the same piece
    finally:
        slow.write_bytes(contents)
    assert not any(arrived.loads for arrived in seen)
    rank.until(lambda arrived: arrived.loads == [(7, [])])
    assert rank.wrong_rows() == set()


@pytest.mark.parametrize("from_files", [3, ROWS])
def test_rows_without_a_good_file_are_named_and_left_alone(rank: Rank, from_files: int) -> None:
    rank.files.remove(NAMES[0])
    damaged = rank.files.path_of(NAMES[2])
    damaged.write_bytes(damaged.read_bytes()[:-1])
    rank.load(from_files)
    loads: list[tuple[int, list[str]]] = []
    rank.until(lambda arrived: loads.extend(arrived.loads) or bool(loads))
    ((number, failed),) = loads
    assert (number, {*failed}) == (7, {NAMES[0], NAMES[2]})
    assert rank.wrong_rows() == {0, 2}
    assert all((tensor[[0, 2]] == 0).all() for tensor in rank.tensors)
    assert rank.copies.metrics()["kv_offload_load_bytes"] == (ROWS - 2) * 2 * WIDTH
