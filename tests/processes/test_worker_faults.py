"""What becomes of an engine of two ranks when one of them, or the process that started them, fails."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from faulty_rank import DEED, FAILS_INSIDE, FAILS_TO_START, INSIDE, NAME, SLOW_TO_START
from folders import SUPPORT
from left_over import SOON_S, has_ended, wait_until, workers
from small_engines import PROMPTS, SMALL

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall
from compiled_engine.llm import LLM
from compiled_engine.parallel.connect import RankLayout
from compiled_engine.process.child import import_path
from compiled_engine.processes import monitor
from compiled_engine.processes.channel import send
from compiled_engine.processes.monitor import Monitor, WorkerError
from compiled_engine.processes.ranks import Heartbeats
from compiled_engine.processes.wire import Ready, encode
from compiled_engine.sampling.params import SamplingParams

# Of cases that differ in a fault one is drawn; `make test-all` runs every one.
pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.product(one_in=1000)]
ENGINE: dict[str, Any] = SMALL | {"dtype": "float32", "tensor_parallel_size": 2}
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def with_fault(fault: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, extra_args={"fault": fault})


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill", "the worker of rank 1 of 2 was killed by SIGKILL"),
        ("stop", "the worker of rank 1 of 2 has given no sign of life"),
        ("raise", "rank 1 of 2: .*KeyError: 'injected in one'"),
    ],
)
def test_a_rank_that_fails_in_a_step(fault: str, message: str) -> None:
    """Within seconds every call says why; closing leaves nothing; the next engine starts."""
    llm = LLM(**ENGINE, logits_processors=[NAME])
    before = llm.generate(PROMPTS, SHORT, use_tqdm=False)
    # What they share has no name that could outlive them.
    assert not any(part.path.startswith("/dev/shm") for worker in workers() for part in worker.memory_maps())
    start = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        llm.generate(PROMPTS, with_fault(fault), use_tqdm=False)
    assert time.monotonic() - start < SOON_S
    with pytest.raises(WorkerError, match=message):
        llm.generate(PROMPTS, SHORT, use_tqdm=False)
    assert not workers()
    llm.close()
    if fault == "kill":
        with LLM(**ENGINE) as again:
            after = again.generate(PROMPTS, SHORT, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]


def test_a_failure_is_told_even_if_a_process_cannot_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(ended: object) -> None:
        raise PermissionError("injected")

    monkeypatch.setattr(monitor, "end_all", refuse)
    own, other = socket.socketpair()
    heartbeats = Heartbeats(1)
    worker: Any = SimpleNamespace(socket=own, is_stopped=lambda: False, is_dying=lambda: False)
    watch = Monitor([worker], RankLayout(1, 1), heartbeats)
    (answer,) = watch.expect(0)
    with pytest.raises(PermissionError):
        watch.fail(WorkerError("a rank is gone"))
    for told in (watch.check, watch.wait_ready, answer.result):
        with pytest.raises(WorkerError, match="a rank is gone"):
            told()
    assert select.select([watch.bell], [], [], 0)[0]
    own.close()
    other.close()
    heartbeats.close()


class Clock:
    """Replaces the time module. `pace`: seconds that pass between readings."""

    def __init__(self) -> None:
        self.now, self.pace, self.looks = 100.0, 0.0, 0

    def monotonic(self) -> float:
        self.looks += 1
        self.now += self.pace
        return self.now

    def wait_for_looks(self, watch: Monitor) -> None:
        enough = self.looks + 3
        wait_until(lambda: self.looks >= enough or watch.failure is not None)


@pytest.mark.product(one_in=1)
@pytest.mark.parametrize(("alive", "message"), [(False, "no sign of life"), (True, "a rank does not answer")])
def test_a_process_that_stood_still_does_not_blame_its_workers(
    alive: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-Z and `fg`. Workers that then do not go on are found as before."""
    clock = Clock()
    monkeypatch.setattr(monitor, "time", clock)
    monkeypatch.setattr(monitor, "_LOOK_S", 0.01)
    monkeypatch.setattr(monitor, "end_all", lambda ended: None)
    own, other = socket.socketpair()
    worker: Any = SimpleNamespace(socket=own, is_stopped=lambda: False, is_dying=lambda: False)
    heartbeats: Any = SimpleNamespace(last_s=lambda rank: clock.looks if alive else 1.0)
    with own, other:
        watch = Monitor([worker], RankLayout(1, 1), heartbeats)
        send(other, encode(Ready(1, None)))
        watch.wait_ready()
        watch.expect_result_within(8.0 if alive else None)
        clock.wait_for_looks(watch)
        clock.now += 1000.0
        clock.wait_for_looks(watch)
        watch.check()
        clock.pace = 0.5
        wait_until(lambda: watch.failure is not None)
        with pytest.raises(WorkerError, match=message):
            watch.check()
        watch.end()


def left() -> tuple[int, int]:
    """Return the numbers of this process's anonymous descriptors and threads."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("anon_inode") for link in links), threading.active_count()


def test_what_fails_on_all_ranks_alike_fails_alone() -> None:
    """A step, and a call, which comes after the steps that were sent before it: the ranks go on. Closing leaves no
    descriptor and no thread."""
    descriptors, threads = left()
    with LLM(**ENGINE, logits_processors=[NAME]) as llm:
        before = llm.generate(PROMPTS, SHORT, use_tqdm=False)
        with pytest.raises(RuntimeError, match="injected in all"):
            llm.generate(PROMPTS, with_fault("all"), use_tqdm=False)
        after = llm.generate(PROMPTS, SHORT, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]
        wrong = r"call is 'nothing'; allowed: metrics, [\w., ]+"
        with pytest.raises(ControlError, match=f"^rank 0 of 2: {wrong}; rank 1 of 2: {wrong}$"):
            llm.core.executor.call(ControlCall("nothing"))
        assert len(llm.core.executor.call(ControlCall("metrics"))) == 2
        after = llm.generate(PROMPTS, SHORT, use_tqdm=False)
    assert [each.outputs for each in after] == [each.outputs for each in before]
    assert left()[0] <= descriptors
    wait_until(lambda: left()[1] <= threads, SOON_S)  # the watch over the failed step ends by itself


def test_a_rank_that_cannot_start() -> None:
    with pytest.raises(ValueError, match=r"rank 1 of 2: .*OutOfMemoryError: injected"):
        LLM(**ENGINE, logits_processors=[FAILS_TO_START])


@pytest.mark.parametrize(
    ("function", "deed", "message"),
    [
        ("load_model", "SIGSTOP", "rank 1 of 2 has given no sign of life"),
        ("warm_up", "SIGKILL", "rank 1 of 2 was killed by SIGKILL"),
        ("compile_pieces", "SIGKILL", "rank [01] of 2 was killed by SIGKILL"),
    ],
)
def test_a_rank_that_fails_inside_its_start(
    function: str, deed: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others end with it, and so do processes that compile for it; the next engine starts in the same folders."""
    for name, value in ((INSIDE, function), (DEED, deed), ("COMPILED_ENGINE_CACHE_DIR", str(tmp_path / "cache"))):
        monkeypatch.setenv(name, value)
    options = ENGINE | {"mode": "compiled" if function == "compile_pieces" else "eager"}
    with pytest.raises(WorkerError, match=message):
        LLM(**options, logits_processors=[FAILS_INSIDE])
    assert not workers()
    if function == "compile_pieces":
        with LLM(**options) as again:
            assert again.generate(PROMPTS, SHORT, use_tqdm=False)[0].outputs[0].token_ids


ON_GPU: dict[str, Any] = {"device": "cuda", "progress": False, "max_model_len": 256, "max_num_seqs": 8}
ON_GPU |= {"gpu_memory_utilization": 0.3, "distributed_executor": "multiprocess"}


# With two GPUs, two ranks as well as one.
GPU_COUNTS = range(1, max(2, min(3, torch.cuda.device_count() + 1)))
GPU_FAULTS = [("kill", "was killed by SIGKILL"), ("stop", "no sign of life"), ("memory", "OutOfMemoryError: injected")]


def free_memory(num_gpus: int) -> list[int]:
    """Return free bytes of each GPU."""
    return [torch.cuda.mem_get_info(device)[0] for device in range(num_gpus)]


def wait_until_free(before: list[int]) -> None:
    """Wait until each GPU has the free bytes that it had before the engine started."""
    wait_until(
        lambda: all(now > b - (256 << 20) for now, b in zip(free_memory(len(before)), before, strict=True)), SOON_S
    )


@pytest.mark.gpu
@pytest.mark.gpu_alone
@pytest.mark.parametrize(
    ("num_gpus", "fault", "message"),
    # What all ranks of a step raise alike leaves the engine usable: one rank alone has no such fault.
    [(n, *fault) for n in GPU_COUNTS for fault in GPU_FAULTS if n > 1 or fault[0] != "memory"],
)
def test_a_worker_that_fails_in_a_step_leaves_the_gpu_free(num_gpus: int, fault: str, message: str) -> None:
    free = free_memory(num_gpus)
    llm = LLM(**ON_GPU, tensor_parallel_size=num_gpus, mode="eager", graph_mode="none", logits_processors=[NAME])
    llm.generate(PROMPTS, SHORT, use_tqdm=False)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        llm.generate(PROMPTS, with_fault(fault), use_tqdm=False)
    assert time.monotonic() - start < SOON_S
    wait_until_free(free)
    llm.close()


@pytest.mark.gpu
@pytest.mark.gpu_alone
@pytest.mark.parametrize("function", ["compile_pieces", "capture_all"])
@pytest.mark.parametrize("num_gpus", GPU_COUNTS)
def test_a_worker_that_is_killed_while_it_compiles_or_captures_leaves_the_gpu_free(
    num_gpus: int, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled by Inductor, which takes long enough to be killed in it. Nobody ends this compilation, so the cache
    never has its result."""
    monkeypatch.setenv(INSIDE, function)
    monkeypatch.setenv(DEED, "SIGKILL")
    options = ON_GPU | {"tensor_parallel_size": num_gpus}
    killed = {"disable_passes": ["silu_mul", "rms_norm"]} if function == "compile_pieces" else {}
    free = free_memory(num_gpus)
    with pytest.raises(WorkerError, match=rf"rank \d of {num_gpus} was killed by SIGKILL"):
        LLM(**options | killed, logits_processors=[FAILS_INSIDE])
    wait_until_free(free)
    with LLM(**options) as again:
        assert again.generate(PROMPTS, SHORT, use_tqdm=False)[0].outputs[0].token_ids


SCRIPT = """
import json, sys
from small_engines import PROMPTS
from test_worker_faults import SHORT
from compiled_engine.llm import LLM

if __name__ == "__main__":
    llm = LLM(**json.loads(sys.argv[1]), logits_processors=sys.argv[2:])
    llm.generate(PROMPTS, SHORT, use_tqdm=False)
    print("ready", flush=True)
    sys.stdin.read()
"""


def kill_the_driver(options: dict[str, Any], starting: bool, folder: Path) -> None:
    """Its workers end with it, whether they serve or start (a file tells that each is in its start)."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(SUPPORT), import_path()])
    }
    command = [sys.executable, "-c", SCRIPT, json.dumps(options), *([SLOW_TO_START] if starting else [])]
    num_ranks = options["tensor_parallel_size"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
    ) as driver:
        assert driver.stdout is not None
        if starting:
            wait_until(lambda: all((folder / f"starting{rank}").exists() for rank in range(num_ranks)))
        else:
            assert driver.stdout.readline() == "ready\n"
        ranks = workers(psutil.Process(driver.pid))
        assert len(ranks) == num_ranks
        driver.kill()
        driver.wait()
    wait_until(lambda: all(map(has_ended, ranks)), SOON_S)


@pytest.mark.parametrize("starting", [False, True])
def test_the_driver_is_killed(starting: bool, tmp_path: Path) -> None:
    kill_the_driver(ENGINE, starting, tmp_path)


@pytest.mark.gpu
@pytest.mark.gpu_alone
@pytest.mark.parametrize("num_gpus", GPU_COUNTS)
def test_a_driver_that_is_killed_leaves_the_gpu_free(num_gpus: int, tmp_path: Path) -> None:
    free = free_memory(num_gpus)
    kill_the_driver(ON_GPU | {"tensor_parallel_size": num_gpus, "mode": "eager", "graph_mode": "none"}, False, tmp_path)
    wait_until_free(free)
