"""Compile requests' grammars in parallel with the engine's steps, and cache the results."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from compiled_engine.features.structured.grammars.constraint import GrammarConstraint, failure_text
from compiled_engine.features.structured.grammars.string_masks import StringMasks, StringTokens, probe_for
from compiled_engine.features.structured.grammars.text import QUICK_GRAMMAR, WHITESPACE, mask_threads
from compiled_engine.features.structured.grammars.trials import KEPT_GRAMMARS, on_large_stack, parser_limits
from compiled_engine.features.structured.grammars.vocabulary import GrammarVocabulary
from compiled_engine.process.smallest_first import SmallestFirst

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


class _Vocabulary(NamedTuple):
    tokens: StringTokens
    executor: LLExecutor


class CompiledGrammar(NamedTuple):
    """A compiled grammar, and its probe: a character allowed only inside strings that are bounded by length alone."""

    matcher: LLMatcher  # in its initial state, to be copied
    probe: str | None  # see string_masks.py


class GrammarCompiler:
    """Compiles grammars in threads, and caches the results.

    The threads belong to the core's process, since matchers cannot be passed between processes. The library releases
    the GIL, so steps continue. `vocabulary` is read once, by a thread, on construction.
    """

    def __init__(self, vocabulary: GrammarVocabulary, *, kept: int = KEPT_GRAMMARS) -> None:
        self._threads = SmallestFirst(QUICK_GRAMMAR, "grammar")
        self._vocabulary: Future[_Vocabulary] = self._threads.submit(0, lambda: _load(vocabulary))
        self._kept = kept
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()  # LRU, the last used last
        self._lock = threading.Lock()
        self._hits = 0
        self._compiles = 0
        self._failures = 0
        self._seconds = 0.0

    def compile(self, grammar: str) -> Future[CompiledGrammar]:
        """Return the future of the compiled grammar, which may come from the cache.

        Its exception is a ValueError if the grammar cannot be compiled.
        """
        if (found := self._compiled.get(grammar)) is not None:
            self._compiled.move_to_end(grammar)
            self._hits += 1
            return found
        compiled = self._compiled[grammar] = self._threads.submit(len(grammar), lambda: self._compile(grammar))
        if len(self._compiled) > self._kept:
            self._compiled.popitem(last=False)
        return compiled

    def cancel(self, grammar: str, compiled: Future[CompiledGrammar]) -> None:
        """Cancel the compilation of a grammar unless it has begun."""
        if compiled.cancel() and self._compiled.get(grammar) is compiled:
            del self._compiled[grammar]

    def constraint(self, compiled: Future[CompiledGrammar]) -> GrammarConstraint:
        """Return a request's constraint, with a copy of the compiled matcher. Raises ValueError if compiling failed."""
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
        """Return counts since the start: compilations, failed compilations, seconds of all compilations, cache hits."""
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
    except Exception as error:  # the library raises no specific type
        raise ValueError(f"structured_outputs: the tokenizer cannot be read: {error}") from error
    return _Vocabulary(StringTokens(tokenizer, vocabulary.vocab_size), LLExecutor(mask_threads()))
