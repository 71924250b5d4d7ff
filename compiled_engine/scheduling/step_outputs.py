"""From a step's result to outputs: what each request got, and whether that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from compiled_engine.grammars.constraint import is_complete
from compiled_engine.messages import EngineOutput, RunnerOutput, StepOutputs
from compiled_engine.sampling.no_token import NOTHING_ALLOWED, WHY_NO_TOKEN
from compiled_engine.sampling.token_logprobs import LogprobRows
from compiled_engine.scheduling.request import Request, RequestStatus
from compiled_engine.scheduling.step_in_flight import StepInFlight, all_but
from compiled_engine.scheduling.stop import Finish


def step_outputs(
    step: StepInFlight, result: RunnerOutput, not_steady: Sequence[int], others: Sequence[EngineOutput]
) -> StepOutputs:
    """Outputs of a step with a token for each request: in columns all but those at `not_steady`, which are among the
    others, or of requests that have ended."""
    request_ids, token_ids, logprobs = step.sampling_ids, result.token_ids, result.logprobs
    if not_steady:
        steady = all_but(not_steady, len(token_ids))
        request_ids, token_ids = list(compress(request_ids, steady)), list(compress(token_ids, steady))
        logprobs = None if logprobs is None else logprobs.select(steady)
    return StepOutputs(request_ids, token_ids, others, logprobs)


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


def tokens_output(request: Request, tokens: slice, finish: Finish | None, result: RunnerOutput) -> EngineOutput:
    """The output for a request that got these tokens of the step's. finish: how it ends with the last of them, or for
    want of another one."""
    request_id = request.request_id
    prompt_logprobs = _prompt_logprobs(request, result)
    token_ids = tuple(result.token_ids[tokens])
    logprobs = None
    if token_ids and (many := result.many_logprobs.get(request_id)) is not None:
        logprobs = many.select(slice(len(token_ids)))
    elif token_ids and result.logprobs is not None and request.sampling_params.logprobs is not None:
        logprobs = result.logprobs.select(tokens)
    reason, stop_reason = finish or (None, None)
    cached = request.num_cached_tokens or 0
    at = request.scheduled_time
    return EngineOutput(request_id, token_ids, logprobs, prompt_logprobs, reason, stop_reason, cached, at)


def no_token(request: Request, token_id: int) -> Finish | None:
    """The end of a request if `token_id` is none: its logits failed, or no token is allowed. None if it is a token.

    That none is allowed is a "stop" where the text of a grammar is complete: only an end-of-sequence token could come,
    and min_tokens or the like forbids it.
    """
    why = WHY_NO_TOKEN.get(token_id)
    if why is None:
        return None
    complete = token_id == NOTHING_ALLOWED and is_complete(request.constraint)
    return Finish("stop", None) if complete else Finish("error", why)


def _prompt_logprobs(request: Request, result: RunnerOutput) -> tuple[int, LogprobRows] | None:
    """What of the request's prompt log-probabilities is new, if anything."""
    found = result.prompt_logprobs.get(request.request_id)
    return None if found is None else request.take_prompt_logprobs(*found)
