"""The fate of requests if the engine core, the process that started it, or the event loop ends before them."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest
from faulty_processor import FAILS_TO_START, NAME, SLOW_TO_START
from left_over import has_ended
from small_engines import PROMPTS, SMALL

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.processes.core_child import CoreChild
from compiled_engine.processes.core_client import EngineDeadError
from compiled_engine.sampling.params import SamplingParams

ENGINE: dict[str, Any] = SMALL | {"dtype": "float32", "logits_processors": [NAME]}
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def with_fault(fault: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, extra_args={"fault": fault})


async def collect(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def final(engine: AsyncLLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    (output,) = await collect(engine.generate(prompt, params, output="final"))
    return output


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


Children = Callable[[], list[psutil.Process]]


@pytest.fixture
def children() -> Children:
    """The processes that the test has started: others may run for other tests."""
    before = psutil.Process().children()
    return lambda: [process for process in psutil.Process().children() if process not in before]


def core_of(process: psutil.Process) -> psutil.Process:
    (core,) = process.children()
    return core


async def check_death(engine: AsyncLLM, reason: str, *, fault: str = "slow", kill: Callable[[], Any] = bool) -> None:
    """All that waits for the engine ends with the reason, in whatever stage it is; so does all that comes later."""
    async with asyncio.timeout(60), aclosing(engine.generate(PROMPTS[0], with_fault(fault))) as decoding:
        await anext(decoding)
        waiting = [
            asyncio.create_task(collect(stream))
            for stream in (
                *(engine.generate(prompt, with_fault("slow"), output="final") for prompt in PROMPTS * 5),
                engine.generate([5] * 60, SamplingParams(n=2, max_tokens=3)),
            )
        ]
        watching = asyncio.create_task(engine.wait_dead())
        await asyncio.sleep(0.1)
        await engine.check_health()
        assert engine.errored is None
        kill()
        ends = await asyncio.gather(*waiting, collect(decoding), return_exceptions=True)
        assert reason in await watching
        assert {type(end) for end in ends} == {EngineDeadError}
        assert {reason in str(end) for end in ends} == {True}
    assert engine.errored == str(ends[0])
    assert engine.num_unfinished == 0
    for call in (engine.metrics(), engine.check_health(), final(engine, "a", SHORT), engine.reset_prefix_cache()):
        with pytest.raises(EngineDeadError) as caught:
            await call
        assert str(caught.value) == engine.errored
    assert await engine.wait_dead() == engine.errored
    await engine.shutdown()
    await engine.shutdown()


def test_a_core_that_is_killed(monkeypatch: pytest.MonkeyPatch, children: Children) -> None:
    with tempfile.TemporaryDirectory() as folder:  # whose path is short enough for a socket
        monkeypatch.setattr("tempfile.tempdir", folder)
        check_killed_core(Path(folder), children)


def check_killed_core(tmp_path: Path, children: Children) -> None:

    async def main() -> None:
        engine = await AsyncLLM.start(**ENGINE, core=CoreChild(ENGINE["device"]))
        (folder,) = tmp_path.iterdir()
        (socket,) = folder.iterdir()
        assert (str(socket), folder.stat().st_mode & 0o777) == (engine.address, 0o700)
        assert socket.stat().st_mode & 0o777 == 0o600
        (core,) = children()
        gc.collect()
        descriptors = psutil.Process().num_fds()
        core.terminate()  # which is for the process that started it
        assert len((await final(engine, "a", SHORT)).outputs[0].token_ids) == 5
        await check_death(engine, "its process was killed by SIGKILL", kill=core.kill)
        assert not list(tmp_path.iterdir())
        assert psutil.Process().num_fds() < descriptors

    asyncio.run(main())
    assert not children()


def test_a_step_that_fails() -> None:
    engine = AsyncLLM(**ENGINE, core="in_process")
    asyncio.run(check_death(engine, "apply failed: KeyError: 'injected'", fault="raise"))


def test_a_start_that_fails_says_why(children: Children) -> None:
    with pytest.raises(ValueError, match="FailsToStart") as of_llm:
        LLM(**SMALL, logits_processors=[FAILS_TO_START])
    with pytest.raises(ValueError, match="FailsToStart") as caught:
        AsyncLLM(**SMALL, logits_processors=[FAILS_TO_START])
    assert str(caught.value) == str(of_llm.value)
    assert "in the engine core:" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="no_such_model"):
        AsyncLLM("/no_such_model", progress=False)
    with pytest.raises(ValueError, match=r"logits_processors\[0\] is .* cannot be given to another process"):
        AsyncLLM(**SMALL, logits_processors=[lambda **_: None])
    with pytest.raises(ValueError, match="core is 'thread'; allowed: process, in_process, or a CoreChild"):
        AsyncLLM(**SMALL, core="thread")  # type: ignore[arg-type]
    assert not children()


CALLER = """
import asyncio
from compiled_engine.async_llm import AsyncLLM
from compiled_engine.sampling.params import SamplingParams

engine = AsyncLLM(**{options})

async def one(number):
    async for _ in engine.generate([5 + number], SamplingParams(max_tokens=60, ignore_eos=True)):
        pass

async def main():
    print(engine.address, flush=True)
    while True:
        await asyncio.gather(*map(one, range(50)))

asyncio.run(main())
"""


def start_caller(folder: Path, options: dict[str, Any]) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", CALLER.format(options=options)],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path},
    )


def test_a_core_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """The process is killed with requests under way."""
    with start_caller(tmp_path, ENGINE) as caller:
        assert caller.stdout is not None
        address = Path(caller.stdout.readline().strip())
        core = core_of(psutil.Process(caller.pid))
        assert address.is_socket()
        caller.kill()
    wait_until(lambda: has_ended(core))
    assert not list(tmp_path.iterdir())


def test_a_core_that_starts_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    with start_caller(tmp_path, ENGINE | {"logits_processors": [SLOW_TO_START]}) as caller:
        file = tmp_path / "starting"
        wait_until(lambda: file.exists() and file.read_text() != "")
        core = psutil.Process(int(file.read_text()))
        caller.kill()
    wait_until(lambda: has_ended(core))
    assert list(tmp_path.iterdir()) == [file]


def test_an_engine_that_nobody_refers_to_ends(children: Children) -> None:
    engine = AsyncLLM(**ENGINE)
    (core,) = children()
    address = Path(engine.address or "")
    asyncio.run(final(engine, "a", SHORT))
    del engine
    assert has_ended(core)
    assert not address.exists()


def test_an_event_loop_that_is_closed_takes_its_requests_with_it() -> None:
    engine = AsyncLLM(**ENGINE, core="in_process")
    loop = asyncio.new_event_loop()
    left = engine.generate("a", with_fault("slow"))
    loop.run_until_complete(anext(left))
    loop.create_task(collect(engine.generate("b", with_fault("slow"))))  # noqa: RUF006 (left to the loop's end)
    loop.run_until_complete(asyncio.sleep(0))
    assert engine.num_unfinished == 2
    loop.close()

    async def main() -> None:
        assert len((await final(engine, "c", SHORT)).outputs[0].token_ids) == 5
        metrics = await engine.metrics()
        assert (metrics["running"], metrics["waiting"], metrics["aborted"]) == (0, 0, 2)
        with pytest.raises(RuntimeError, match="on another event loop"):
            await anext(left)
        await engine.shutdown()

    asyncio.run(main())


def test_one_event_loop_at_a_time() -> None:
    engine = AsyncLLM(**ENGINE, core="in_process")

    async def main() -> None:
        async with aclosing(engine.generate("a", with_fault("slow"))) as stream:
            await anext(stream)
            with pytest.raises(RuntimeError, match="in use on another event loop; allowed: one at a time"):
                await asyncio.to_thread(asyncio.run, engine.metrics())
            assert len(await collect(stream)) > 1
        await engine.shutdown()

    asyncio.run(main())


def test_draining_lets_requests_end_within_bounds() -> None:
    engine = AsyncLLM(**ENGINE, core="in_process")

    async def main() -> None:
        ends = asyncio.create_task(final(engine, "a", SHORT))
        await asyncio.sleep(0)
        assert await engine.drain() == 0
        assert (await ends).finished
        with pytest.raises(RuntimeError, match="draining"):
            await final(engine, "a", SHORT)
        await engine.shutdown()

    async def late() -> None:
        engine = AsyncLLM(**ENGINE, core="in_process")
        tasks = [asyncio.create_task(final(engine, "a", with_fault("slow"))) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert await engine.drain(0.1) == 3
        assert {output.outputs[0].finish_reason for output in await asyncio.gather(*tasks)} == {"abort"}
        await engine.shutdown()

    asyncio.run(main())
    asyncio.run(late())


def test_prompts_that_do_not_all_fit_into_the_cache_have_their_tokens() -> None:
    """Blocks for two of twelve: the others wait, or are preempted."""
    options = ENGINE | {"num_blocks": 8, "max_num_seqs": 4}
    prompts = [[5 + number] * (10 + 3 * number) for number in range(12)]
    params = SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True)

    async def main() -> list[RequestOutput]:
        engine = AsyncLLM(**options, core="in_process")
        outputs = await asyncio.gather(*(final(engine, prompt, params) for prompt in prompts))
        metrics = await engine.metrics()
        assert metrics["preemptions"] > 0
        assert metrics["blocks_free"] == 8
        await engine.shutdown()
        return outputs

    outputs = asyncio.run(main())
    with LLM(**ENGINE) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
        assert llm.metrics()["preemptions"] == 0
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]


def test_another_process_may_join(children: Children) -> None:
    """Each has its own outputs; one that leaves takes its requests with it, and the one that started it the core."""

    async def main() -> None:
        engine = AsyncLLM(**ENGINE)
        (core,) = children()
        alone = await final(engine, PROMPTS[0], SHORT)
        assert engine.address is not None
        first, second = [await AsyncLLM.join(engine.address) for _ in range(2)]
        assert (first.config, first.limits) == (engine.config, engine.limits)
        found = await asyncio.gather(*(final(each, PROMPTS[0], SHORT) for each in (engine, first, second) * 3))
        assert [output.outputs for output in found] == [alone.outputs] * 9
        async with aclosing(engine.generate(PROMPTS[0], with_fault("slow"), "same id")) as stream:
            await anext(stream)
            leaving = asyncio.create_task(final(first, PROMPTS[0], with_fault("slow")))
            staying = asyncio.create_task(second.wait_dead())
            await asyncio.sleep(0.1)
            assert (await engine.metrics())["api_processes"] == 3
            await first.shutdown()
            with pytest.raises(EngineDeadError, match="the engine was shut down"):
                await leaving
            assert len((await collect(stream))[-1].outputs[0].token_ids) == 50
        metrics = await engine.metrics()
        assert (metrics["running"], metrics["aborted"], metrics["api_processes"]) == (0, 1, 2)
        await engine.shutdown()
        assert has_ended(core)
        assert "the process that started it has" in await staying
        with pytest.raises(EngineDeadError):
            await final(second, PROMPTS[0], SHORT)
        with pytest.raises(OSError, match="No such file"):
            await AsyncLLM.join(engine.address)

    asyncio.run(main())
