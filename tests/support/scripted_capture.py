"""Stands in for a device that captures graphs: a log of what was done, and memory that captures take by a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey
from compiled_engine.graphs.cuda_graphs.memory import MemoryReading

Work = Callable[[], torch.Tensor]


@dataclass
class ScriptedGraph:
    """A graph whose `reset` returns its memory: all of the pool's, and of the driver's all that is not `kept`."""

    device: ScriptedCapture
    key: GraphKey
    taken: MemoryReading

    def replay(self, inputs: AttentionInputs | None) -> None:
        self.device.log.append(("replay", self.key.name, inputs))

    def reset(self) -> None:
        self.device.log.append(("reset", self.key.name))
        self.device.pool -= self.taken.pool
        self.device.driver -= self.taken.driver - min(self.taken.driver, self.device.kept)


@dataclass
class ScriptedCapture:
    """Implements `Capture` and `Capturable` with scripted memory."""

    takes: Callable[[GraphKey], MemoryReading] = lambda key: MemoryReading(0, 0)  # memory of a key's capture
    lazy: int = 0  # bytes that the first warm-up of a key takes of the pool and of the driver
    kept: int = 0  # bytes that the driver keeps of each graph that is reset
    log: list[tuple[object, ...]] = field(default_factory=list)
    pool: int = 1000
    driver: int = 2000
    in_session: bool = False
    ids: tuple[int, ...] = (1, 2)
    _ran: GraphKey | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        assert not self.in_session
        self.in_session = True
        try:
            yield
        finally:
            self.in_session = False

    def whole(self, work: Work) -> tuple[ScriptedGraph, torch.Tensor]:
        return self._capture("whole", work)

    def segments(self, work: Work) -> tuple[ScriptedGraph, torch.Tensor]:
        return self._capture("segments", work)

    def _capture(self, how: str, work: Work) -> tuple[ScriptedGraph, torch.Tensor]:
        assert self.in_session
        result = work()
        assert self._ran is not None
        self.log.append((how, self._ran.name))
        taken = self.takes(self._ran)
        self.pool += taken.pool
        self.driver += taken.driver
        return ScriptedGraph(self, self._ran, taken), result

    def on_attention(self, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
        raise NotImplementedError

    def memory(self) -> MemoryReading:
        return MemoryReading(self.pool, self.driver)

    def settle(self) -> None:
        self.log.append(("settle",))

    def renew(self) -> None:
        self.log.append(("renew",))

    # The step.

    def fill(self, key: GraphKey) -> None:
        assert self.in_session
        self.log.append(("fill", key.name))

    def warm_up(self, key: GraphKey) -> None:
        assert self.in_session
        if ("warm_up", key.name) not in self.log:
            self.pool += self.lazy
            self.driver += self.lazy
        self.log.append(("warm_up", key.name))

    def run(self, key: GraphKey) -> torch.Tensor:
        self._ran = key
        return torch.full((1,), float(key.num_tokens))

    def tensor_ids(self) -> tuple[int, ...]:
        return self.ids

    def done(self, *kinds: str) -> list[str]:
        """Return the names of the keys for which one of these kinds of work was done, in order."""
        return [str(entry[1]) for entry in self.log if entry[0] in kinds]
