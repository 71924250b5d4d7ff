"""A fork of a process with an engine: what would wait for ever there is refused, and the engine itself stays."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from small_engines import PROMPTS, SMALL

# Each program prints, as JSON, what its fork has found, and what the engine generates before and after the fork.
PROGRAM = """
import asyncio, json, os, select, signal, sys
import torch
from compiled_engine import LLM, AsyncLLM, SamplingParams

torch.set_num_threads({threads})
options, prompt = json.loads(sys.argv[1]), sys.argv[2]
greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

def in_fork(find):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = find()
            os.write(writing, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    if not select.select([reading], [], [], 20)[0]:
        os.kill(child, signal.SIGKILL)
        return ["it hangs"]
    found = os.read(reading, 65536)
    os.waitpid(child, 0)
    return json.loads(found)

def outcome(call):
    try:
        return call()
    except RuntimeError as error:
        return str(error)
"""
ENGINE_HERE = """
llm = LLM(**options)
def generated(llm):
    return llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids
before = generated(llm)
stream = llm.stream(prompt, greedy)
first = next(stream)

def find():
    global llm, stream
    found = [outcome(lambda: next(stream).outputs[0].token_ids), outcome(lambda: generated(llm)), llm.close()]
    stream = llm = None  # the last references
    return [*found, outcome(lambda: generated(LLM(**options)))] if {makes} else found

found = in_fork(find)
rest = [output.outputs[0].token_ids for output in stream][-1]
print(json.dumps([found, before, rest, generated(llm)]))
"""
ENGINE_ELSEWHERE = """
async def generated(engine):
    return [output.outputs[0].token_ids async for output in engine.generate(prompt, greedy)][-1]

loop = asyncio.new_event_loop()
llm = AsyncLLM(**options)
before = loop.run_until_complete(generated(llm))
stream = llm.generate(prompt, greedy)
loop.run_until_complete(anext(stream))

def find():
    global llm, stream
    def run(call):
        asyncio.set_event_loop(None)
        return outcome(lambda: asyncio.new_event_loop().run_until_complete(call))
    asyncio.events._set_running_loop(None)
    found = [run(anext(stream)), run(generated(llm)), run(llm.metrics()), run(llm.abort("x")), run(llm.drain())]
    found.append(run(llm.shutdown()))
    stream = llm = None
    return found

async def last(stream):
    return [output.outputs[0].token_ids async for output in stream][-1]

found = in_fork(find)
rest = loop.run_until_complete(last(stream))
print(json.dumps([found, before, rest, loop.run_until_complete(generated(llm))]))
loop.run_until_complete(llm.shutdown())
"""
ELSEWHERE = "belongs to the process that this one is a fork of; use multiprocessing's start method"


def run_program(program: str, options: dict[str, Any], **values: Any) -> tuple[list[Any], list[list[int]]]:
    """Return the findings of the fork, and the tokens before, across and after it."""
    text = program
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    arguments = [sys.executable, "-c", text, json.dumps(options), PROMPTS[0]]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, timeout=180, check=True)
    found, *tokens = json.loads(done.stdout.splitlines()[-1])
    return found, tokens


@pytest.mark.parametrize("threads", [1, 2])
def test_a_fork_may_have_an_engine_of_its_own_if_no_threads_were_used(threads: int) -> None:
    found, tokens = run_program(PROGRAM + ENGINE_HERE, SMALL, threads=threads, makes=True)
    assert [text.startswith(f"this LLM {ELSEWHERE}") for text in found[:2]] == [True, True]
    assert found[2] is None
    assert tokens == [tokens[0]] * 3
    if threads == 1:
        assert found[3] == tokens[0]
    else:
        assert found[3].startswith("an engine cannot run in a fork of a process that has run one; use multiprocessing")


# Cores of replicas are processes of the same kind as that of AsyncLLM.
REPLICAS = pytest.mark.shown_by("engine/test_forks.py::test_an_async_engine_is_refused_in_a_fork_and_stays")


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", pytest.param("data_parallel_size", marks=REPLICAS)])
def test_a_fork_that_drops_an_engine_does_not_end_its_processes(parallel: str) -> None:
    found, tokens = run_program(PROGRAM + ENGINE_HERE, SMALL | {parallel: 2}, threads=2, makes=False)
    assert [text.startswith(f"this LLM {ELSEWHERE}") for text in found[:2]] == [True, True]
    assert tokens == [tokens[0]] * 3


def test_an_async_engine_is_refused_in_a_fork_and_stays() -> None:
    found, tokens = run_program(PROGRAM + ENGINE_ELSEWHERE, SMALL, threads=2)
    assert [text.startswith(f"this AsyncLLM {ELSEWHERE}") for text in found[:5]] == [True] * 5
    assert found[5] is None
    assert tokens == [tokens[0]] * 3
