"""Processes of ranks and cores: their arguments, how their end is seen, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from left_over import SOON_S, nothing_left, wait_until
from test_core_client import ScriptedEnd, started
from tiny_models import tiny_config

from compiled_engine.config import EngineConfig, ParallelConfig
from compiled_engine.engine.control import Failed
from compiled_engine.process.child import how_it_ended
from compiled_engine.process.progress import RichProgress, SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.processes import core_child, ranks, run_core, start_cores
from compiled_engine.processes.channel import Connection
from compiled_engine.processes.core_child import CoreChild, ForeignCore, device_of_core
from compiled_engine.processes.ranks import Heartbeats, LaunchedWorkers, end_all
from compiled_engine.processes.wire import FrontendOptions, Start, Started, decode_to_api, decode_to_core

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Launcher:
    """Replaces start_process: the processes sleep. `given`: the arguments of each start."""

    given: list[dict[str, Any]] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    most: int = 100

    def __call__(
        self, module: str, arguments: list[str], descriptors: list[int], *, function: str, environment: Any = None
    ) -> subprocess.Popen[bytes]:
        if len(self.processes) == self.most:
            raise OSError("no more processes")
        self.given.append({"arguments": arguments, "descriptors": list(descriptors), "environment": environment})
        self.given[-1] |= {"program": (module, function), "inodes": [os.fstat(each).st_ino for each in descriptors]}
        self.processes.append(subprocess.Popen(["sleep", "100"], pass_fds=descriptors))
        return self.processes[-1]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, nothing_left: Path) -> Iterator[Launcher]:
    launcher = Launcher()
    monkeypatch.setattr(ranks, "start_process", launcher)
    monkeypatch.setattr(core_child, "start_process", launcher)
    yield launcher
    for process in launcher.processes:
        assert process.returncode is not None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_inherit_what_they_share(launcher: Launcher, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order: a connection of its own, signs of life, and the two rings. Each sees its own GPU first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    launched = LaunchedWorkers(3, device)
    assert launched.folder.is_dir()
    assert stat.S_IMODE(launched.folder.stat().st_mode) == 0o700
    steps, results = launched.steps, launched.results
    assert len(steps.bells) == 3
    assert len(results.bells) == 1
    for rank, given in enumerate(launcher.given):
        connection, *others = given["descriptors"]
        assert others == [launched.heartbeats.descriptor, steps.memory, results.memory, *results.bells, *steps.bells]
        assert given["arguments"] == [device, str(rank), str(launched.folder), *map(str, [connection, *others])]
        assert given["program"] == ("compiled_engine.processes.programs", "worker_main")
        visible = {"cpu": None, "cuda": ["4,5,6", "5,4,6", "6,4,5"][rank]}[device]
        assert given["environment"].get("CUDA_VISIBLE_DEVICES") == visible
        # Ranks of a host talk through its loopback interface, and leave NVLink's switches alone.
        for name, value in (("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_NVLS_ENABLE", "0")):
            assert given["environment"][name] == value
        for name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
            assert given["environment"][name] == "1"
        assert launched.children[rank].pid == launcher.processes[rank].pid
    connections = [given["inodes"][0] for given in launcher.given]
    assert len(set(connections)) == 3
    assert not {os.fstat(child.socket.fileno()).st_ino for child in launched.children} & set(connections)
    launched.close()
    launched.close()
    assert not launched.folder.exists()
    assert [process.returncode for process in launcher.processes] == [-signal.SIGKILL] * 3
    assert [child.socket.fileno() for child in launched.children] == [-1] * 3


def test_a_rank_that_cannot_be_launched_ends_those_that_were(launcher: Launcher) -> None:
    launcher.most = 2
    with pytest.raises(OSError, match="no more processes"):
        LaunchedWorkers(3, "cpu")
    assert [process.returncode for process in launcher.processes] == [-signal.SIGKILL] * 2


def test_as_many_ranks_as_a_replica_has_devices(launcher: Launcher) -> None:
    config = tiny_config()
    parallel = ParallelConfig(2, "multiprocess", data_parallel_size=3, stage_layers=(1, 1))
    launched = LaunchedWorkers.of(replace(config, parallel=parallel))
    assert len(launched.children) == 4
    assert {given["arguments"][0] for given in launcher.given} == {"cpu"}
    launched.close()


def test_how_a_worker_is_seen(launcher: Launcher) -> None:
    """Stopped, dying, or ended by a signal or not."""
    launched = LaunchedWorkers(2, "cpu")
    first, second = launched.children
    assert (first.is_stopped(), first.is_dying(), first.wait(0.0), first.is_killed(0.0)) == (False,) * 4
    os.kill(first.pid, signal.SIGSTOP)
    wait_until(first.is_stopped, SOON_S)
    assert not first.is_dying()
    first.kill()
    wait_until(first.is_dying, SOON_S)  # nobody has read its status yet
    assert first.is_stopped()
    assert first.is_killed(SOON_S)
    assert not first.is_dying()
    assert not first.is_stopped()
    assert first.wait(0.0)
    assert first.how_it_ended(0.0).startswith("was killed by SIGKILL")
    assert second.how_it_ended(0.0) == "has closed its connection"
    second._process = subprocess.Popen(["true"])
    assert second.wait(SOON_S)
    assert not second.is_killed(0.0)  # it has ended by itself
    launcher.processes[1].kill()
    launcher.processes[1].wait()
    launched.close()


def test_all_are_killed_before_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All share one timeout, so that a rank blocked by its device delays no other."""
    monkeypatch.setattr(ranks, "_END_S", 0.2)
    told: list[Any] = []

    class Worker:
        def __init__(self, name: str) -> None:
            self.name = name

        def kill(self) -> None:
            told.append(self.name)

        def close(self, within_s: float) -> None:
            told.append((self.name, within_s))
            time.sleep(within_s)

    workers: Any = [Worker(name) for name in "abc"]
    end_all(workers)
    assert told[:3] == ["a", "b", "c"]
    (_, first), (_, second), (_, third) = told[3:]
    assert 0.1 < first <= 0.2
    assert (round(second, 1), round(third, 1)) == (0.0, 0.0)
    assert min(second, third) >= 0.0


def test_signs_of_life_are_each_ranks_own() -> None:
    """The memory was created by another process."""
    watched = Heartbeats(3)
    assert [watched.last_s(rank) for rank in range(3)] == [0.0] * 3
    before = time.monotonic()
    Heartbeats(3, watched.descriptor).beat(1)
    wait_until(lambda: watched.last_s(1) > 0, SOON_S)
    assert before <= watched.last_s(1) <= time.monotonic()
    assert (watched.last_s(0), watched.last_s(2)) == (0.0, 0.0)
    first = watched.last_s(1)
    wait_until(lambda: watched.last_s(1) > first, SOON_S)
    assert 0.3 < watched.last_s(1) - first < SOON_S


def test_a_core_is_reached_by_its_user_alone(launcher: Launcher) -> None:
    core = CoreChild("cuda:1", {"A": "b"})
    folder = Path(core.address).parent
    (given,) = launcher.given
    (listener,) = given["descriptors"]
    assert given["arguments"] == [str(listener), str(folder), "cuda:1"]
    assert given["program"] == ("compiled_engine.processes.programs", "core_main")
    assert given["environment"] == {"A": "b"}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(os.stat(core.address).st_mode) == 0o600
    assert core.pid == launcher.processes[0].pid
    assert core.clock_ahead_s() == 0.0
    core.close(60)  # at once, as it was told nothing
    core.close(60)
    assert not folder.exists()
    assert core.how_it_ended(1.0).startswith("its process was killed by SIGKILL")
    with pytest.raises(OSError):  # noqa: PT011 - whatever the system says
        ForeignCore(folder / "core.socket")


def test_a_core_that_was_started_may_end_by_itself(launcher: Launcher) -> None:
    """After the timeout the process is killed."""
    core = CoreChild()
    frame = b"an order"
    core.start(frame)
    begun = time.monotonic()
    core.close(0.2)
    assert 0.2 <= time.monotonic() - begun < SOON_S
    assert launcher.processes[0].returncode == -signal.SIGKILL
    patient = CoreChild()
    patient.start(frame)
    launcher.processes[1].send_signal(signal.SIGTERM)
    patient.close(SOON_S)
    assert patient.how_it_ended(0.0) == "its process was killed by SIGTERM"


def test_a_core_that_cannot_be_launched_leaves_nothing(launcher: Launcher) -> None:
    launcher.most = 0
    with pytest.raises(OSError, match="no more processes"):
        CoreChild()


def test_an_address_is_short_enough_for_a_socket(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    core = CoreChild()
    assert len(core.address) < 100
    assert not list(deep.iterdir())
    core.close(0)


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({}, "auto"),
        ({"device": "cpu"}, "cpu"),
        ({"device": "cuda", "tensor_parallel_size": 2}, "cpu"),
        ({"device": "cuda"}, "cuda"),
    ],
)
def test_a_core_has_the_device_unless_its_ranks_have_it(
    launcher: Launcher, options: dict[str, Any], device: str
) -> None:
    core = CoreChild.of(options)
    assert launcher.given[0]["arguments"][2] == device
    core.close(0)


@pytest.mark.parametrize(
    ("parallel", "device"),
    [
        (ParallelConfig(1, "in_process", data_parallel_size=2), "cuda"),
        (ParallelConfig(2, "multiprocess", data_parallel_size=2), "cpu"),
    ],
)
def test_a_replica_has_the_device_unless_its_ranks_have_it(parallel: ParallelConfig, device: str) -> None:
    config = replace(tiny_config(), parallel=parallel, device=torch.device("cuda"))
    assert device_of_core(config) == device


class Replica(ScriptedEnd):
    """A core that waits for its order."""

    def __init__(self, device: str, environment: Any) -> None:
        super().__init__()
        self.device, self.environment = device, environment
        self.closed: list[float] = []

    def start(self, frame: bytes) -> None:
        self.socket.sendall(frame)

    def clock_ahead_s(self) -> float:
        return 2.5

    def close(self, timeout_s: float) -> None:
        self.closed.append(timeout_s)
        super().close(timeout_s)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> list[Replica]:
    """Return the launched replicas."""
    found: list[Replica] = []

    def launch(device: str, environment: Any) -> Replica:
        found.append(Replica(device, environment))
        return found[-1]

    monkeypatch.setattr(start_cores, "CoreChild", launch)
    return found


def of_replicas(count: int, device: str = "cpu") -> EngineConfig:
    parallel = ParallelConfig(1, "in_process", data_parallel_size=count)
    return replace(tiny_config(), parallel=parallel, device=torch.device(device))


def test_each_replica_is_told_what_to_start(replicas: list[Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one alone shows progress; threads and GPUs are divided."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    answering = iter((17, 16))

    class Answering(Replica):
        def start(self, frame: bytes) -> None:
            super().start(frame)
            limits = replace_limits(started(), next(answering))
            self.say(limits)

    def launch(device: str, environment: Any) -> Replica:
        replicas.append(Answering(device, environment))
        return replicas[-1]

    monkeypatch.setattr(start_cores, "CoreChild", launch)
    config = of_replicas(2, "cuda")
    timeline = Timeline()
    timeline.add("read the options", 0.0, 0.25)
    engine: Any = start_cores.start_cores(config, RichProgress(), ["a.b:C", object()], timeline)  # type: ignore[list-item]
    assert [core.environment["CUDA_VISIBLE_DEVICES"] for core in replicas] == ["4", "5"]
    assert [core.device for core in replicas] == ["cuda"] * 2
    for number, core in enumerate(replicas):
        (start,) = core.heard()
        assert isinstance(start, Start)
        assert start.config == config.of_replica(number)
        assert start.frontend == FrontendOptions(True, "none")
        assert (start.logits_processors, start.num_threads) == (("a.b:C",), 3)
        assert start.progress == (number == 0)
        assert start.origin_s == timeline.origin_s
        assert [span.name for span in start.spans] == ["read the options"]
    assert timeline.spans[-1].name == "replicas"
    assert [(each.number, each.name, each.num_slots, each.clock_ahead_s) for each in engine._all] == [
        (0, "replica 0 of 2", 17, 2.5),
        (1, "replica 1 of 2", 16, 2.5),
    ]
    assert engine.num_slots == 16
    engine.close()


def replace_limits(given: Started, num_slots: int) -> Started:
    return Started(given.client, given.config, given.frontend, replace(given.limits, num_slots=num_slots))


def test_a_replica_that_cannot_start_ends_the_others(replicas: list[Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, though another one is not ready, and it is named."""

    class Failing(Replica):
        def start(self, frame: bytes) -> None:
            if len(replicas) == 2 and self is replicas[1]:
                self.say(Failed("ValueError", "no such option", "line 7"))

    def launch(device: str, environment: Any) -> Replica:
        replicas.append(Failing(device, environment))
        return replicas[-1]

    monkeypatch.setattr(start_cores, "CoreChild", launch)
    with pytest.raises(ValueError, match="no such option") as caught:
        start_cores.start_cores(of_replicas(2), SilentProgress())
    assert caught.value.__notes__[-1] == "in replica 1 of 2"
    assert [core.closed for core in replicas] == [[0], [0]]
    assert [core.environment for core in replicas] == [{}, {}]


@dataclass(frozen=True)
class Executor:
    """Stands in for an executor of this name."""

    name: str
    call: None = None


class Core:
    """Stands in for EngineCore, and keeps its arguments."""

    def __init__(self, config: Any, executor: Any, clock: Any, start_s: float, features: Any = ()) -> None:
        self.config, self.executor, self.start_s = config, executor, start_s
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("progress", [RichProgress(), SilentProgress()])
@pytest.mark.parametrize("kind", ["multiprocess", "in_process"])
def test_a_core_has_the_executor_of_its_configuration(
    kind: str, progress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes get the names of logits processors, which they import; this one the objects, too."""
    given: list[Any] = []
    monkeypatch.setattr(start_cores, "EngineCore", Core)
    monkeypatch.setattr(start_cores, "LaunchedWorkers", type("", (), {"of": staticmethod(lambda config: "workers")}))
    for name in ("MultiprocessExecutor", "InProcessExecutor"):
        make = lambda *arguments, name=name, **more: given.append((name, arguments, more)) or Executor(name)  # noqa: E731
        monkeypatch.setattr(start_cores, name, make)
    config = replace(tiny_config(), parallel=ParallelConfig(1, kind))
    timeline = Timeline()
    processors: Any = ["faulty_rank:FaultyRank"]
    core: Any = start_cores.start_cores(config, progress, processors, timeline)
    ((name, arguments, more),) = given
    assert core.executor == Executor(name)
    assert (core.config, arguments[0]) == (config, config)
    assert 0.0 <= core.start_s <= timeline.now()
    if kind == "multiprocess":
        assert (name, arguments[1:]) == ("MultiprocessExecutor", ("workers", timeline, processors))
        assert more == {"progress": isinstance(progress, RichProgress)}
    else:
        assert (name, arguments[1:3]) == ("InProcessExecutor", (progress, timeline))
        assert [found.__name__ for found in arguments[5]] == ["FaultyRank"]


def order(**more: Any) -> Start:
    given = {"logits_processors": (), "num_threads": 1, "progress": False, "origin_s": time.perf_counter(), "spans": ()}
    return Start(config=tiny_config(), frontend=FrontendOptions(True, "auto"), **given | more)


@pytest.mark.parametrize("progress", [False, True])
def test_a_core_is_started_as_it_was_ordered(progress: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until then is part of its start. It is closed at the end, whatever that is."""
    given: list[Any] = []
    own, other = socket.socketpair()
    core = Core(None, None, None, 0.0)

    class Server:
        def __init__(self, *arguments: Any) -> None:
            given.append(arguments)

        def run(self) -> None:
            given.append("run")
            raise KeyError("injected")

    monkeypatch.setattr(run_core, "start_cores", lambda *arguments: given.append(arguments) or core)
    monkeypatch.setattr(run_core, "CoreServer", Server)
    timeline = Timeline()
    timeline.add("before", 0.0, 0.25)
    start = order(progress=progress, origin_s=timeline.origin_s, spans=tuple(timeline.spans))
    connection: Any = Connection(other, decode_to_core)
    listener, masks, processors = object(), object(), ["a:b"]
    with pytest.raises(KeyError):
        run_core.run_core(start, connection, processors, listener, masks, lambda: given.append("started"))  # type: ignore[arg-type]
    (config, shown, names, kept), begun, server, ran = given
    assert (config, names, begun, ran) == (start.config, processors, "started", "run")
    assert isinstance(shown, RichProgress if progress else SilentProgress)
    assert [(span.name, span.start_s) for span in kept.spans] == [
        ("before", 0.0),
        ("wait for the core's process", 0.25),
    ]
    assert kept.origin_s == timeline.origin_s
    assert server == (core, start.frontend, connection, listener, masks)
    assert core.is_closed
    own.close()
    other.close()


def test_a_start_that_fails_is_told_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(run_core, "start_cores", fail)
    told: list[str] = []
    own, other = socket.socketpair()
    run_core.run_core(order(), Connection(other, decode_to_core), (), when_started=lambda: told.append("over"))
    connection = Connection(own, decode_to_api)
    (failed,) = connection.receive()
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.text, told) == ("MemoryError", "no room", ["over"])
    with pytest.raises(EOFError):
        connection.receive()
    connection.close()


def test_signals_without_a_name_are_told_by_number() -> None:
    process: Any = SimpleNamespace(wait=lambda timeout_s: -40)
    assert how_it_ended(process, 0.0) == "was killed by signal 40"
