"""Engines of two replicas on the CPU give the tokens of one, also of requests whose replica is killed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from async_engines import ENGINE, collect, run
from left_over import running, wait_until
from serve_process import SMALL, Served, served
from small_engines import PROMPTS
from token_masks import OneOf

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.processes.core_client import EngineDeadError
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.structured_outputs import StructuredOutputs

TWO = ENGINE | {"data_parallel_size": 2}
COMMON = "import os\nimport sys\nimport json\n\n\ndef read(path):\n    return "
TEXTS = [COMMON + "json", *PROMPTS, COMMON + "file", "x = 1\n"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=12, top_p=0.9),
    SamplingParams(temperature=1, max_tokens=15, min_tokens=10),  # its seed is the engine's
    SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1, stop=["e"]),
    SamplingParams(temperature=0.7, seed=1, max_tokens=16, presence_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(temperature=1, seed=4, max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-c]{9}")),
]
SLOW: dict[str, Any] = {"ignore_eos": True, "extra_args": {"fault": "slow"}}
# Enough for a replica to be killed while they run.
LONG = [
    SamplingParams(temperature=0, max_tokens=30, logprobs=1, **SLOW),
    SamplingParams(temperature=0.9, seed=3, max_tokens=35, n=2, **SLOW),
    SamplingParams(temperature=0.8, seed=5, max_tokens=30, presence_penalty=1.0, min_tokens=20, **SLOW),
    SamplingParams(temperature=0.7, seed=6, max_tokens=35, frequency_penalty=0.4, prompt_logprobs=1, **SLOW),
    SamplingParams(
        temperature=1,
        seed=7,
        max_tokens=31,
        structured_outputs=StructuredOutputs(regex="([a-c]{3} ){9}"),
        extra_args=SLOW["extra_args"],
    ),
]

pytestmark = pytest.mark.usefixtures("one_thread")


def cores_below(process: psutil.Process) -> list[psutil.Process]:
    """Return the processes of engine cores, replicas last."""
    return running("core_main", process)


@pytest.fixture
def cores() -> Callable[[], list[psutil.Process]]:
    """Return the cores started from now on, since servers of other tests may run."""
    before = {process.pid for process in cores_below(psutil.Process())}
    return lambda: [process for process in cores_below(psutil.Process()) if process.pid not in before]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    """Return all log-probabilities, in order."""
    rows = [
        row
        for output in outputs
        for part in (output.prompt_logprobs, *(completion.logprobs for completion in output.outputs))
        for row in part or ()
        if row is not None
    ]
    return [entry.logprob for row in rows for entry in row.values()]


def same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    assert tokens(ours) == tokens(theirs)
    assert [[c.text for c in o.outputs] for o in ours] == [[c.text for c in o.outputs] for o in theirs]
    assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-3)


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(**ENGINE) as llm:
        yield llm


def test_the_tokens_are_those_of_one(one: LLM, cores: Callable[[], list[psutil.Process]]) -> None:
    """Runs twice: the second time each prompt goes to the same replica, and finds its prefix cached."""
    with LLM(**TWO) as two:
        for _ in range(2):
            same(two.generate(TEXTS, PARAMS, use_tqdm=False), one.generate(TEXTS, PARAMS, use_tqdm=False))
        metrics, alone = two.metrics(), one.metrics()
        first, second = metrics["replicas"]
        assert min(first["generated_tokens"], second["generated_tokens"]) > 0.3 * metrics["generated_tokens"]
        assert metrics["finished"] == alone["finished"]
        assert metrics["prefix_hits"] >= 0.5 * alone["prefix_hits"]
        assert metrics["blocks_free"] == metrics["blocks_total"] == 2 * alone["blocks_total"]
        assert two.reset_prefix_cache()
        with pytest.raises(ValueError, match="token_mask must be None where data_parallel_size is above 1"):
            two.generate("a", SamplingParams(token_mask=OneOf([[5]], 100)))
        with pytest.raises(ValueError, match="data_parallel_size is 2; allowed: 1"):
            _ = two.core
        stream = two.stream(TEXTS[0], PARAMS[0])
        assert next(stream).outputs[0].token_ids
        stream.close()
        assert two.metrics()["running"] == 0
        kill_a_replica(two, one, cores)
    assert not cores()


def kill_a_replica(two: LLM, one: LLM, cores: Callable[[], list[psutil.Process]]) -> None:
    """Kill a replica; its requests continue on the other one, which then serves alone."""
    wanted = one.generate(TEXTS[: len(LONG)], LONG, use_tqdm=False)

    def kill() -> None:
        time.sleep(0.4)
        cores()[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    same(two.generate(TEXTS[: len(LONG)], LONG, use_tqdm=False), wanted)
    killer.join()
    wait_until(lambda: [each["lives"] for each in two.metrics()["replicas"]] == [False, True])
    same(two.generate(PROMPTS, PARAMS[0], use_tqdm=False), one.generate(PROMPTS, PARAMS[0], use_tqdm=False))


def test_a_replica_is_killed_under_load(one: LLM, cores: Callable[[], list[psutil.Process]]) -> None:
    """Its requests go on in the other one, with their tokens. When that one dies too, all hear why."""
    wanted = one.generate(TEXTS[: len(LONG)], LONG, use_tqdm=False)

    async def main() -> None:
        engine = await AsyncLLM.start(**TWO)
        streams = [engine.generate(text, params) for text, params in zip(TEXTS, LONG, strict=False)]
        running = [asyncio.create_task(collect(stream)) for stream in streams]
        while (await engine.metrics())["generated_tokens"] < 30:
            await asyncio.sleep(0.02)
        _, *replicas = cores()
        assert len(replicas) == 2
        replicas[0].kill()
        same([outputs[-1] for outputs in await asyncio.gather(*running)], wanted)
        await engine.check_health()
        metrics = await engine.metrics()
        assert sorted(each["lives"] for each in metrics["replicas"]) == [False, True]
        assert metrics["requests_rerun"] > 0
        assert metrics["running"] == metrics["waiting"] == 0
        waiting = asyncio.create_task(collect(engine.generate(TEXTS[0], LONG[0])))
        await asyncio.sleep(0.1)
        replicas[1].kill()
        with pytest.raises(EngineDeadError, match=r"replica 0 of 2 has ended: .*killed by SIGKILL.*replica 1 of 2"):
            await waiting
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        await engine.shutdown()

    run(main())
    assert not cores()


def test_a_start_that_fails_says_why_and_leaves_nothing(cores: Callable[[], list[psutil.Process]]) -> None:
    with pytest.raises(ValueError, match="FailsToStart") as caught:
        LLM(**TWO | {"logits_processors": ["faulty_processor:FailsToStart"]})
    assert any(note.startswith("in replica ") for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="cannot be given to another process"):
        LLM(**TWO | {"logits_processors": [lambda **_: None]})
    assert not cores()


def figure(server: Served, name: str) -> list[float]:
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"compiled_engine:{name}")]


def test_a_server_stays_healthy_while_a_replica_lives() -> None:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with served(*arguments, "--data-parallel-size=2", "--api-server-count=2", "--debug-inspect") as server:
        assert server.stream(20).text.endswith("data: [DONE]\n\n")
        assert figure(server, "replica_up") == [1.0, 1.0]
        replicas = cores_below(psutil.Process(server.process.pid))[1:]
        answers: list[httpx.Response] = []
        readers = [threading.Thread(target=lambda: answers.append(server.stream())) for _ in range(6)]
        for reader in readers:
            reader.start()
        while sum(figure(server, "replica_requests_running")) < 6:
            assert server.process.poll() is None
            time.sleep(0.02)
        replicas[1].kill()
        for reader in readers:
            reader.join(60)
        assert [answer.text.endswith("data: [DONE]\n\n") for answer in answers] == [True] * 6
        assert sorted(figure(server, "replica_up")) == [0.0, 1.0]
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert httpx.get(f"{server.url}/debug/inspect?format=json", timeout=30).status_code == 200
        replicas[0].kill()
        with suppress(httpx.TransportError):  # it may be gone by now
            assert httpx.get(f"{server.url}/health", timeout=60).status_code in (200, 503)
        assert server.process.wait(60) == 1
