"""Ranks that make the copies of KV offload late: as late as steps that follow them allow, or at random before."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from compiled_engine.engine.messages import ControlCall, SchedulerOutput
from compiled_engine.features.kv_offload.extras import ARRIVED, LOAD, NAME, SAVE, copies_before


class LaggingCopies:
    """Copies between the slots of a fake runner's KV cache and those of host memory, in the order of calls.

    `num_ranks` ranks report each load, at different times. lag: probability that a copy which may be made is not.
    """

    def __init__(self, rng: random.Random, lag: float = 0.6, num_ranks: int = 2) -> None:
        self._rng, self.lag = rng, lag
        self._queue: deque[tuple[str, dict[str, Any]]] = deque()
        self._host: dict[tuple[int, int], int | None] = {}  # by (slot, offset)
        self._reports: list[list[tuple[int, list[int]]]] = [[] for _ in range(num_ranks)]
        self.runner: Any = None  # a FakeRunner
        self.num_waits = 0  # steps that followed a save

    def call(self, call: ControlCall) -> list[Any]:
        name = call.name.removeprefix(f"{NAME}.")
        if name == ARRIVED:
            self._make_some()
            return [self._report(reports) for reports in self._reports]
        assert name in (SAVE, LOAD)
        assert len({*call.arguments["blocks"]}) == len({*call.arguments["slots"]}) == len(call.arguments["slots"])
        self._queue.append((name, call.arguments))
        return [None] * len(self._reports)

    def _report(self, reports: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
        count = len(reports) if self._rng.random() > self.lag else 0
        reported, reports[:] = reports[:count], reports[count:]
        return reported

    def before(self, step: SchedulerOutput) -> None:
        """Make the copies that a step follows, and some others."""
        if (number := copies_before(step.extras)) is not None:
            self.num_waits += 1
            while any(name == SAVE and given["number"] <= number for name, given in self._queue):
                self._make_first()
        self._make_some()

    def _make_some(self) -> None:
        while self._queue and self._rng.random() > self.lag:
            self._make_first()

    def _make_first(self) -> None:
        name, given = self._queue.popleft()
        runner, host = self.runner, self._host
        for slot, block in zip(given["slots"], given["blocks"], strict=True):
            for offset in range(runner.block_size):
                if name == SAVE:
                    host[slot, offset] = runner.slots.get((block, offset))
                    continue
                runner.slots[block, offset] = host[slot, offset]
                for written in runner.written.values():  # steps before the copy cannot take it back if they fail
                    written.pop((block, offset), None)
        if name == LOAD:
            for reports in self._reports:
                reports.append((given["number"], []))
