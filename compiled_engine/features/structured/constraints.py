"""Manages the constraints of requests: queues requests whose grammars are being compiled, and makes each step's masks.

Requests whose grammar is being compiled are held back from the scheduler's queue and do not delay it. The masks of a
step are computed while it runs: each constraint gets its request's newest tokens and returns the next mask.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from compiled_engine.engine.messages import EngineOutput, EngineRequest
from compiled_engine.engine.request import Request
from compiled_engine.features.structured.extras import TokenMasks, grammar_of
from compiled_engine.features.structured.grammars.compiler import CompiledGrammar, GrammarCompiler
from compiled_engine.features.structured.grammars.constraint import GrammarConstraint, fill_masks
from compiled_engine.features.structured.grammars.text import LONGEST_COMPILE_S
from compiled_engine.features.structured.grammars.vocabulary import GrammarVocabulary
from compiled_engine.sampling.token_mask import Constraint, num_words

# Metrics that add up over replicas.
COUNTERS = ("grammar_requests", "grammar_compiles", "grammar_failures", "grammar_compile_s", "grammar_cache_hits")


@dataclass(frozen=True)
class _Waiting:
    """A request whose grammar is being compiled."""

    request: EngineRequest
    compiled: Future[CompiledGrammar]
    deadline_s: float  # in seconds of time.monotonic


class GrammarQueue:
    """Compiles grammars, and holds each request until its grammar is ready."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None
        self.waiting: dict[str, _Waiting] = {}  # by request id
        self._num_waiting: Counter[Future[CompiledGrammar]] = Counter()
        self._num_requests = 0

    def set_vocabulary(self, vocabulary: GrammarVocabulary) -> None:
        """Set the vocabulary. Only the first call has an effect, since all vocabularies of an engine are equal."""
        if self._compiler is None:
            self._compiler = GrammarCompiler(vocabulary)

    def add(self, request: EngineRequest) -> None:
        """Queue a request, and start to compile its grammar. Raises ValueError if no vocabulary was set."""
        if self._compiler is None or (grammar := grammar_of(request)) is None:
            raise ValueError(f"the grammar of request {request.request_id!r} needs a vocabulary, and there is none")
        self._num_requests += 1
        compiled = self._compiler.compile(grammar)
        deadline_s = time.monotonic() + LONGEST_COMPILE_S
        self.waiting[request.request_id] = _Waiting(request, compiled, deadline_s)
        self._num_waiting[compiled] += 1

    def remove(self, request_id: str) -> bool:
        """Remove a request. Return whether it was waiting.

        The compilation of its grammar is cancelled if it has not begun and no other request waits for it.
        """
        if request_id not in self.waiting:
            return False
        gone = self._pop(request_id)
        if gone.compiled not in self._num_waiting:
            grammar = grammar_of(gone.request)
            assert self._compiler is not None
            assert grammar is not None
            self._compiler.cancel(grammar, gone.compiled)
        return True

    def _pop(self, request_id: str) -> _Waiting:
        found = self.waiting.pop(request_id)
        self._num_waiting[found.compiled] -= 1
        if not self._num_waiting[found.compiled]:
            del self._num_waiting[found.compiled]
        return found

    def release(
        self, patience_s: float = 0.0
    ) -> tuple[list[tuple[EngineRequest, GrammarConstraint]], list[EngineOutput]]:
        """Remove and return the requests with ready grammars, and the final outputs of requests with failed grammars.

        A grammar that is not ready LONGEST_COMPILE_S after `add` has failed. `patience_s` is the longest time to wait
        if no grammar is ready.
        """
        if patience_s > 0:
            wait([each.compiled for each in self.waiting.values()], patience_s, FIRST_COMPLETED)
        ready: list[tuple[EngineRequest, GrammarConstraint]] = []
        failed: list[EngineOutput] = []
        for request_id, each in list(self.waiting.items()):
            if not each.compiled.done() and time.monotonic() < each.deadline_s:
                continue
            self._pop(request_id)
            try:
                ready.append((each.request, self._constraint(each)))
            except Exception as error:  # any failure concerns only this request
                failed.append(EngineOutput(request_id, (), finish_reason="error", stop_reason=str(error)))
        return ready, failed

    def _constraint(self, waiting: _Waiting) -> GrammarConstraint:
        if not waiting.compiled.done():
            raise ValueError(f"structured_outputs: the grammar takes more than {LONGEST_COMPILE_S:g} s to compile")
        assert self._compiler is not None
        return self._compiler.constraint(waiting.compiled)

    def metrics(self) -> dict[str, int | float]:
        """Return grammar_requests since the start, and GrammarCompiler.metrics once there is a compiler."""
        return {"grammar_requests": self._num_requests} | (self._compiler.metrics() if self._compiler else {})

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()


@dataclass(slots=True)
class Constrained:
    """A request's constraint, and the number of output tokens that were passed to it."""

    constraint: Constraint
    num_accepted: int = 0  # number of output tokens that the constraint has got

    def with_new_tokens(self, request: Request) -> tuple[Constraint, list[int]]:
        """Return the constraint, and the request's output tokens that were not passed to it yet.

        Also counts these tokens as passed.
        """
        token_ids = request.token_ids[request.num_prompt_tokens + self.num_accepted :]
        self.num_accepted += len(token_ids)
        return self.constraint, token_ids


class MaskMaker:
    """Computes the masks of steps into an array with a row per request. Masks of grammars are computed in threads."""

    def __init__(self, max_num_requests: int, vocab_size: int) -> None:
        self._shape = (max_num_requests, num_words(vocab_size))
        self._words_NW: np.ndarray | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")  # starts with the first grammar
        self._asked: list[Request] = []
        self._failures: Future[dict[int, str]] | None = None

    def begin(self, requests: Sequence[tuple[Request, Constrained]]) -> None:
        """Start to compute the masks of requests. All tokens of these requests must be known.

        Earlier masks that were never taken are dropped.
        """
        if self._words_NW is None:
            self._words_NW = np.zeros(self._shape, np.int32)
        if self._failures is not None:
            self._failures.result()
        self._asked = [request for request, _ in requests]
        words_MW = self._words_NW[: len(self._asked)]
        told = [constrained.with_new_tokens(request) for request, constrained in requests]
        self._failures = fill_masks(told, words_MW, self._thread)

    def finish(self) -> TokenMasks:
        """Wait for the masks of the last `begin`, and return them. They are valid until the next `begin`.

        A request whose constraint failed is left out, and its `failure` is set. Raises RuntimeError without a `begin`.
        """
        if self._failures is None or self._words_NW is None:
            raise RuntimeError("no masks are being made: begin must be called first")
        failures, self._failures = self._failures.result(), None
        asked, words_MW = self._asked, self._words_NW[: len(self._asked)]
        for index, why in failures.items():
            asked[index].failure = why
            asked[index].set_steady_limits()
        if failures:
            words_MW = words_MW[[index for index in range(len(asked)) if index not in failures]]
        request_ids = [request.request_id for request in asked if request.failure is None]
        return TokenMasks(request_ids, words_MW.reshape(-1).view(np.uint8).data)
