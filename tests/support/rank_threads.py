"""Ranks of an executor that are threads of this process, with runners that do as a script says."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compiled_engine.config import EngineConfig
from compiled_engine.engine.control import apply
from compiled_engine.engine.messages import ControlCall, LateInputs, RunnerOutput, SchedulerOutput
from compiled_engine.parallel.connect import Connections
from compiled_engine.parallel.rank_share import LayerShare
from compiled_engine.process.timeline import Timeline
from compiled_engine.processes import worker
from compiled_engine.processes.multiprocess_executor import MultiprocessExecutor
from compiled_engine.processes.ranks import end_all
from compiled_engine.processes.ring import RingDescriptors, RingReader


class Killed(BaseException):
    """Ends a rank's thread, as a signal ends a process."""


@dataclass
class ScriptedRunner:
    """One rank's executor and runner. A step's result has its number, and the number of masks that came for it."""

    rank: int
    num_blocks: int = 7
    cache_key: str | None = "key"
    fails: dict[int, Exception] = field(default_factory=dict)  # by step, raised at its launch
    fails_later: dict[int, Exception] = field(default_factory=dict)  # by step, raised by its result
    waits_for: dict[int, threading.Event] = field(default_factory=dict)  # by step, awaited by its result
    launches: dict[int, threading.Event] = field(default_factory=dict)  # by step, set at its launch
    delay_s: float = 0.0  # duration of each result
    killed: threading.Event = field(default_factory=threading.Event)  # ends the rank
    told: list[Any] = field(default_factory=list)  # what it got, in order
    runs_begun: int = 0
    runs_ended: int = 0
    num_exchanges: int = 0
    masks: int = 0
    arguments: tuple[Any, ...] = ()
    closed: list[str] = field(default_factory=list)

    @property
    def runner(self) -> ScriptedRunner:
        return self

    @property
    def sampler(self) -> ScriptedRunner:
        return self

    def submit(self, step: SchedulerOutput) -> Any:
        self.told.append(step.step)
        if step.step in self.fails:
            raise self.fails[step.step]
        self.late = 0
        if step.step in self.launches:
            self.launches[step.step].set()

        def result() -> RunnerOutput:
            if step.step in self.waits_for:
                while not self.waits_for[step.step].wait(0.005):
                    if self.killed.is_set():
                        raise Killed
            time.sleep(self.delay_s)
            if step.step in self.fails_later:
                raise self.fails_later[step.step]
            return RunnerOutput((step.step, self.late))

        return SimpleNamespace(result=result)

    def sample(self, late: LateInputs) -> None:
        self.told.append(late.extras["f"])
        self.late = len(late.extras["f"])

    def call(self, call: ControlCall) -> list[Any]:
        adapters = (self.begin_load, self.has_read, self.load, self.drop)
        return [apply(call, {"metrics": self.metrics} | {f"adapters.{each.__name__}": each for each in adapters})]

    def metrics(self) -> dict[str, Any]:
        return {"rank": self.rank, "steps": list(self.told), "cache_key": self.cache_key}

    def load(self, path: str, digest: str) -> None:
        self.told.append(("load", path, digest))

    def begin_load(self, path: str, digest: str) -> None:
        self.told.append(("begin", path, digest))

    def has_read(self, digest: str) -> bool:
        return self.rank == int(digest)

    def drop(self, digest: str) -> None:
        if digest == "missing":
            raise KeyError(digest)
        self.told.append(("drop", digest))

    def close(self) -> None:
        if self.killed.wait(self.delay_s):
            raise Killed
        self.closed.append("runner")


class RankThread:
    """Takes the place of a WorkerChild. `hang_up` ends its connection, as the end of a process does."""

    def __init__(self, rank: int, folder: Path, descriptors: Sequence[int]) -> None:
        self.socket, self._other = socket.socketpair()
        self.killed = threading.Event()
        arguments = (rank, folder, descriptors)
        self.thread = threading.Thread(target=self._run, args=arguments, name=f"rank {rank}", daemon=True)
        self.thread.start()

    def _run(self, rank: int, folder: Path, descriptors: Sequence[int]) -> None:
        worker.serve(self._other, "cpu", rank, folder, descriptors)
        self.hang_up()

    def hang_up(self) -> None:
        with suppress(OSError):
            self._other.shutdown(socket.SHUT_RDWR)

    def how_it_ended(self, timeout_s: float) -> str:
        return "has ended"

    def is_stopped(self) -> bool:
        return False

    def is_dying(self) -> bool:
        return False

    def is_killed(self, within_s: float) -> bool:
        return False

    def kill(self) -> None:
        self.killed.set()
        with suppress(OSError):
            self._other.shutdown(socket.SHUT_RD)  # it may wait for its start

    def wait(self, timeout_s: float) -> bool:
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def close(self, within_s: float) -> None:
        self.wait(within_s)
        self.socket.close()


class RankThreads:
    """Takes the place of LaunchedWorkers, with threads for ranks."""

    def __init__(self, count: int, folder: Path, capacity: int) -> None:
        self.steps, self.results = RingDescriptors.make(count, capacity), RingDescriptors.make(1, capacity)
        self.heartbeats = SimpleNamespace(last_s=lambda rank: time.monotonic())
        passed = [-1, self.steps.memory, self.results.memory, *self.results.bells, *self.steps.bells]
        self.is_closed = False
        self.children: list[RankThread] = []
        for rank in range(count):
            self.children.append(RankThread(rank, folder, passed))

    def close(self) -> None:
        self.is_closed = True
        end_all(self.children)  # type: ignore[arg-type]
        for child in self.children:
            assert not child.thread.is_alive()
            child._other.close()
        self.steps.close()
        self.results.close()


@dataclass
class Launch:
    """Records the arguments of an executor's ranks. joined: (device, rank, size). beats: ranks that sent heartbeats."""

    runners: list[ScriptedRunner]
    children: list[RankThread] = field(default_factory=list)
    starts: dict[int, Any] = field(default_factory=dict)
    joined: list[tuple[str, int, int]] = field(default_factory=list)
    beats: list[tuple[int, int]] = field(default_factory=list)


@contextmanager
def rank_threads(
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    prepare: Callable[[list[ScriptedRunner]], None] = lambda runners: None,
    processors: Sequence[str] = (),
    *,
    timeline: Timeline | None = None,
    progress: bool = False,
    capacity: int = 1 << 16,
) -> Iterator[tuple[MultiprocessExecutor, Launch]]:
    """Run an executor whose ranks are threads. `prepare` may change the runners before they start.

    capacity: bytes of each ring buffer.
    """
    parallel = config.parallel
    count = parallel.devices_per_replica
    runners = [ScriptedRunner(rank) for rank in range(count)]
    prepare(runners)
    launch = Launch(runners)
    launched: list[RankThreads] = []
    ready = threading.Event()

    def connect(given: EngineConfig, rank: int) -> Connections:
        group: Any = SimpleNamespace(
            kind="threads", rank=rank, size=count, close=lambda: runners[rank].closed.append("group")
        )
        stage = LayerShare(range(1), rank // parallel.tensor_parallel_size, parallel.num_stages)
        link: Any = None if parallel.num_stages == 1 else SimpleNamespace(stage=stage)
        return Connections(group, link)

    def executor_of(*arguments: Any) -> ScriptedRunner:
        runner = runners[arguments[6].rank]
        runner.arguments = arguments
        return runner

    class Reader(RingReader):
        def __init__(self, ring: RingDescriptors, index: int, busy_s: float) -> None:
            super().__init__(ring, index, busy_s)
            ready.wait(60)
            self._child = launched[0].children[index]

        def read(self, wait: Callable[[], None] | None = None) -> bytes:
            return super().read(self._await)

        def _await(self) -> None:
            while not self._poll.poll(5):
                if self._child.killed.is_set():
                    raise Killed

    def decode_start(data: bytes) -> Any:
        start = decoded(data)
        launch.starts[int(threading.current_thread().name.split()[1])] = start
        return start

    decoded = worker.decode_start
    monkeypatch.setattr(worker, "decode_start", decode_start)
    monkeypatch.setattr(worker, "os", SimpleNamespace(_exit=lambda status: None))
    monkeypatch.setattr(worker, "join_ranks", lambda *given: launch.joined.append(given[:3]))
    monkeypatch.setattr(worker, "connect", connect)
    monkeypatch.setattr(worker, "InProcessExecutor", executor_of)
    monkeypatch.setattr(worker, "RingReader", Reader)
    beat = launch.beats.append
    heartbeats = lambda size, descriptor: SimpleNamespace(beat=lambda rank: beat((rank, size)))  # noqa: E731
    monkeypatch.setattr(worker, "Heartbeats", heartbeats)
    launched.append(RankThreads(count, folder, capacity))
    launch.children = launched[0].children
    for runner, child in zip(runners, launch.children, strict=True):
        child.killed = runner.killed
    ready.set()
    given: Any = launched[0]
    shown: dict[str, bool] = {"progress": True} if progress else {}
    try:
        executor = MultiprocessExecutor(config, given, timeline or Timeline(), processors, **shown)
    except BaseException:
        assert launched[0].is_closed
        raise
    try:
        yield executor, launch
    finally:
        executor.close()
