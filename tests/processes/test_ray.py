"""Replicas on two nodes of a Ray cluster on this machine; one of the nodes is killed under load."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from async_engines import run
from faulty_processor import KILLED_AT_START, NAME
from small_engines import PROMPTS, SMALL
from typer.testing import CliRunner

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.cli.app import app
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.options import EngineOptions
from compiled_engine.process.child import as_this_one
from compiled_engine.processes.channel import frame
from compiled_engine.processes.core_client import EngineDeadError
from compiled_engine.processes.wire import FrontendOptions, Start, encode
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

# Not every machine with a GPU has Ray.
ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
replicas = importlib.import_module("compiled_engine.processes.ray_replicas")

ENGINE: dict[str, Any] = SMALL | {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "num_blocks": 128,
    "logits_processors": [NAME],
}
ON_RAY: dict[str, Any] = {"data_parallel_size": 2, "distributed_executor": "ray"}
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
SLOW: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "extra_args": {"fault": "slow"}}
PARAMS = [
    SamplingParams(temperature=0, logprobs=1, **SLOW),
    SamplingParams(temperature=0.9, seed=3, n=2, **SLOW),
    SamplingParams(temperature=0.8, seed=5, presence_penalty=1.0, prompt_logprobs=1, **SLOW),
] * 2
TEXTS = [*PROMPTS, *(f"{prompt}# two\n" for prompt in PROMPTS)]

MARK = "COMPILED_ENGINE_TEST"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv(MARK, str(tmp_path))
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(**NODE)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    before = {process.pid for process in psutil.Process().children()}
    yield cluster
    assert not ray.is_initialized()
    assert {process.pid for process in psutil.Process().children()} <= before
    cluster.shutdown()


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def cores(temporary: Path) -> list[psutil.Process]:
    """Return the cores of the cluster started with this folder in its environment; their parents are its actors."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_core = any("core_main" in part for part in process.cmdline())
            if is_core and process.environ().get(MARK) == str(temporary):
                found.append(process)
    return found


# The ranks of a replica are launched by its core, and end with it, on a node as here.
TWO_RANKS = pytest.mark.shown_by(
    "processes/test_ray.py::test_the_tokens_are_those_of_one_process_also_when_a_node_is_killed",
    "processes/test_launched_workers.py::test_they_end_with_who_launched_them",
)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=TWO_RANKS)])
def test_the_tokens_are_those_of_one_process_also_when_a_node_is_killed(
    num_ranks: int, cluster: Any, tmp_path: Path
) -> None:
    with LLM(**ENGINE) as one:
        wanted = one.generate(TEXTS, PARAMS, use_tqdm=False)
    with pytest.raises(
        ValueError, match=r"data_parallel_size is 5, .* 1 CPU on one node.* 2 nodes.*allowed: at most 4"
    ):
        LLM(**ENGINE | {"data_parallel_size": 5, "distributed_executor": "ray"})
    with LLM(**ENGINE, **ON_RAY, tensor_parallel_size=num_ranks) as two:
        assert tokens(two.generate(TEXTS, PARAMS, use_tqdm=False)) == tokens(wanted)
        metrics = two.metrics()
        assert num_ranks == 1 or metrics["collectives"] == "gloo"
        assert min(replica["generated_tokens"] for replica in metrics["replicas"]) > 0
        nodes = {
            bundle
            for group in ray.util.placement_group_table().values()
            for bundle in group["bundles_to_node_id"].values()
        }
        assert len(nodes) == 2
        killer = threading.Timer(0.5, lambda: cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False))
        killer.start()
        assert tokens(two.generate(TEXTS, PARAMS, use_tqdm=False)) == tokens(wanted)
        killer.join()
        metrics = two.metrics()
        (ended,) = [replica["ended"] for replica in metrics["replicas"] if not replica["lives"]]
        assert "of the Ray cluster" in ended
        assert metrics["requests_rerun"] > 0
    deadline = time.monotonic() + 30
    while cores(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster that this process is in, and which believes that it has GPUs, but does not name them to any process."""
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = tempfile.mkdtemp(prefix="ray-")
    ray.init("local", _temp_dir=folder, num_gpus=2, log_to_driver=False, **NODE)
    yield
    assert ray.is_initialized()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def unfit_actor(fails_early: bool) -> Any:
    """An actor on a node that lacks something a core needs; it fails at its creation, or later."""

    class Unfit(replicas.ReplicaActor):  # local, so that the nodes need not import this file
        def __init__(self) -> None:
            if fails_early:
                raise OSError("injected: no space")

        def node(self) -> tuple[str, str]:
            raise OSError("injected: no descriptors\nare left")

    return ray.remote(Unfit).options(num_cpus=0).remote()


def gpus_of_two_replicas() -> list[str | None]:
    class Placed(replicas.ReplicaActor):
        def gpus_of_core(self) -> str | None:
            return psutil.Process(self._child.pid).environ().get("CUDA_VISIBLE_DEVICES")

    actors = [ray.remote(Placed).options(num_cpus=0, num_gpus=1).remote("cpu", []) for _ in range(2)]
    found: list[str | None] = ray.get([actor.gpus_of_core.remote() for actor in actors])
    ray.get([actor.close.remote() for actor in actors])
    for actor in actors:
        ray.kill(actor)
    return found


def groups() -> list[str]:
    return [group["state"] for group in ray.util.placement_group_table().values()]


def check_unfit(fails_early: bool, what: str) -> None:
    """A start that fails says why, in a line."""
    config = resolve(EngineOptions(device="cpu", mode="eager"))
    frontend = FrontendOptions(skip_tokenizer_init=True, generation_config="none")
    order = frame(encode(Start(config, frontend, (), 1, progress=False, origin_s=0.0, spans=())))
    core = replicas.RayCore(unfit_actor(fails_early), "replica 0 of 2")
    with pytest.raises(RuntimeError, match=f"^replica 0 of 2 on Ray did not start: OSError: injected: {what}$"):
        core.start(order)
    core.close(0)


def test_a_node_whose_address_begins_as_this_ones_has_another_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are compared whole: the node is 10.0.0.12, this machine 10.0.0.1."""
    here = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    monkeypatch.setattr(replicas, "ray", SimpleNamespace(get=lambda value: value, util=here))
    answers: dict[str, Any] = {"node": ("0" * 40, "10.0.0.12"), "start": ["injected"], "clock": -5.0, "close": None}
    actor = SimpleNamespace(
        **{name: SimpleNamespace(remote=lambda *given, a=answer: a) for name, answer in answers.items()}
    )
    config = resolve(EngineOptions(device="cpu", mode="eager"))
    frontend = FrontendOptions(skip_tokenizer_init=True, generation_config="none")
    core = replicas.RayCore(actor, "replica 0 of 2")
    with pytest.raises(ValueError, match=r"cannot run on node 10\.0\.0\.12 \(00000000\) of the Ray cluster: injected"):
        core.start(frame(encode(Start(config, frontend, (), 1, progress=False, origin_s=0.0, spans=()))))
    assert core.clock_ahead_s() > 4.0
    here.get_node_ip_address = lambda: "10.0.0.12"
    assert core.clock_ahead_s() == 0.0
    core.close(0)


def test_replicas_in_the_cluster_of_this_process(own_cluster: None) -> None:
    """Each has a GPU of its own, or says why it does not start."""
    assert sorted(map(str, gpus_of_two_replicas())) == ["0", "1"]
    check_unfit(False, "no descriptors are left")


@pytest.mark.shown_by(
    "processes/test_ray.py::test_replicas_in_the_cluster_of_this_process",
    "processes/test_data_parallel.py::test_a_start_that_fails_says_why_and_leaves_nothing",
)
def test_a_start_that_fails_gives_back_what_it_had(own_cluster: None) -> None:
    check_unfit(True, "no space")
    with pytest.raises(EngineDeadError, match=r"killed by SIGKILL.*, on node .* of the Ray cluster"):
        LLM(**ENGINE | ON_RAY | {"logits_processors": [KILLED_AT_START]})
    assert groups() == ["REMOVED"]


@pytest.mark.shown_by(
    "processes/test_ray.py::test_the_tokens_are_those_of_one_process_also_when_a_node_is_killed",
    "processes/test_ray.py::test_replicas_in_the_cluster_of_this_process",
)
def test_replicas_of_another_process_in_the_cluster_of_this_one(own_cluster: None) -> None:
    engine = AsyncLLM(**ENGINE, **ON_RAY)
    try:
        assert groups() == ["CREATED"]
    finally:
        run(engine.shutdown())


def test_a_node_that_differs_from_the_driver_is_told_apart() -> None:
    own = replicas.own_environment("cpu")
    assert replicas.differences(own, own) == []
    other = own | {"torch": "2.0"}
    assert replicas.differences(own, other) == [f"torch is 2.0, the driver's is {own['torch']}"]
    assert replicas.differences(own | {"GPU": "a"}, own) == ["GPU is not there, the driver's is a"]


NAMED = """
import ctypes
from compiled_engine.processes.ray_replicas import own_environment
print(own_environment("cuda")["GPU"])
driver, device, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
assert driver.cuDeviceGet(ctypes.byref(device), 0) == 0
assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
print(active.value)
"""


@pytest.mark.gpu
def test_a_gpu_is_named_without_a_context_on_it() -> None:
    said = subprocess.run(
        [sys.executable, "-c", NAMED], check=True, capture_output=True, text=True, env=os.environ | as_this_one()
    )
    assert said.stdout.splitlines() == [torch.cuda.get_device_name(), "0"]


def test_a_node_that_cannot_run_it_says_why() -> None:
    config = resolve(EngineOptions(device="cpu", mode="eager"))
    elsewhere = replace(config, model=replace(config.model, path=Path("/nowhere")))
    frontend = FrontendOptions(skip_tokenizer_init=True, generation_config="none")
    start = Start(elsewhere, frontend, (), 1, progress=False, origin_s=0.0, spans=())
    actor = replicas.ReplicaActor("cpu", [])
    try:
        wrong = actor.start(encode(start), 0.0, replicas.own_environment("cpu") | {"python": "2.7"})
    finally:
        actor.close()
    assert len(wrong) == 2
    assert wrong[0].endswith("the driver's is 2.7")
    assert wrong[1] == "there is no folder /nowhere with the model"
    assert actor.receive() == b""


def test_what_a_cluster_has_to_give_is_shown() -> None:
    arguments = ["config", "--device", "cpu", "--distributed-executor", "ray", "--data-parallel-size", "2"]
    shown = " ".join(CliRunner().invoke(app, arguments).stdout.split())
    assert "2 replicas" in shown
    assert "replica 1 on 1 CPUs of a node of the Ray cluster" in shown


def test_a_cluster_that_nobody_named_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though one that runs here may be found: its address is in a file that any user can write."""
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    folders = []

    def init(*arguments: Any, **named: Any) -> None:
        asked.append((arguments, named))
        folders.extend(Path(path).stat() for name, path in named.items() if name == "_temp_dir")
        raise ConnectionError("no cluster")

    monkeypatch.setattr(ray, "init", init)
    config = resolve(EngineOptions(device="cpu", mode="eager"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        named = f"127.0.0.1:{server.getsockname()[1]}"
        for address in ("", named):
            monkeypatch.setenv("RAY_ADDRESS", address)
            with pytest.raises(ConnectionError, match="no cluster"):
                replicas.RayCluster(config)
    with pytest.raises(ValueError, match=f"^RAY_ADDRESS is '{named}', but no cluster answers there: .*refused"):
        replicas.RayCluster(config)  # Ray would try for minutes
    (own, its_own), (given, its_given) = asked
    (folder,) = folders
    assert own == ("local",)
    assert not Path(its_own["_temp_dir"]).exists()
    assert (folder.st_uid, folder.st_mode & 0o077) == (os.geteuid(), 0)
    assert (given, "_temp_dir" in its_given) == ((), False)


def test_without_the_package_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_engine.resolve.parallel.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'compiled-engine\[ray\]'"):
        resolve(EngineOptions(device="cpu", distributed_executor="ray"))
