"""Trials of grammars: a grammar that compiles without end costs its request alone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing

import psutil
import pytest

from compiled_engine.features.structured.grammars.trials import GrammarTrials
from compiled_engine.process.smallest_first import TakesLong

TOO_MUCH = "it takes more than 0.4 s of processor time or 200 MiB of memory to compile"


def lark(rules: str) -> str:
    return f"%llguidance {{}}\n{rules}"


def good(text: str) -> str:
    return lark(f'start: "a" | "{text}"')


def endless(number: int) -> str:
    return lark(f'start: n\nn: %json {{"type": "integer", "multipleOf": {99999989 - number}}}')


def processes() -> set[psutil.Process]:
    """Return the child processes of this one."""
    return set(psutil.Process().children())


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    trials = GrammarTrials(quick_s=0.1, longest_s=0.4, most_memory=200 << 20)
    yield trials
    trials.close()


def test_what_compiles_without_end_is_stopped_and_holds_up_nobody(trials: GrammarTrials) -> None:
    before = psutil.Process().memory_info().rss
    assert trials.error(good("b")) == ""
    with ThreadPoolExecutor(4) as threads:
        running = {threads.submit(trials.error, endless(number)): number for number in range(3)}
        running[threads.submit(trials.error, good("c"))] = -1
        ended = [(running[each], each.result()) for each in as_completed(running)]
    assert ended[0] == (-1, "")
    assert [error for _, error in ended[1:]] == [TOO_MUCH] * 3
    assert psutil.Process().memory_info().rss - before < 50 << 20


def test_memory_has_a_limit_of_its_own() -> None:
    """The limit of time is far away, so memory has run out."""
    with closing(GrammarTrials(longest_s=1000.0, most_memory=30 << 20)) as trials:
        assert "30 MiB of memory" in trials.error(endless(0))


def test_what_takes_long_makes_way_first(trials: GrammarTrials) -> None:
    with pytest.raises(TakesLong):
        trials.error(endless(0), hurried=True)
    assert trials.error(endless(0), hurried=True) == TOO_MUCH
    assert trials.error(good("b"), hurried=True) == ""


def test_errors_are_found_once(trials: GrammarTrials) -> None:
    before = processes()
    error = trials.error(lark("start: nothing"))
    assert "nothing" in error
    trials.close()
    assert trials.error(lark("start: nothing")) == error
    assert processes() == before


def test_the_process_is_started_again(trials: GrammarTrials) -> None:
    before = processes()
    assert trials.error(good("b")) == ""
    (process,) = processes() - before
    process.kill()
    process.wait()
    assert trials.error(good("c")) == ""
    trials.close()
    assert processes() == before
    assert trials.error(good("d")) == ""


@pytest.mark.parametrize("rule", ["<|nobody|>", "<think>", "<[151657]>", "<[3-9]>", "<[^7]>", '"x"', "<[*]>"])
def test_tokens_of_the_model_are_taken_to_exist(trials: GrammarTrials, rule: str) -> None:
    assert trials.error(lark(f"start: {rule}")) == ""
    assert "nothing" in trials.error(lark(f"start: ({rule}) nothing"))


def test_a_fork_has_a_process_of_its_own() -> None:
    program = f"""
import os
from compiled_engine.features.structured.grammars.trials import GrammarTrials
trials = GrammarTrials()
assert trials.error({good("b")!r}) == ""
if not (fork := os.fork()):
    os._exit(trials.error({good("c")!r}) != "")
assert os.waitpid(fork, 0)[1] == 0
assert trials.error({good("d")!r}) == ""
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_process_ends_with_its_caller() -> None:
    program = f"""
import psutil
from compiled_engine.features.structured.grammars.trials import GrammarTrials
trials = GrammarTrials()
trials.error({good("b")!r})
print(psutil.Process().children()[0].pid)
"""
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    gone = threading.Event()
    for _ in range(200):
        if not psutil.pid_exists(int(said.stdout)):
            gone.set()
            break
        time.sleep(0.05)
    assert gone.is_set()
