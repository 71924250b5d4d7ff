"""Plans requests with a grammar or a token mask: waits for grammars to be compiled, and masks tokens in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compiled_engine.engine.messages import EngineOutput, EngineRequest
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Finish, Request
from compiled_engine.features.structured.constraints import Constrained, GrammarQueue, MaskMaker
from compiled_engine.features.structured.extras import NAME, grammar_of
from compiled_engine.features.structured.grammars.constraint import is_complete
from compiled_engine.features.structured.grammars.vocabulary import GrammarVocabulary
from compiled_engine.sampling.token_mask import Constraint, MaskConstraint, TokenMask


class Structured(PlanFeature):
    """Holds back requests until their grammars are compiled, and makes the masks of constrained requests.

    `max_num_requests` is the most requests of a step.
    """

    calls = ("set_vocabulary",)

    def __init__(self, max_num_requests: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._grammars = GrammarQueue()
        self._masks = MaskMaker(max_num_requests, vocab_size)
        self._given: dict[str, Constraint] = {}  # constraints of requests that will be added, by request id
        self._of: dict[Request, Constrained] = {}  # constraints of requests that were added

    def set_vocabulary(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Set the vocabulary of grammars, see GrammarVocabulary. Returns immediately.

        Only the first call has an effect.
        """
        self._grammars.set_vocabulary(GrammarVocabulary(tokenizer, vocab_size, frozenset(eos_token_ids)))

    def check(self, request: EngineRequest) -> None:
        if request.sampling_params.token_mask is not None:
            raise ValueError("sampling_params.token_mask must be None in an EngineRequest: give the mask to add")

    def holds_back(self, request: EngineRequest, given: TokenMask | None) -> bool:
        """Return whether a request is held back until its grammar is compiled. `given` is its token mask, if any.

        Raises ValueError if the request has a grammar and a token mask, or has a grammar and no vocabulary was set.
        """
        if grammar_of(request) is not None:
            if given is not None:
                raise ValueError(f"request {request.request_id!r} must have a grammar or a token mask, got both")
            self._grammars.add(request)
            return True
        if given is not None:
            self._given[request.request_id] = MaskConstraint(given, self._vocab_size)
        return False

    def take_ready(self, patience_s: float) -> tuple[list[EngineRequest], list[EngineOutput]]:
        """Return the requests with ready grammars, and the final outputs of requests with failed grammars.

        patience_s: the longest time to wait if no grammar is ready.
        """
        ready, failed = self._grammars.release(patience_s)
        self._given |= {request.request_id: constraint for request, constraint in ready}
        return [request for request, _ in ready], failed

    def withdrawn(self, request_id: str) -> None:
        self._grammars.remove(request_id)
        self._given.pop(request_id, None)

    def added(self, request: Request) -> None:
        """Make a constrained request wait for a mask before each token, and get only one token per step."""
        if (constraint := self._given.pop(request.request_id, None)) is not None:
            self._of[request] = Constrained(constraint)
            request.samples_late = True
            request.max_new_tokens_per_step = request.most_when_admitted = 1

    def begin_late(self, requests: Sequence[Request]) -> None:
        self._masks.begin([(request, self._of[request]) for request in requests if request in self._of])

    def finish_late(self) -> dict[str, Any]:
        return {NAME: self._masks.finish()}

    def nothing_allowed(self, request: Request) -> Finish | None:
        """Return how a request ends whose mask allows no token: "stop" if its grammar is complete, None for an error.

        After a complete grammar only an end-of-sequence token may follow, and a parameter such as min_tokens can forbid
        it.
        """
        found = self._of.get(request)
        return Finish("stop", None) if found is not None and is_complete(found.constraint) else None

    def ended(self, request: Request) -> None:
        self._of.pop(request, None)

    def metrics(self) -> dict[str, Any]:
        return self._grammars.metrics()

    def close(self) -> None:
        self._grammars.close()
