"""Converts the core's step outputs to one RequestOutput per prompt, with all its completions.

The core runs each completion of a prompt as a request of its own, called an engine request here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from compiled_engine.engine.messages import EngineOutput, StepOutputs
from compiled_engine.features.prompt_logprobs.extras import rows_in
from compiled_engine.features.speculation.extras import VERIFIED_DRAFTS, VerifiedDrafts
from compiled_engine.features.weight_updates.extras import version_in
from compiled_engine.frontend.completion import Completion
from compiled_engine.frontend.logprob_list import GrowingLogprobs
from compiled_engine.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from compiled_engine.frontend.prepared_request import Give, PreparedRequest, Running
from compiled_engine.frontend.tokenizer import Tokenizer

NO_DRAFTS = VerifiedDrafts()


class RunningRequest:
    """The state of a running prompt: its completions, prompt log-probabilities and times in seconds."""

    def __init__(self, request: PreparedRequest, tokenizer: Tokenizer | None, now: float) -> None:
        self.request = request
        params = request.sampling_params
        self.finished = False
        self.completions = {
            engine_request.request_id: Completion(index, request.prompt_token_ids, params, tokenizer)
            for index, engine_request in enumerate(request.engine_requests)
        }
        self._prompt_logprobs: GrowingLogprobs | None = None
        if params.prompt_logprobs is not None:
            first_id = request.prompt_token_ids[:1]
            self._prompt_logprobs = GrowingLogprobs(params.prompt_logprobs, tokenizer, first_id, params, first=[None])
        self._num_given_prompt_logprobs = 0  # by `delta`
        self._prompt_token_ids = list(request.prompt_token_ids)  # one list for all outputs
        self._num_cached_tokens: int | None = None
        self._weight_version: str | None = None
        self._arrival_time = now
        self._first_scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None
        self._finished_time: float | None = None
        self._num_drafts = self._num_draft_tokens = self._num_accepted_tokens = 0

    def look(self, engine_request_id: str, now: float) -> str | None:
        """Check a completion after a token was appended to it. Return its finish reason, None while it runs."""
        completion = self.completions[engine_request_id]
        completion.look()
        self._last_token_time = now
        self._note_end(completion, now)
        return completion.finish_reason

    def extend(self, engine_request_id: str, token_ids: Sequence[int], drafts: Sequence[int]) -> None:
        """Append a step's tokens to a completion without stop strings.

        engine_request_id: the completion's. drafts: the numbers of verified and of right drafts, see VerifiedDrafts.
        """
        self.completions[engine_request_id].token_ids += token_ids
        self._count_drafts(drafts, len(token_ids))

    def _count_drafts(self, drafts: Sequence[int], num_kept: int) -> None:
        """Count a step's drafts, and the accepted ones among them.

        drafts: the numbers of verified and of right drafts, see VerifiedDrafts. num_kept: the step's tokens that are
        part of the output; right drafts beyond them do not count as accepted.
        """
        num_drafts, num_right = drafts
        if num_drafts:
            self._num_drafts += 1
            self._num_draft_tokens += num_drafts
            self._num_accepted_tokens += min(num_kept, num_right)

    def update(self, output: EngineOutput, now: float) -> str | None:
        """Add a step's output to one completion. Return its finish reason, None while it runs."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if self._prompt_logprobs is not None and (found := rows_in(output.extras)) is not None:
            first, rows = found
            assert first == len(self._prompt_logprobs)  # a chunk of the prompt at a time, each once
            self._prompt_logprobs.add(rows)
            if len(self._prompt_logprobs) == len(self._prompt_token_ids):
                self._prompt_logprobs.end()
        if self._weight_version is None and output.extras:
            self._weight_version = version_in(output.extras)
        if self._first_scheduled_time is None:
            self._first_scheduled_time = output.scheduled_time
        if output.new_token_ids:
            self._last_token_time = now
            if self._first_token_time is None:
                self._first_token_time = now
        completion = self.completions[output.request_id]
        num_known = len(completion.token_ids)
        completion.update(output)
        num_kept = len(completion.token_ids) - num_known  # a stop string may cut the step's tokens short
        self._count_drafts(output.extras.get(VERIFIED_DRAFTS, NO_DRAFTS), num_kept)
        self._note_end(completion, now)
        return completion.finish_reason

    def _note_end(self, completion: Completion, now: float) -> None:
        if completion.finish_reason is not None and not self.unfinished_ids():
            self.finished, self._finished_time = True, now

    def unfinished_ids(self) -> list[str]:
        """Return the ids of the engine requests, one for each completion, that still run."""
        return [key for key, completion in self.completions.items() if completion.finish_reason is None]

    def snapshot(self) -> RequestOutput:
        """Return the cumulative output so far."""
        prompt_logprobs = None if self._prompt_logprobs is None else self._prompt_logprobs.snapshot()
        completions = [completion.snapshot() for completion in self.completions.values()]
        return self._output(completions, prompt_logprobs, self._metrics())

    def delta(self) -> RequestOutput:
        """Return the changes since the last call: new parts of completions, and new prompt log-probabilities.

        Only the last delta has metrics, which keeps the many others cheap.
        """
        new = None
        if self._prompt_logprobs is not None:
            new = self._prompt_logprobs.since(self._num_given_prompt_logprobs)
            self._num_given_prompt_logprobs += len(new)
        grown = [delta for completion in self.completions.values() if (delta := completion.delta()) is not None]
        return self._output(grown, new, self._metrics() if self.finished else None)

    def _output(
        self,
        completions: list[CompletionOutput],
        prompt_logprobs: Sequence[dict[int, Logprob] | None] | None,
        metrics: RequestMetrics | None,
    ) -> RequestOutput:
        request = self.request
        return RequestOutput(
            request.request_id,
            request.prompt,
            self._prompt_token_ids,
            prompt_logprobs,
            completions,
            self.finished,
            self._num_cached_tokens,
            metrics,
            weight_version=self._weight_version,
            **request.output,
        )

    def _metrics(self) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=self._arrival_time,
            first_scheduled_time=self._first_scheduled_time,
            first_token_time=self._first_token_time,
            last_token_time=self._last_token_time,
            finished_time=self._finished_time,
            num_generation_tokens=max(len(completion.token_ids) for completion in self.completions.values()),
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )


class Asked(NamedTuple):
    """A question of the core for data of a prompt, such as pixels: `give` makes the data that `keys` name."""

    give: Give
    request_id: str  # of the prompt
    engine_request_id: str
    keys: Sequence[str]


class OutputProcessor:
    """Adds the core's outputs to the running requests that they belong to."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, Running] = {}
        # By engine request id. Sinks take tokens and log-probabilities directly, without an EngineOutput. Watched
        # requests are checked after each token, for stop strings or because readers want partial outputs.
        self._generating: dict[str, RunningRequest] = {}
        self._token_sinks: dict[str, Callable[[int], None]] = {}
        self._logprob_sinks: dict[str, GrowingLogprobs] = {}
        self._watched: dict[str, RunningRequest] = {}
        self._asked: list[Asked] = []

    def add(self, request: PreparedRequest, *, partial: bool = True) -> Running:
        """Start tracking a request that arrives now, and return its state.

        With `partial`, `process` returns the state after every token. Otherwise `process` may return it only at the
        end.
        """
        if request.collect is not None:
            collecting = request.collect(request)
            for engine_request in request.engine_requests:
                self._states[engine_request.request_id] = collecting
            return collecting
        state = RunningRequest(request, self._tokenizer, time.perf_counter())
        for engine_request_id, completion in state.completions.items():
            self._states[engine_request_id] = self._generating[engine_request_id] = state
            self._token_sinks[engine_request_id] = completion.token_ids.append
            if completion.logprobs is not None:
                self._logprob_sinks[engine_request_id] = completion.logprobs
            if partial or request.sampling_params.stop:
                self._watched[engine_request_id] = state
        return state

    def forget(self, engine_request_id: str) -> None:
        """Stop tracking an engine request, which is one completion. Later outputs for it are dropped."""
        for by_id in (self._states, self._generating, self._token_sinks, self._logprob_sinks, self._watched):
            by_id.pop(engine_request_id, None)

    def process(self, outputs: StepOutputs) -> tuple[list[Running], list[str]]:
        """Process a step's outputs. Return the states that changed, and the ids of engine requests to abort.

        An engine request is one completion. Those to abort have ended by a stop string, which the core does not detect.
        """
        now = time.perf_counter()
        changed: dict[int, Running] = {}
        aborts: list[str] = []
        if outputs.lengths is None:
            self._add_single_tokens(outputs, now, changed, aborts)
        else:
            self._add_several_tokens(outputs, outputs.lengths, now, changed, aborts)
        for output in outputs.others:
            if not output.asks:
                self._add_output(output, now, changed, aborts)
            elif (state := self._states.get(output.request_id)) is not None and state.request.give is not None:
                self._asked.append(Asked(state.request.give, state.request.request_id, output.request_id, output.asks))
        return list(changed.values()), aborts

    def take_asked(self) -> list[Asked]:
        """Return the questions for data that the core has asked since the last call."""
        asked, self._asked = self._asked, []
        return asked

    def is_tracked(self, engine_request_id: str) -> bool:
        """Return whether an engine request, which is one completion, has been added and has not ended."""
        return engine_request_id in self._states

    def _add_single_tokens(
        self, outputs: StepOutputs, now: float, changed: dict[int, Running], aborts: list[str]
    ) -> None:
        sinks = self._token_sinks
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            if (sink := sinks.get(request_id)) is not None:
                sink(token_id)
        if outputs.logprobs is not None:
            data, size = outputs.logprobs.data, outputs.logprobs.row_bytes
            for index, request_id in enumerate(outputs.request_ids):
                if (logprobs := self._logprob_sinks.get(request_id)) is not None:
                    logprobs.add_row(data, index * size, size)
        if self._watched:
            for request_id in outputs.request_ids:
                if (state := self._watched.get(request_id)) is not None:
                    changed[id(state)] = state
                    if state.look(request_id, now) is not None:
                        self.forget(request_id)
                        aborts.append(request_id)

    def _add_several_tokens(
        self, outputs: StepOutputs, lengths: Sequence[int], now: float, changed: dict[int, Running], aborts: list[str]
    ) -> None:
        every_drafts: Iterable[Sequence[int]] = outputs.columns.get(VERIFIED_DRAFTS, repeat(NO_DRAFTS))
        first, token_ids, generating = 0, outputs.token_ids, self._generating
        for request_id, length, drafts in zip(outputs.request_ids, lengths, every_drafts, strict=False):
            tokens, first = slice(first, first + length), first + length
            if request_id in self._watched or request_id in self._logprob_sinks:
                logprobs = None if outputs.logprobs is None else outputs.logprobs.select(tokens)
                output = EngineOutput(request_id, tuple(token_ids[tokens]), logprobs, extras={VERIFIED_DRAFTS: drafts})
                self._add_output(output, now, changed if request_id in self._watched else {}, aborts)
            elif (state := generating.get(request_id)) is not None:
                state.extend(request_id, token_ids[tokens], drafts)

    def _add_output(self, output: EngineOutput, now: float, changed: dict[int, Running], aborts: list[str]) -> None:
        if (state := self._states.get(output.request_id)) is not None:
            changed[id(state)] = state
            if state.update(output, now) is not None:
                self.forget(output.request_id)
                if output.finish_reason is None:
                    aborts.append(output.request_id)
