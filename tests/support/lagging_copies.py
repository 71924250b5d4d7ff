"""Ranks that make the copies of KV offload late: as late as steps that follow them allow, or at random before."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from compiled_engine.engine.messages import ControlCall, SchedulerOutput
from compiled_engine.features.kv_offload import extras
from compiled_engine.features.kv_offload.extras import Arrived, Copies, copies_before

NUM_RANKS = 2


class LaggingCopies:
    """Copies between the slots of a fake runner's KV cache and its snapshots, those of host memory, and files.

    Two ranks report what has ended, at different times. lag: probability that work which may be done is not. faults:
    probability that a rank cannot write a file, or cannot read it. copy_seconds: what both ranks say that the copy of
    a row takes.
    """

    def __init__(
        self, rng: random.Random, lag: float = 0.6, faults: float = 0.0, copy_seconds: Mapping[str, float] | None = None
    ) -> None:
        self._rng, self.lag, self._faults, self._copy_seconds = rng, lag, faults, copy_seconds or {}
        self._copies: deque[tuple[int, Callable[[], None]]] = deque()  # with numbers of saves; 0: a load
        self._num_copies = 0  # made so far
        self._file_work: list[tuple[int, Callable[[], Any]]] = []  # and the number of copies that precede it
        self._host: dict[tuple[str, int], list[int | None]] = {}  # contents of a row, by kind and slot
        self.files: dict[str, list[int | None]] = {}
        self._reports: list[Arrived] = [Arrived([], []) for _ in range(NUM_RANKS)]
        self.runner: Any = None  # a FakeRunner
        self.num_waits = 0  # steps that followed a save

    def call(self, call: ControlCall) -> list[Any]:
        name, given = call.name.removeprefix(f"{extras.NAME}."), call.arguments
        if name == extras.ARRIVED:
            self.do_some()
            return [self._report(rank) for rank in range(NUM_RANKS)]
        if name == extras.COPY_SECONDS:
            return [self._copy_seconds] * NUM_RANKS
        if name == extras.SAVE:
            self._save(**given)
        elif name == extras.LOAD:
            self._load(**given)
        else:
            assert name == extras.OPEN_FILES
        return [None] * NUM_RANKS

    def _save(self, number: int, copies: dict[str, Copies], removed: list[str]) -> None:
        for kind, (slots, rows, files) in copies.items():
            assert len({*slots}) == len({*rows}) == len(slots) == len(rows)
            self._copies.append((number, partial(self._copy_out, kind, slots, rows)))
            for slot, name in files:
                self._add_file_work(partial(self._write, kind, slot, name))
        for name in removed:
            self._add_file_work(partial(self.files.pop, name, None))

    def _load(self, number: int, copies: dict[str, Copies]) -> None:
        failed: list[list[str]] = [[] for _ in range(NUM_RANKS)]
        rest = [name for each in copies.values() for _, name in each.files]
        lost: set[tuple[str, int]] = set()

        def read(kind: str, slot: int, name: str) -> None:
            for of_rank in failed:
                if self._rng.random() < self._faults or name not in self.files:
                    of_rank.append(name)
                    lost.add((kind, slot))
            self._host[kind, slot] = [None] if (kind, slot) in lost else self.files[name]
            rest.remove(name)
            if not rest:
                self._copies.append((0, copy))

        def copy() -> None:
            for kind, (slots, rows, _) in copies.items():
                assert len({*slots}) == len({*rows}) == len(slots) == len(rows)
                pairs = zip(slots, rows, strict=True)
                self._copy_in(kind, [(slot, row) for slot, row in pairs if (kind, slot) not in lost])
            for rank, of_rank in enumerate(failed):
                self._reports[rank].loads.append((number, of_rank))

        for kind, each in copies.items():
            for slot, name in each.files:
                self._add_file_work(partial(read, kind, slot, name))
        if not rest:
            self._copies.append((0, copy))

    def _add_file_work(self, work: Callable[[], Any]) -> None:
        self._file_work.append((self._num_copies + len(self._copies), work))

    def _write(self, kind: str, slot: int, name: str) -> None:
        fails = [self._rng.random() < self._faults for _ in range(NUM_RANKS)]
        if not any(fails):
            self.files[name] = self._host[kind, slot]
        for rank, each in enumerate(fails):
            self._reports[rank].written.append((name, not each))

    def _copy_out(self, kind: str, slots: list[int], rows: list[int]) -> None:
        for slot, row in zip(slots, rows, strict=True):
            contents, places = self._places(kind, row)
            self._host[kind, slot] = [contents.get(place) for place in places]

    def _copy_in(self, kind: str, pairs: list[tuple[int, int]]) -> None:
        for slot, row in pairs:
            contents, places = self._places(kind, row)
            for place, content in zip(places, self._host[kind, slot], strict=True):
                contents[place] = content
                written = self.runner.written if kind == extras.BLOCKS else self.runner.saved
                for of_step in written.values():  # steps before the copy cannot take it back if they fail
                    of_step.pop(place, None)

    def _places(self, kind: str, row: int) -> tuple[dict[Any, int | None], list[Any]]:
        """Return the fake runner's contents of a kind, and the places in them that belong to a row."""
        if kind == extras.BLOCKS:
            return self.runner.slots, [(row, offset) for offset in range(self.runner.block_size)]
        return self.runner.snapshots, [row]

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
