"""Ranks that make the copies of KV offload late: as late as steps that follow them allow, or at random before."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from compiled_engine.engine.messages import ControlCall, SchedulerOutput
from compiled_engine.features.kv_offload.extras import (
    ARRIVED,
    LOAD,
    NAME,
    OPEN_FILES,
    SAVE,
    Arrived,
    copies_before,
)

NUM_RANKS = 2


class LaggingCopies:
    """Copies between the slots of a fake runner's KV cache, those of host memory, and files.

    Two ranks report what has ended, at different times. lag: probability that work which may be done is not. faults:
    probability that a rank cannot write a file, or cannot read it.
    """

    def __init__(self, rng: random.Random, lag: float = 0.6, faults: float = 0.0) -> None:
        self._rng, self.lag, self._faults = rng, lag, faults
        self._copies: deque[tuple[int, Callable[[], None]]] = deque()  # with numbers of saves; 0: a load
        self._num_copies = 0  # made so far
        self._file_work: list[tuple[int, Callable[[], Any]]] = []  # and the number of copies that precede it
        self._host: dict[tuple[int, int], int | None] = {}  # by (slot, offset)
        self.files: dict[str, list[int | None]] = {}
        self._reports: list[Arrived] = [Arrived([], []) for _ in range(NUM_RANKS)]
        self.runner: Any = None  # a FakeRunner
        self.num_waits = 0  # steps that followed a save

    def call(self, call: ControlCall) -> list[Any]:
        name, given = call.name.removeprefix(f"{NAME}."), call.arguments
        if name == ARRIVED:
            self.do_some()
            return [self._report(rank) for rank in range(NUM_RANKS)]
        if name == SAVE:
            self._save(**given)
        elif name == LOAD:
            self._load(**given)
        else:
            assert name == OPEN_FILES
        return [None] * NUM_RANKS

    def _save(
        self, number: int, slots: list[int], blocks: list[int], files: list[tuple[int, str]], removed: list[str]
    ) -> None:
        assert len({*slots}) == len({*blocks}) == len(slots) == len(blocks)
        self._copies.append((number, partial(self._copy_out, slots, blocks)))
        for slot, name in files:
            self._add_file_work(partial(self._write, slot, name))
        for name in removed:
            self._add_file_work(partial(self.files.pop, name, None))

    def _load(self, number: int, blocks: list[int], slots: list[int], files: list[tuple[int, str]]) -> None:
        assert len({*slots}) == len({*blocks}) == len(slots) == len(blocks)
        failed: list[list[int]] = [[] for _ in range(NUM_RANKS)]
        rest = [name for _, name in files]

        def read(slot: int, name: str) -> None:
            for of_rank in failed:
                if self._rng.random() < self._faults or name not in self.files:
                    of_rank.append(slot)
            for offset in range(self.runner.block_size):
                self._host[slot, offset] = None if any(slot in each for each in failed) else self.files[name][offset]
            rest.remove(name)
            if not rest:
                self._copies.append((0, copy))

        def copy() -> None:
            self._copy_in(blocks, slots)
            for rank, of_rank in enumerate(failed):
                self._reports[rank].loads.append((number, of_rank))

        for slot, name in files:
            self._add_file_work(partial(read, slot, name))
        if not files:
            self._copies.append((0, copy))

    def _add_file_work(self, work: Callable[[], Any]) -> None:
        self._file_work.append((self._num_copies + len(self._copies), work))

    def _write(self, slot: int, name: str) -> None:
        fails = [self._rng.random() < self._faults for _ in range(NUM_RANKS)]
        if not any(fails):
            self.files[name] = [self._host[slot, offset] for offset in range(self.runner.block_size)]
        for rank, each in enumerate(fails):
            self._reports[rank].written.append((name, not each))

    def _copy_out(self, slots: list[int], blocks: list[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            for offset in range(self.runner.block_size):
                self._host[slot, offset] = self.runner.slots.get((block, offset))

    def _copy_in(self, blocks: list[int], slots: list[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            for offset in range(self.runner.block_size):
                self.runner.slots[block, offset] = self._host[slot, offset]
                for written in self.runner.written.values():  # steps before the copy cannot take it back if they fail
                    written.pop((block, offset), None)

    def _report(self, rank: int) -> Arrived:
        if self._rng.random() < self.lag:
            return Arrived([], [])
        report, self._reports[rank] = self._reports[rank], Arrived([], [])
        return report

    def before(self, step: SchedulerOutput) -> None:
        """Make the copies that a step follows, and some others."""
        if (number := copies_before(step.extras)) is not None:
            self.num_waits += 1
            while any(0 < each <= number for each, _ in self._copies):
                self._copy_first()
        self.do_some()

    def do_some(self) -> None:
        """Do work until chance ends it: all work if lag is 0."""
        while (self._copies or self._file_work) and self._rng.random() >= self.lag:
            if self._file_work and self._rng.random() < 0.5:
                precede, work = self._file_work.pop(0)
                while self._num_copies < precede:
                    self._copy_first()
                work()
            elif self._copies:
                self._copy_first()

    def _copy_first(self) -> None:
        _, copy = self._copies.popleft()
        self._num_copies += 1
        copy()
