"""The launch of workers: what they inherit, and what is left of them when the start fails or is ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from left_over import SOON_S, has_ended, wait_until, workers
from small_engines import SMALL

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.llm import LLM
from compiled_engine.options import EngineOptions
from compiled_engine.process.init_cuda import core_has_device
from compiled_engine.process.timeline import Timeline
from compiled_engine.processes.monitor import WorkerError
from compiled_engine.processes.multiprocess_executor import MultiprocessExecutor
from compiled_engine.processes.ranks import LaunchedWorkers, visible_gpus
from compiled_engine.resolve.engine import resolve

# Of cases that differ in a fault `make test-all` runs every one.
pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.product(one_in=3)]
ENGINE: dict[str, Any] = SMALL | {"dtype": "float32", "tensor_parallel_size": 2}
VISIBLE = "CUDA_VISIBLE_DEVICES"
HERE = f"""
from compiled_engine.llm import LLM
LLM(**{ENGINE!r}).close()
"""
ELSEWHERE = f"""
from compiled_engine.processes.core_child import CoreChild
core = CoreChild.of({ENGINE!r})
from compiled_engine.async_llm import AsyncLLM
from compiled_engine.sampling.params import SamplingParams
import asyncio
async def main():
    engine = AsyncLLM(**{ENGINE!r}, core=core)
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    (*_, last) = [output async for output in engine.generate("import os", params)]
    await engine.shutdown()
    assert len(last.outputs[0].token_ids) == 5
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 3},
        {"data_parallel_size": 2},
        {"distributed_executor": "multiprocess"},
        {"distributed_executor_backend": "mp"},
        {"distributed_executor": "ray"},
        {"tensor_parallel_size": "2"},
        {"tensor_parallel_size": True},
        {"tensor_parallel_size": [2], "distributed_executor": [2]},
    ],
)
def test_a_core_has_no_device_where_other_processes_may_have_it(options: dict[str, Any]) -> None:
    assert core_has_device({})
    assert not core_has_device(options)


@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, ["0", "1"]), ("4,5,6", ["4", "5"]), ("4", ["4"]), ("4,-1,5", ["4"]), ("", []), ("-1", [])],
)
def test_no_more_than_the_visible_gpus(visible: str | None, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, visible)
    assert visible_gpus(2) == found


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"model": "/nowhere"}, ValueError, "model must be a folder .*, got '/nowhere'"),
        ({"mode": "quick"}, ValueError, "mode is 'quick'"),
        (
            {"tensor_parallel_size": 3},
            ValueError,
            "tensor_parallel_size is 3, which does not divide the model's 640 rows",
        ),
        ({"tensor_parallel_size": "2"}, TypeError, "tensor_parallel_size is '2'"),
        ({"tensor_parallel_sizes": 2}, TypeError, "LLM has no option 'tensor_parallel_sizes'"),
    ],
)
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_options_that_are_wrong_leave_nothing(
    kind: type[LLM] | type[AsyncLLM], wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**ENGINE | wrong)
    if kind is LLM:
        assert not workers()


def test_they_import_from_the_folder_of_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For prompts and notebooks "" in sys.path is the process's current folder."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_a_prompt.py").write_text("from faulty_rank import FaultyRank\n")
    LLM(**ENGINE, logits_processors=["beside_a_prompt:FaultyRank"]).close()


IN_LOOP = f"""
import asyncio
from compiled_engine.async_llm import AsyncLLM
async def main():
    await AsyncLLM(**{SMALL!r}).shutdown()
asyncio.run(main())
"""


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    ("program", "closed"),
    [
        ("import torch\n" + HERE, "<&- >&- 2>&-"),
        pytest.param(ELSEWHERE, "2>&-", marks=pytest.mark.product(one_in=1)),  # none else has such an engine generate
        (IN_LOOP, "2>&-"),
    ],
)
def test_a_daemon_may_have_closed_its_standard_streams(program: str, closed: str) -> None:
    """Descriptors of others, such as those of the caller's event loop, then have their numbers."""
    subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program], check=True)


def test_one_that_is_killed_while_it_waits_is_named() -> None:
    config = resolve(EngineOptions(**{name: value for name, value in ENGINE.items() if name != "progress"}))
    launched = LaunchedWorkers(2, "cpu")
    launched.children[1].kill()
    assert launched.children[1].wait(SOON_S)
    with pytest.raises(WorkerError, match="the worker of rank 1 of 2 was killed by SIGKILL"):
        MultiprocessExecutor(config, launched, Timeline())
    assert not workers()


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("program", [HERE, ELSEWHERE])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_they_end_with_who_launched_them(program: str, number: signal.Signals) -> None:
    """At that time they import, or wait."""
    # A job in the background of a shell is born deaf to Ctrl-C.
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    with subprocess.Popen([sys.executable, "-c", hears + program], stderr=subprocess.DEVNULL) as driver:
        process = psutil.Process(driver.pid)
        wait_until(lambda: len(workers(process)) == 2)
        ranks = workers(process)
        driver.send_signal(number)
        assert driver.wait() != 0
    wait_until(lambda: all(map(has_ended, ranks)), SOON_S)
