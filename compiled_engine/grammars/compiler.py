"""Compiles the grammars of requests in parallel with the steps of the engine, and keeps what it has compiled."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from compiled_engine.grammars.checks import GrammarChecks, in_turn, tokenizer_arguments
from compiled_engine.grammars.constraint import GrammarConstraint
from compiled_engine.grammars.limits import (
    KEPT_GRAMMARS,
    QUICK_GRAMMAR,
    CompileTime,
    TakesTooLong,
    failure_text,
    on_large_stack,
    parser_limits,
)
from compiled_engine.grammars.string_masks import StringMasks, StringTokens, probe_for
from compiled_engine.grammars.text import WHITESPACE, mask_threads, needs_vocabulary
from compiled_engine.messages import GrammarVocabulary
from compiled_engine.process.smallest_first import SmallestFirst

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


class _Vocabulary(NamedTuple):
    tokens: StringTokens
    executor: LLExecutor


class CompiledGrammar(NamedTuple):
    """matcher: at its beginning, to be copied. probe: see plain_strings.py."""

    matcher: LLMatcher
    probe: str | None


class GrammarCompiler:
    """Threads in the core's process: a matcher cannot be handed from one process to another, and the library works
    without the GIL, so the steps go on. It cannot be interrupted: each grammar has been compiled before in a process
    that can be ended.

    vocabulary: read once, by a thread, when the object is made.
    """

    def __init__(self, vocabulary: GrammarVocabulary, *, kept: int = KEPT_GRAMMARS) -> None:
        self._threads = SmallestFirst(QUICK_GRAMMAR, "grammar")
        self._vocabulary: Future[_Vocabulary] = self._threads.submit(0, lambda: _load(vocabulary))
        self._checks = GrammarChecks(vocabulary)
        self._kept = kept
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()  # the last used last
        self._lock = threading.Lock()
        self._hits = 0
        self._compiles = 0
        self._failures = 0
        self._seconds = 0.0

    def compile(self, grammar: str) -> Future[CompiledGrammar]:
        """The future's exception is a ValueError if it cannot be compiled."""
        if (found := self._compiled.get(grammar)) is not None and not _was_too_slow(found):
            self._compiled.move_to_end(grammar)
            self._hits += 1
            return found
        work = in_turn(lambda within: self._compile(grammar, within))
        compiled = self._compiled[grammar] = self._threads.submit(len(grammar), work)
        compiled.add_done_callback(self._count_failure)
        if len(self._compiled) > self._kept:
            self._compiled.popitem(last=False)
        return compiled

    def cancel(self, grammar: str, compiled: Future[CompiledGrammar]) -> None:
        """Drop a request: its grammar is not compiled unless that has begun."""
        if compiled.cancel() and self._compiled.get(grammar) is compiled:
            del self._compiled[grammar]

    def constraint(self, compiled: Future[CompiledGrammar]) -> GrammarConstraint:
        """Make a request's matcher from the compiled grammar. Raises ValueError if compiling failed."""
        matcher, probe = compiled.result()
        vocabulary = self._vocabulary.result()
        strings = StringMasks.of(vocabulary.tokens, probe)
        return GrammarConstraint(matcher.deep_copy(), vocabulary.executor, strings)

    def _compile(self, grammar: str, within: CompileTime) -> CompiledGrammar:
        from llguidance import LLMatcher

        tokenizer = self._vocabulary.result().tokens.tokenizer
        if needs_vocabulary(grammar):  # any other was checked where the request was made
            self._check(grammar, within)
        start = time.perf_counter()
        matcher = on_large_stack(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits()))
        with self._lock:
            self._compiles += 1
            self._seconds += time.perf_counter() - start
        if matcher.is_error():
            raise ValueError(failure_text(matcher))
        return CompiledGrammar(matcher, probe_for(grammar, WHITESPACE))

    def _count_failure(self, compiled: Future[CompiledGrammar]) -> None:
        if not compiled.cancelled() and compiled.exception() is not None:
            with self._lock:
                self._failures += 1

    def _check(self, grammar: str, within: CompileTime) -> None:
        if error := self._checks.error(grammar, within):
            raise ValueError(f"structured_outputs: {error}")

    def metrics(self) -> dict[str, int | float]:
        """Return counts since the start: grammar_compiles, failures, seconds of threads, and hits in the cache."""
        return {
            "grammar_compiles": self._compiles,
            "grammar_failures": self._failures,
            "grammar_compile_s": self._seconds,
            "grammar_cache_hits": self._hits,
        }

    def close(self) -> None:
        self._threads.shutdown()
        self._checks.close()


def _was_too_slow(compiled: Future[CompiledGrammar]) -> bool:
    """Return whether the grammar may compile at another attempt, when others need no time."""
    return compiled.done() and not compiled.cancelled() and isinstance(compiled.exception(), TakesTooLong)


def _load(vocabulary: GrammarVocabulary) -> _Vocabulary:
    from llguidance import LLExecutor, LLTokenizer

    try:
        tokenizer = LLTokenizer(**tokenizer_arguments(vocabulary))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"structured_outputs: the tokenizer cannot be read: {error}") from error
    return _Vocabulary(StringTokens(tokenizer, vocabulary.vocab_size), LLExecutor(mask_threads()))
