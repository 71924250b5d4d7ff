"""Grammars that compile without end are stopped, cost this process no memory, and hold up nobody."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing

import psutil
import pytest
from hostile_grammars import ENDLESS, ENDLESS_WITH_TOKENS
from left_over import running, wait_until

from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.grammars.checks import GrammarChecks, in_turn
from compiled_engine.grammars.compiler import GrammarCompiler
from compiled_engine.grammars.limits import QUICK_GRAMMAR, CompileTime, TakesTooLong
from compiled_engine.grammars.text import grammar_text
from compiled_engine.messages import GrammarVocabulary
from compiled_engine.process.smallest_first import SmallestFirst
from compiled_engine.sampling.structured_outputs import StructuredOutputs

PROGRAM = "check_program"
MOST_GROWTH = 100 << 20
LARK = 'start: "a" | "b"'


@pytest.fixture
def checks() -> Iterator[GrammarChecks]:
    with closing(GrammarChecks()) as checks:
        yield checks


@pytest.fixture
def steady_memory() -> Iterator[None]:
    before = psutil.Process().memory_info().rss
    yield
    assert psutil.Process().memory_info().rss - before < MOST_GROWTH


@pytest.mark.usefixtures("steady_memory")
def test_two_that_compile_without_end_hold_up_no_other() -> None:
    """They would hold both threads to the end of their time; the other is answered before either."""
    threads = SmallestFirst(QUICK_GRAMMAR, "test")

    def checked(form: StructuredOutputs) -> Future[str]:
        return threads.submit(100, in_turn(lambda within: grammar_text(form, within)))

    endless = [checked(StructuredOutputs(**form)) for form in list(ENDLESS.values())[:2]]
    short = [checked(StructuredOutputs(choice=["yes", f"no {i}"])) for i in range(5)]
    wait(short, 60)
    assert all("yes" in each.result() for each in short)
    assert not any(each.done() for each in endless)
    for each in endless:
        with pytest.raises(TakesTooLong, match=r"the grammar takes more than 10 s or 256 MiB to compile"):
            each.result(60)
    threads.shutdown()


@pytest.mark.usefixtures("steady_memory")
def test_the_core_is_not_held_up_either(bundled_tokenizer: Tokenizer) -> None:
    """With special tokens only the core can check them: they come to it unchecked."""
    vocabulary = GrammarVocabulary(bundled_tokenizer.to_json(), 4096, frozenset({0}))
    with closing(GrammarCompiler(vocabulary)) as compiler:
        endless = [compiler.compile(grammar_text(StructuredOutputs(**form))) for form in ENDLESS_WITH_TOKENS.values()]
        short = compiler.compile(grammar_text(StructuredOutputs(grammar=f"{LARK} | <|endoftext|>")))
        assert compiler.constraint(short) is not None
        assert not any(each.done() for each in endless)
        for each in endless:
            with pytest.raises(TakesTooLong):
                each.result(60)
        assert compiler.metrics()["grammar_failures"] == len(endless)


@pytest.mark.parametrize("name", ENDLESS)
def test_the_time_is_kept_from_outside(name: str) -> None:
    begun = time.monotonic()
    with pytest.raises(TakesTooLong):
        grammar_text(StructuredOutputs(**ENDLESS[name]), CompileTime(0.3))
    assert time.monotonic() - begun >= 0.3
    wait_until(lambda: all(not process.children() for process in running(PROGRAM)))


def test_no_time_is_left() -> None:
    with pytest.raises(TakesTooLong):
        grammar_text(StructuredOutputs(regex="no time is left"), CompileTime(0))


def test_many_at_once_get_their_own_answers(checks: GrammarChecks) -> None:
    def error(index: int) -> str:
        return checks.error(f'start: "a" missing_{index}' if index % 2 else f"{LARK}\n// {index}", CompileTime())

    with ThreadPoolExecutor(8) as threads:
        errors = list(threads.map(error, range(40)))
    for index, each in enumerate(errors):
        assert (f"missing_{index}" in each) if index % 2 else each == ""


def test_a_process_that_was_killed_is_started_again(checks: GrammarChecks) -> None:
    assert checks.error(LARK, CompileTime()) == ""
    assert checks._process is not None
    os.kill(checks._process.pid, signal.SIGKILL)
    checks._process.wait()
    assert checks.error(LARK, CompileTime()) == ""


def test_a_process_that_cannot_read_its_vocabulary_is_no_fault_of_the_grammar() -> None:
    with (
        closing(GrammarChecks(GrammarVocabulary("{}", 9, frozenset({0})))) as checks,
        pytest.raises(OSError, match="the process that checks grammars has ended"),
    ):
        checks.error(LARK, CompileTime())


def test_it_ends_when_it_is_closed(nothing_left: object) -> None:
    with closing(GrammarChecks()) as checks:
        assert checks.error(LARK, CompileTime()) == ""
