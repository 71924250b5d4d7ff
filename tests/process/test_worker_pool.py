"""Callers are served in the order of their requests, and none waits for workers that are gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from left_over import has_ended, wait_until

from compiled_engine.process import worker_pool
from compiled_engine.process.child import start_process
from compiled_engine.process.worker_pool import WorkerEnded, WorkerPool, WorkerProcesses


class Worker:
    """Answers when it is told to."""

    asked: list[int]

    def __init__(self, number: int):
        self.number = number
        self.answers: list[Future[dict[str, Any]]] = []
        self.busy = threading.Semaphore(0)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(message["n"])
        answer: Future[dict[str, Any]] = Future()
        self.answers.append(answer)
        self.busy.release()
        return answer.result(60)


class Workers:
    def __init__(self, module: str, count: int, environment: Any):
        self.workers = [Worker(number) for number in range(count)]

    def begin(self, order: dict[str, Any]) -> None: ...


class Turn(Future[Any]):
    """The pool's future for a request that must wait."""

    made: list[Turn]

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[list[Worker], WorkerPool]]:
    made: list[Workers] = []
    monkeypatch.setattr(worker_pool, "WorkerProcesses", lambda *given: made.append(Workers(*given)) or made[-1])
    monkeypatch.setattr(worker_pool, "Future", Turn)
    monkeypatch.setattr(Worker, "asked", [], raising=False)
    monkeypatch.setattr(Turn, "made", [], raising=False)

    def start(count: int) -> tuple[list[Worker], WorkerPool]:
        pool = WorkerPool("nowhere", count)
        pool.begin({})
        return made[-1].workers if made else [], pool

    return start


WORKER = """
import subprocess
from compiled_engine.process.worker_program import run_workers

def work(messages, answer):
    for message in messages:
        subprocess.run(["sleep", "300"])

def main():
    run_workers(lambda order: work)
"""
PARENT = """
from compiled_engine.process.worker_pool import WorkerProcesses

processes = WorkerProcesses("slow_worker", 2)
processes.begin({})
processes.workers[0].ask({})
"""


def is_asleep(process: psutil.Process) -> bool:
    """Return whether a process below it runs `sleep`."""
    with suppress(psutil.NoSuchProcess):  # one that was listed may have ended
        return any(child.name() == "sleep" for child in process.children(recursive=True))
    return False


def test_a_worker_ends_in_its_work_when_its_parent_is_killed(tmp_path: Path) -> None:
    """Its child processes end too."""
    (tmp_path / "slow_worker.py").write_text(WORKER)
    with subprocess.Popen([sys.executable, "-c", PARENT], env=os.environ | {"PYTHONPATH": str(tmp_path)}) as parent:
        process = psutil.Process(parent.pid)
        wait_until(lambda: is_asleep(process))
        family = process.children(recursive=True)
        parent.kill()
        parent.wait()
    wait_until(lambda: all(map(has_ended, family)))


def ask_in_order(pool: WorkerPool, threads: ThreadPoolExecutor, count: int, at_once: int) -> list[Future[Any]]:
    """Ask `count` questions, each once the one before it waits, where `at_once` are answered."""
    futures = []
    for n in range(count):
        futures.append(threads.submit(pool.ask, {"n": n}))
        deadline = time.monotonic() + 60
        while len(Turn.made) + min(len(Worker.asked), at_once) <= n:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    return futures


def test_the_first_to_ask_is_the_first_to_be_answered(started: Any) -> None:
    (worker,), pool = started(1)
    with ThreadPoolExecutor(20) as threads:
        futures = ask_in_order(pool, threads, 20, 1)
        for n in range(20):
            assert worker.busy.acquire(timeout=60)
            worker.answers[n].set_result({"seconds": n})
        assert [future.result(60)["seconds"] for future in futures] == list(range(20))
    assert Worker.asked == list(range(20))


def test_those_that_wait_are_told_when_the_last_worker_ends(started: Any) -> None:
    workers, pool = started(2)
    with ThreadPoolExecutor(5) as threads:
        futures = ask_in_order(pool, threads, 5, 2)
        for worker in workers:
            assert worker.busy.acquire(timeout=60)
        workers[0].answers[0].set_exception(WorkerEnded("gone"))
        assert futures[0].result(60) is None
        workers[1].answers[0].set_result({"seconds": 1})
        assert futures[1].result(60) == {"seconds": 1, "worker": 1}
        assert workers[1].busy.acquire(timeout=60)
        workers[1].answers[1].set_exception(WorkerEnded("gone"))
        assert [future.result(60) for future in futures[2:]] == [None, None, None]
    assert pool.ask({"n": 5}) is None


def test_without_workers_nobody_waits(started: Any) -> None:
    _, pool = started(0)
    assert pool.ask({"n": 0}) is None


ECHO = """
import os
from compiled_engine.process.worker_program import run_workers


def prepare(order):
    prepared_by = os.getpid()

    def work(messages, answer):
        for message in messages:
            print("not an answer")
            answer(order | message | {"forked": os.getppid() == prepared_by, "pid": os.getpid()})

    return work


def main():
    run_workers(prepare)
"""


def test_processes_import_from_the_folder_of_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For prompts and notebooks "" in sys.path is the process's current folder."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_a_prompt.py").write_text(ECHO)
    processes = WorkerProcesses("beside_a_prompt", 3)
    processes.begin({"order": 7})
    answers = [worker.ask({"n": n}) for worker in processes.workers for n in range(2)]
    pids = [answer.pop("pid") for answer in answers]
    # Forks of one process that has prepared for all.
    assert answers == [{"order": 7, "n": n, "forked": True} for n in range(2)] * 3
    assert len(set(pids)) == 3
    processes.close()
    assert not any(map(psutil.pid_exists, pids))  # nor is one left that nobody has waited for
    with pytest.raises(WorkerEnded, match="worker 1 was closed"):
        processes.workers[1].ask({})
    processes.close()
    (tmp_path / "another.py").write_text("def main(): pass")
    with start_process("another", [], []) as process:
        assert process.wait() == 0


ASKS_NOTHING = """
import importlib
import sys

import torch


def asked(*_):
    sys.exit("CUDA was asked")


def main():
    torch.cuda.is_available = torch.cuda.device_count = asked
    if hasattr(torch._C, "_cuda_getDeviceCount"):
        torch._C._cuda_getDeviceCount = asked
    importlib.import_module({program!r}).main()
"""


@pytest.mark.parametrize(
    "program", ["compiled_engine.graphs.compiler.compile_worker", "compiled_engine.kernels.worker"]
)
def test_what_is_imported_before_a_fork_asks_cuda_nothing(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the forks could not use CUDA; Inductor queries the GPU when it is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "asks_nothing.py").write_text(ASKS_NOTHING.format(program=program))
    processes = WorkerProcesses("asks_nothing", 1)
    processes.begin({"modules": ["compiled_engine.engine.warm_up"], "settings": {}, "entry": str(tmp_path)})
    question = {"key": "none", "target": ["cuda", 90, 32], "module": "none", "name": "none", "specialization": ""}
    assert "error" in processes.workers[0].ask(question)
    processes.close()


CANNOT_USE_CUDA = """
import torch
from compiled_engine.process.worker_program import run_workers

def main():
    torch.cuda._is_in_bad_fork = lambda: True
    run_workers(lambda order: lambda messages, answer: [answer({"done": True}) for _ in messages])
"""


def test_a_worker_that_cannot_use_cuda_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cannot_use_cuda.py").write_text(CANNOT_USE_CUDA)
    processes = WorkerProcesses("cannot_use_cuda", 1)
    processes.begin({})
    with pytest.raises(WorkerEnded, match="worker 0 did not start: RuntimeError: CUDA cannot be used in this worker"):
        processes.workers[0].ask({})
    processes.close()


def test_work_without_cuda_runs_where_an_import_asked_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' image processors do when they are loaded."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_no_cuda.py").write_text(CANNOT_USE_CUDA.replace("messages])", "messages], uses_cuda=False)"))
    processes = WorkerProcesses("needs_no_cuda", 1)
    processes.begin({})
    assert processes.workers[0].ask({}) == {"done": True}
    processes.close()
