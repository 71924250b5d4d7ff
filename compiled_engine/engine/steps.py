"""The scheduler's data about a step: while it is built (StepBuilder) and in flight (StepInFlight), and its outputs.

A request's share of a step is the range of its tokens that the step computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from compiled_engine.engine.messages import EngineOutput, NewRequest, RunnerOutput, SchedulerOutput, StepOutputs
from compiled_engine.engine.request import Finish, Request, RequestStatus
from compiled_engine.sampling.sampled_tokens import NOTHING_ALLOWED, WHY_NO_TOKEN

OutputExtras = Callable[[Request, dict[str, Any]], dict[str, Any]]
"""The type of PlanFeature.output_extras."""


@dataclass(slots=True)
class Shares:
    """Which tokens of which requests a step computes, in lists of equal length; see SchedulerOutput."""

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class StepBuilder:
    """A step that is being built: the scheduler adds requests one by one, with the tokens to compute (their share)."""

    max_prefill_tokens: int | None = None  # most prompt tokens of this step; None: as many as the budget allows
    decode_tokens: int = 1
    # Requests with a share of `decode_tokens` tokens, chunks of prompts included; they sample unless in `unsampled`.
    decodes: list[Request] = field(default_factory=list)
    decode_starts: list[int] = field(default_factory=list)
    unsampled: list[int] = field(default_factory=list)  # indices of decodes that do not sample
    others: Shares = field(default_factory=Shares)  # all other shares
    # Prompt tokens, in decodes and others. A share that is only the last token of a prompt counts as a decode.
    num_prefill_tokens: int = 0
    # most tokens that the step yields, for requests with fewer than decode_tokens
    bounds: dict[Request, int] = field(default_factory=dict)
    # Requests with a share, no longer than a decode's, that completes a block. No request of this step may read that
    # block, because a kernel may write it while another row attends.
    completing_block: list[Request] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    single: bool = False  # see SchedulerOutput

    def add(self, request: Request, start: int, count: int, samples: bool) -> None:
        if count == self.decode_tokens:
            if not samples:
                self.unsampled.append(len(self.decodes))
            self.decodes.append(request)
            self.decode_starts.append(start)
            return
        others = self.others
        others.requests.append(request)
        others.starts.append(start)
        others.counts.append(count)
        others.samples.append(samples)

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.others.requests)

    def room_for_prompts(self, budget: int) -> int:
        """Return how many prompt tokens the step may still get, of a budget of `budget` tokens."""
        most = self.max_prefill_tokens
        return budget if most is None else min(budget, most - self.num_prefill_tokens)


@dataclass(slots=True)
class StepInFlight:
    """A step that was sent to the runner and whose result is not processed yet."""

    output: SchedulerOutput
    requests: list[Request]  # in the step's order, ended ones included
    sampling: list[Request]  # requests that sample
    sampling_ids: list[str]
    late: list[Request]  # requests that sample late
    # Blocks in the prefix cache that this step or an earlier one in flight writes, see KVCacheManager.take_registered.
    registered: list[list[int]]
    bounds: dict[Request, int]  # see StepBuilder
    decode_tokens: int  # see StepBuilder

    @classmethod
    def of(
        cls,
        number: int,
        builder: StepBuilder,
        removed: tuple[str, ...],
        registered: list[list[int]],
        *,
        any_late: bool,
    ) -> StepInFlight:
        """Return the step that `builder` has built, with the SchedulerOutput to send to the runner.

        number: the step's number. removed: see SchedulerOutput. registered: see the field. any_late: whether any
        unfinished request samples late, that is, awaits LateInputs; if not, the step's requests are not searched for
        late ones.
        """
        others, num_decodes = builder.others, len(builder.decodes)
        requests = builder.decodes + others.requests
        samples = all_but(builder.unsampled, num_decodes) + others.samples
        request_ids = [request.request_id for request in requests]
        sampling, sampling_ids = requests, request_ids
        if not all(samples):
            sampling, sampling_ids = list(compress(sampling, samples)), list(compress(sampling_ids, samples))
        late = [request for request in sampling if request.samples_late] if any_late else []
        output = SchedulerOutput(
            step=number,
            removed=removed,
            new=tuple(builder.new),
            request_ids=request_ids,
            starts=builder.decode_starts + others.starts,
            counts=[builder.decode_tokens] * num_decodes + others.counts,
            samples=samples,
            new_block_ids=builder.new_block_ids,
            samples_late=bool(late),
            single=builder.single,
        )
        return cls(output, requests, sampling, sampling_ids, late, registered, builder.bounds, builder.decode_tokens)


class StepsInFlight(deque[StepInFlight]):
    """A queue of the steps in flight, at most `most`, the oldest first."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def require_room(self) -> None:
        """Raise RuntimeError if the queue is full."""
        if len(self) == self._most:
            raise RuntimeError(f"step {self[0].output.step} is in flight: its result must be passed to update() first")

    def find(self, step: SchedulerOutput) -> StepInFlight:
        """Return the step in flight that was sent as `step`. Raises RuntimeError if it is not in flight."""
        for found in self:
            if found.output is step:
                return found
        raise RuntimeError(f"step {step.step} is not in flight")

    def oldest(self, step: SchedulerOutput) -> StepInFlight:
        """Return the oldest step in flight. Raises RuntimeError if it was not sent as `step`."""
        if not self or self[0].output is not step:
            raise RuntimeError(f"step {step.step} is not the oldest one in flight")
        return self[0]


def step_outputs(
    step: StepInFlight, result: RunnerOutput, not_steady: Sequence[int], others: Sequence[EngineOutput]
) -> StepOutputs:
    """Return the outputs of a step with one token per request.

    not_steady: indices of tokens to leave out of the columns of StepOutputs, because their requests have an output in
    `others` or have ended. others: see StepOutputs.
    """
    request_ids, token_ids, logprobs, columns = step.sampling_ids, result.token_ids, result.logprobs, result.columns
    if not_steady:
        steady = all_but(not_steady, len(token_ids))
        request_ids, token_ids = list(compress(request_ids, steady)), list(compress(token_ids, steady))
        logprobs = None if logprobs is None else logprobs.select(steady)
        if columns:
            columns = {name: list(compress(column, steady)) for name, column in columns.items()}
    return StepOutputs(request_ids, token_ids, others, logprobs, None, columns)


def extra_outputs(step: StepInFlight, result: RunnerOutput, hooks: Sequence[OutputExtras]) -> list[EngineOutput]:
    """Return outputs without tokens, for the step's requests that do not sample but for which a feature has data.

    hooks: PlanHooks.output_extras.
    """
    outputs = []
    for request, samples in zip(step.requests, step.output.samples, strict=True):
        if samples or request.status is RequestStatus.FINISHED:
            continue
        extras: dict[str, Any] = {}
        for extras_of in hooks:
            extras |= extras_of(request, result.extras)
        if extras:
            cached = request.num_cached_tokens or 0
            outputs.append(EngineOutput(request.request_id, (), num_cached_tokens=cached, extras=extras))
    return outputs


def tokens_output(
    request: Request, tokens: slice, finish: Finish | None, result: RunnerOutput, extras: dict[str, Any]
) -> EngineOutput:
    """Return the output of a request for a step. tokens: the slice of `result.token_ids` that has its tokens.

    finish: how the request ends; None if it continues. extras: see EngineOutput.
    """
    request_id = request.request_id
    token_ids = tuple(result.token_ids[tokens]) if request.returns_tokens else ()
    logprobs = None
    if token_ids and (many := result.many_logprobs.get(request_id)) is not None:
        logprobs = many.select(slice(len(token_ids)))
    elif token_ids and result.logprobs is not None and request.sampling_params.logprobs is not None:
        logprobs = result.logprobs.select(tokens)
    reason, stop_reason = finish or (None, None)
    return EngineOutput(
        request_id,
        token_ids,
        logprobs,
        finish_reason=reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.num_cached_tokens or 0,
        scheduled_time=request.scheduled_time,
        extras=extras,
    )


def no_token(
    request: Request, token_id: int, nothing_allowed: Sequence[Callable[[Request], Finish | None]]
) -> Finish | None:
    """Return how a request ends if `token_id` is an error code; None if it is a token.

    nothing_allowed: the hooks PlanFeature.nothing_allowed.
    """
    why = WHY_NO_TOKEN.get(token_id)
    if why is None:
        return None
    finish = Finish("error", why)
    if token_id == NOTHING_ALLOWED:
        for ends in nothing_allowed:
            finish = ends(request) or finish
    return finish


def all_but(indices: Iterable[int], count: int) -> list[bool]:
    """Return a list of `count` booleans that are False at `indices` and True elsewhere."""
    chosen = [True] * count
    for index in indices:
        chosen[index] = False
    return chosen
