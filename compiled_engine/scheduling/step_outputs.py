"""From a step's result to outputs: what each request got, and whether that ends it."""

from __future__ import annotations

from compiled_engine.messages import EngineOutput, RunnerOutput
from compiled_engine.sampling.token_logprobs import TokenLogprobs
from compiled_engine.scheduling.request import Request, RequestStatus
from compiled_engine.scheduling.step_in_flight import StepInFlight
from compiled_engine.scheduling.stop import check_stop


def prompt_outputs(step: StepInFlight, result: RunnerOutput) -> list[EngineOutput]:
    """Prompt log-probabilities of requests that have not come to the end of their prompt."""
    outputs = []
    for request, samples in zip(step.requests, step.output.samples, strict=True):
        if not samples and request.status is not RequestStatus.FINISHED:
            entries = _prompt_logprobs(request, result)
            if entries is not None:
                cached = request.num_cached_tokens or 0
                outputs.append(EngineOutput(request.request_id, (), prompt_logprobs=entries, num_cached_tokens=cached))
    return outputs


def token_output(request: Request, token_id: int, result: RunnerOutput) -> EngineOutput:
    """The output for a request that got its newest token; it has a finish_reason if that is the last one."""
    request_id = request.request_id
    prompt_logprobs = _prompt_logprobs(request, result)
    logprobs = (result.logprobs[request_id],) if request_id in result.logprobs else None
    finish = check_stop(request.stop_rule, token_id, len(request.token_ids) - request.num_prompt_tokens)
    reason, stop_reason = finish or (None, None)
    cached = request.num_cached_tokens or 0
    at = request.scheduled_time
    return EngineOutput(request_id, (token_id,), logprobs, prompt_logprobs, reason, stop_reason, cached, at)


def error_output(request: Request, why: str, result: RunnerOutput) -> EngineOutput:
    """The end of a request that cannot go on: it gets no token."""
    cached = request.num_cached_tokens or 0
    return EngineOutput(request.request_id, (), None, _prompt_logprobs(request, result), "error", why, cached)


def _prompt_logprobs(request: Request, result: RunnerOutput) -> tuple[int, tuple[TokenLogprobs, ...]] | None:
    """What of the request's prompt log-probabilities is new, if anything."""
    found = result.prompt_logprobs.get(request.request_id)
    return None if found is None else request.take_prompt_logprobs(*found)
