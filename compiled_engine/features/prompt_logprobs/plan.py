"""Delivers each log-probability of a prompt once, although a prompt may be computed in chunks and more than once."""

from __future__ import annotations

from typing import Any

from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.features.prompt_logprobs.extras import MOST_PROMPT_LOGPROBS, NAME, as_rows, next_position


class PromptLogprobs(PlanFeature):
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._next: dict[Request, int] = {}  # first position that has not been delivered

    def added(self, request: Request) -> None:
        wanted = request.sampling_params.prompt_logprobs
        if wanted is None:
            return
        most = max(MOST_PROMPT_LOGPROBS // (self._vocab_size if wanted == -1 else wanted + 1), 1)
        request.max_step_tokens = min(request.max_step_tokens, most)
        self._next[request] = next_position(request.asked)
        self._note(request)

    def output_extras(self, request: Request, extras: dict[str, Any]) -> dict[str, Any]:
        """Return the rows of log-probabilities that have not been delivered, as an entry of the output's extras.

        extras: features' data in the step's result, among them the step's rows. Raises RuntimeError if positions are
        missing.
        """
        found = extras.get(NAME, {}).get(request.request_id)
        if found is None:
            return {}
        first, rows = as_rows(found)
        position = self._next[request]
        if first > position:
            raise RuntimeError(f"prompt_logprobs of {request.request_id!r} start at {first}, but {position} is next")
        fresh = rows.num_rows - (position - first)
        if fresh <= 0:  # a request that was preempted computes its prompt again
            return {}
        self._next[request] += fresh
        self._note(request)
        return {NAME: (position, rows.select(slice(position - first, None)))}

    def ended(self, request: Request) -> None:
        self._next.pop(request, None)

    def _note(self, request: Request) -> None:
        """Make the request compute every prompt token, cached ones too, until all log-probabilities are delivered."""
        request.computes_every_token = self._next[request] < request.num_prompt_tokens
