"""Compiles the grammars of requests in parallel with the steps of the engine, and keeps what it has compiled."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from compiled_engine.grammars.constraint import GrammarConstraint, failure_text
from compiled_engine.grammars.string_masks import StringMasks, StringTokens, probe_for
from compiled_engine.grammars.text import (
    KEPT_GRAMMARS,
    QUICK_GRAMMAR,
    WHITESPACE,
    mask_threads,
    on_large_stack,
    parser_limits,
)
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
    without the GIL, so the steps go on.

    vocabulary: read once, by a thread, when the object is made.
    """

    def __init__(self, vocabulary: GrammarVocabulary, *, kept: int = KEPT_GRAMMARS) -> None:
        self._threads = SmallestFirst(QUICK_GRAMMAR, "grammar")
        self._vocabulary: Future[_Vocabulary] = self._threads.submit(0, lambda: _load(vocabulary))
        self._kept = kept
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()  # the last used last
        self._lock = threading.Lock()
        self._hits = 0
        self._compiles = 0
        self._failures = 0
        self._seconds = 0.0

    def compile(self, grammar: str) -> Future[CompiledGrammar]:
        """The future's exception is a ValueError if it cannot be compiled."""
        if (found := self._compiled.get(grammar)) is not None:
            self._compiled.move_to_end(grammar)
            self._hits += 1
            return found
        compiled = self._compiled[grammar] = self._threads.submit(len(grammar), lambda: self._compile(grammar))
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

    def _compile(self, grammar: str) -> CompiledGrammar:
        from llguidance import LLMatcher

        tokenizer = self._vocabulary.result().tokens.tokenizer
        start = time.perf_counter()
        matcher = on_large_stack(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits()))
        failed = matcher.is_error()
        with self._lock:
            self._compiles += 1
            self._seconds += time.perf_counter() - start
            self._failures += failed
        if failed:
            raise ValueError(failure_text(matcher))
        return CompiledGrammar(matcher, probe_for(grammar, WHITESPACE))

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


def _load(vocabulary: GrammarVocabulary) -> _Vocabulary:
    from llguidance import LLExecutor, LLTokenizer

    try:
        tokenizer = LLTokenizer(
            vocabulary.tokenizer, n_vocab=vocabulary.vocab_size, eos_token=sorted(vocabulary.eos_token_ids)
        )
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"structured_outputs: the tokenizer cannot be read: {error}") from error
    return _Vocabulary(StringTokens(tokenizer, vocabulary.vocab_size), LLExecutor(mask_threads()))
