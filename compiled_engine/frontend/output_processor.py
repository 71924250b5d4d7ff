"""From what a step produced to what a user gets: one RequestOutput for all completions of a prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence

from compiled_engine.frontend.completion import Completion, logprob_dict, token_texts
from compiled_engine.frontend.input_processor import PreparedRequest
from compiled_engine.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.messages import EngineOutput, StepOutputs
from compiled_engine.sampling.token_logprobs import TokenLogprobs


class RunningRequest:
    """A prompt under way: its completions, prompt log-probabilities and times (in seconds)."""

    def __init__(self, request: PreparedRequest, tokenizer: Tokenizer | None, now: float) -> None:
        self.request = request
        params = request.sampling_params
        self._completions = {
            engine_request.request_id: Completion(index, request.prompt_token_ids, params, tokenizer)
            for index, engine_request in enumerate(request.engine_requests)
        }
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]
            self._prompt_texts = token_texts(tokenizer, request.prompt_token_ids[:1], params)
        self._num_given_prompt_logprobs = 0  # by `delta`
        self._prompt_token_ids = list(request.prompt_token_ids)  # one list for all outputs
        self._num_cached_tokens: int | None = None
        self._arrival_time = now
        self._first_scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None
        self._finished_time: float | None = None

    @property
    def finished(self) -> bool:
        return self._finished_time is not None

    def add_token(self, engine_request_id: str, token_id: int, now: float) -> str | None:
        """Take in one completion's next token; give the finish reason that the completion has now."""
        completion = self._completions[engine_request_id]
        completion.add_token(token_id)
        self._last_token_time = now
        if completion.finish_reason is not None:
            self._note_end(now)
        return completion.finish_reason

    def update(self, output: EngineOutput, now: float) -> str | None:
        """Take in whatever a step gave one completion; give the finish reason that the completion has now."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None and self._prompt_logprobs is not None:
            self._add_prompt_logprobs(*output.prompt_logprobs)
        if self._first_scheduled_time is None:
            self._first_scheduled_time = output.scheduled_time
        if output.new_token_ids:
            self._last_token_time = now
            if self._first_token_time is None:
                self._first_token_time = now
        completion = self._completions[output.request_id]
        completion.update(output)
        if completion.finish_reason is not None:
            self._note_end(now)
        return completion.finish_reason

    def _note_end(self, now: float) -> None:
        """One completion has ended."""
        if all(completion.finish_reason is not None for completion in self._completions.values()):
            self._finished_time = now

    def unfinished_ids(self) -> list[str]:
        """Ids of the engine requests that still run."""
        return [key for key, completion in self._completions.items() if completion.finish_reason is None]

    def snapshot(self) -> RequestOutput:
        """The request as it is now."""
        prompt_logprobs = None if self._prompt_logprobs is None else list(self._prompt_logprobs)
        completions = [completion.snapshot() for completion in self._completions.values()]
        return self._output(completions, prompt_logprobs, self._metrics())

    def delta(self) -> RequestOutput:
        """What is new since the last call: of each completion that has grown, and of the prompt's log-probabilities.

        Times come with the end alone: there are many deltas, and they should cost little.
        """
        new = None
        if self._prompt_logprobs is not None:
            new = self._prompt_logprobs[self._num_given_prompt_logprobs :]
            self._num_given_prompt_logprobs += len(new)
        grown = [delta for completion in self._completions.values() if (delta := completion.delta()) is not None]
        return self._output(grown, new, self._metrics() if self.finished else None)

    def _output(
        self,
        completions: list[CompletionOutput],
        prompt_logprobs: list[dict[int, Logprob] | None] | None,
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
        )

    def _metrics(self) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=self._arrival_time,
            first_scheduled_time=self._first_scheduled_time,
            first_token_time=self._first_token_time,
            last_token_time=self._last_token_time,
            finished_time=self._finished_time,
            num_generation_tokens=max(completion.num_tokens for completion in self._completions.values()),
        )

    def _add_prompt_logprobs(self, first: int, entries: Sequence[TokenLogprobs]) -> None:
        """Entries come a chunk of the prompt at a time, each once."""
        assert self._prompt_logprobs is not None
        assert first == len(self._prompt_logprobs)
        self._prompt_logprobs += [logprob_dict(entry, self._prompt_texts) for entry in entries]


class OutputProcessor:
    """Routes the core's outputs to the states of their requests."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, RunningRequest] = {}

    def add(self, request: PreparedRequest) -> RunningRequest:
        """Start to follow a request; its arrival is now."""
        state = RunningRequest(request, self._tokenizer, time.perf_counter())
        for engine_request in request.engine_requests:
            self._states[engine_request.request_id] = state
        return state

    def forget(self, engine_request_id: str) -> None:
        """Stop following an engine request: what the core still says of it is dropped."""
        self._states.pop(engine_request_id, None)

    def process(self, outputs: StepOutputs) -> tuple[list[RunningRequest], list[str]]:
        """Take in a step's outputs; give the states that changed, and the engine requests to abort.

        Those to abort ended by a stop string, which the core knows nothing of.
        """
        now = time.perf_counter()
        states = self._states
        changed: dict[int, RunningRequest] = {}
        aborts: list[str] = []
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            state = states.get(request_id)
            if state is not None:
                changed[id(state)] = state
                if state.add_token(request_id, token_id, now) is not None:
                    self.forget(request_id)
                    aborts.append(request_id)
        for output in outputs.others:
            state = states.get(output.request_id)
            if state is not None:
                changed[id(state)] = state
                if state.update(output, now) is not None:
                    self.forget(output.request_id)
                    if output.finish_reason is None:
                        aborts.append(output.request_id)
        return list(changed.values()), aborts
