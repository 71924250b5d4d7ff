"""The monitor of workers: ends, silence, time limits and failures, with a clock of the test's own."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from left_over import SOON_S, wait_until
from test_worker_faults import Clock

from compiled_engine.engine.control import Failed
from compiled_engine.parallel.connect import RankLayout
from compiled_engine.processes import monitor
from compiled_engine.processes.channel import send
from compiled_engine.processes.monitor import Monitor, WorkerError
from compiled_engine.processes.wire import Answered, Ready, encode


class Worker:
    """Stands in for WorkerChild, in a state that the test sets."""

    def __init__(self) -> None:
        self.socket, self.other = socket.socketpair()
        self.stopped = self.dying = self.killed = False
        self.waited_s: list[float] = []

    def say(self, message: Any) -> None:
        send(self.other, encode(message))

    def is_stopped(self) -> bool:
        return self.stopped

    def is_dying(self) -> bool:
        return self.dying

    def is_killed(self, within_s: float) -> bool:
        return self.killed and 0.0 <= within_s < 0.3  # the failure is reported soon

    def how_it_ended(self, timeout_s: float) -> str:
        self.waited_s.append(timeout_s)
        return "was killed by SIGKILL" if self.killed else "has ended"


class Watched:
    """Two workers under a monitor. signs: time of each one's last heartbeat; None: now."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.workers = [Worker(), Worker()]
        self.signs: list[float | None] = [None, None]
        beats: Any = SimpleNamespace(last_s=lambda rank: clock.looks if self.signs[rank] is None else self.signs[rank])
        given: Any = self.workers
        self.monitor = Monitor(given, RankLayout(2), beats)

    def start(self) -> None:
        for worker in self.workers:
            worker.say(Ready(5, "key"))
        assert self.monitor.wait_ready() == [Ready(5, "key")] * 2

    def passes(self, seconds: float) -> None:
        """Let time pass in small steps, each seen by the monitor."""
        self.clock.wait_for_looks(self.monitor)
        for _ in range(int(seconds / 0.5)):
            self.clock.now += 0.5
            self.clock.wait_for_looks(self.monitor)

    def failure(self) -> str:
        wait_until(lambda: self.monitor.failure is not None, SOON_S)
        return str(self.monitor.failure)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the workers that the monitor has ended."""
    found: list[Any] = []
    monkeypatch.setattr(monitor, "end_all", found.extend)
    return found


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, ended: list[Any]) -> Iterator[Watched]:
    clock = Clock()
    monkeypatch.setattr(monitor, "time", clock)
    monkeypatch.setattr(monitor, "_LOOK_S", 0.002)
    with watching(clock) as found:
        yield found


@contextmanager
def watching(clock: Clock) -> Iterator[Watched]:
    found = Watched(clock)
    yield found
    found.monitor.close()
    found.monitor.end()
    for worker in found.workers:
        worker.socket.close()
        worker.other.close()


def test_workers_with_signs_of_life_run_on(watched: Watched) -> None:
    watched.start()
    watched.passes(20.0)
    watched.monitor.check()
    assert not select.select([watched.monitor.bell], [], [], 0)[0]


@pytest.mark.parametrize(("dying", "within_s"), [(False, 6.0), (True, 1.0)])
def test_silence_is_a_failure_after_a_while(watched: Watched, ended: list[Any], dying: bool, within_s: float) -> None:
    """The limit is shorter for a process that no longer runs. All workers are ended."""
    watched.start()
    watched.passes(1.0)
    watched.workers[1].dying = dying
    watched.signs[1] = 7.0
    watched.passes(within_s - 0.5)
    watched.monitor.check()
    watched.passes(2.0)
    assert watched.failure() == f"the worker of rank 1 of 2 has given no sign of life for {within_s:.0f} s"
    assert ended == watched.workers


def test_a_start_may_take_as_long_as_it_takes_unless_it_is_stopped(watched: Watched) -> None:
    """Signs of life do not count yet."""
    watched.signs = [1.0, 1.0]
    watched.passes(10.0)
    watched.monitor.check()
    watched.workers[0].stopped = True
    watched.passes(5.0)
    watched.workers[0].stopped = False
    watched.passes(5.0)
    watched.monitor.check()
    watched.workers[0].stopped = True
    watched.passes(7.5)
    assert watched.failure() == "the worker of rank 0 of 2 has given no sign of life for 6 s"
    with pytest.raises(WorkerError, match="rank 0 of 2"):
        watched.monitor.wait_ready()


def test_a_result_is_awaited_for_so_long(watched: Watched) -> None:
    """Until it has come, or another one is awaited."""
    watched.start()
    for _ in range(2):
        watched.monitor.expect_result_within(4.0)
        watched.passes(3.5)
    watched.monitor.expect_result_within(None)
    watched.passes(10.0)
    watched.monitor.check()
    watched.monitor.expect_result_within(4.0)
    watched.passes(5.5)
    assert "a rank does not answer" in watched.failure()


@pytest.mark.parametrize(
    ("end", "killed", "error", "text"),
    [
        (lambda worker: worker.other.close(), False, WorkerError, "the worker of rank 0 of 2 has ended"),
        (lambda worker: worker.say(Failed("KeyError", "'a'", "w")), False, WorkerError, "rank 0 of 2: KeyError: 'a'"),
        # A collective fails where another rank was killed: that one is to blame.
        (lambda worker: worker.say(Failed("RuntimeError", "reset by peer", "w")), True, WorkerError,
         "the worker of rank 1 of 2 was killed by SIGKILL"),
    ],
)  # fmt: skip
def test_the_first_failure_is_the_reason(
    watched: Watched, ended: list[Any], end: Callable[[Worker], None], killed: bool, error: type[Exception], text: str
) -> None:
    """Pending and later calls raise it."""
    watched.start()
    answers = watched.monitor.expect(3)
    watched.workers[1].killed = killed
    end(watched.workers[0])
    assert watched.failure() == text
    for answer in answers:
        with pytest.raises(error, match="rank"):
            answer.result(SOON_S)
    assert select.select([watched.monitor.bell], [], [], 0)[0]
    assert watched.monitor.fail(KeyError("later")) is watched.monitor.failure
    for call in (watched.monitor.check, lambda: watched.monitor.expect(4)):
        with pytest.raises(error):
            call()
    assert ended == watched.workers


@pytest.mark.parametrize(("kind", "raised"), [("ValueError", ValueError), ("OutOfMemoryError", RuntimeError)])
def test_what_a_start_raises_is_raised_as_it_is(watched: Watched, kind: str, raised: type[Exception]) -> None:
    watched.workers[0].say(Ready(5, "key"))
    watched.workers[1].say(Failed(kind, "no", "w"))
    with pytest.raises(raised, match=r"^rank 1 of 2: .*no\n"):
        watched.monitor.wait_ready()


def test_answers_are_by_rank_and_number(watched: Watched) -> None:
    """An answer that is not expected is dropped."""
    watched.start()
    first, second = watched.monitor.expect(1), watched.monitor.expect(2)
    watched.workers[1].say(Answered(2, "d"))
    watched.workers[1].say(Answered(9, "of nobody"))
    watched.workers[1].say(Answered(1, "b"))
    watched.workers[0].say(Answered(1, "a"))
    watched.workers[0].say(Answered(1, "again"))
    watched.workers[0].say(Answered(2, "c"))
    found = [[answer.result(SOON_S).value for answer in answers] for answers in (first, second)]
    assert found == [["a", "b"], ["c", "d"]]


def test_workers_that_are_told_to_end_may_do_so(watched: Watched, ended: list[Any]) -> None:
    watched.start()
    watched.monitor.close()
    watched.workers[0].other.close()
    watched.signs[1] = 1.0
    for _ in range(10):  # nothing is looked at any more that would show that it is over
        watched.clock.now += 1.0
        time.sleep(0.005)
    watched.monitor.check()
    assert not ended
