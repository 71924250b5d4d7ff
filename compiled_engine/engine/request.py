"""Request, the scheduler's data about a request: its tokens, how many are computed, its limits, and when it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

from compiled_engine.engine.messages import ROOT, EngineRequest, NewRequest
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import NO_TOKENS


class Finish(NamedTuple):
    """The reason why a request ended, see EngineOutput."""

    reason: str
    stop_reason: int | str | None


LENGTH = Finish("length", None)


class StopRule(msgspec.Struct, frozen=True):
    """The conditions that end a request. min_tokens and max_tokens count output tokens."""

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int  # the smallest limit on length

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: frozenset[int], room: int) -> StopRule:
        """Return the conditions of a request. room: most output tokens within the context length and the KV cache."""
        return cls(
            frozenset() if params.ignore_eos else eos_token_ids,
            frozenset(params.stop_token_ids or ()),
            params.min_tokens,
            room if params.max_tokens is None else min(params.max_tokens, room),
        )


def check_stop(rule: StopRule, token_id: int, num_output_tokens: int) -> Finish | None:
    """Return how a request ends with its newest output token, `token_id`; None if it continues.

    A stop token does not end a request of fewer than `min_tokens` output tokens. The limit on length always does.
    """
    if num_output_tokens >= rule.min_tokens:
        if token_id in rule.eos_token_ids:
            return Finish("stop", None)
        if token_id in rule.stop_token_ids:
            return Finish("stop", token_id)
    if num_output_tokens >= rule.max_tokens:
        return LENGTH
    return None


class RequestStatus(Enum):
    """The state of a request. The waiting queue has WAITING and PREEMPTED requests. Only RUNNING ones hold blocks."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    ENDING = auto()  # the token in flight reaches the length limit, so nothing is left to schedule
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Request:
    """A request, from `Scheduler.add` until it ends. Compared by identity, as ids may be reused."""

    asked: EngineRequest  # the request as received, with the data that features need
    request_id: str
    order: tuple[int, int]  # (priority, arrival number); the smaller one is served first
    token_ids: list[int]  # the prompt, then the known output
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int]
    stop_rule: StopRule
    max_num_tokens: int  # the length at which it ends, prompt included
    ending_ids: frozenset[int]  # tokens that may end it earlier, and error codes
    # Number of tokens, those that steps in flight sample included. An upper bound while such a step may yield fewer
    # than max_new_tokens_per_step; exact once all steps are processed.
    num_tokens: int
    samples_late: bool = False  # its sampling awaits inputs that a feature computes while its steps run
    failure: str | None = None  # why it ends with the next processed step; None if it does not
    prefix_root: bytes = ROOT  # see EngineRequest
    max_new_tokens_per_step: int = 1  # most tokens that a step may yield for it
    most_when_admitted: int = 1  # max_new_tokens_per_step at admission, from where a feature may lower it to 1
    status: RequestStatus = RequestStatus.WAITING
    # Number of leading tokens with K and V in the cache, steps in flight included; an upper bound like num_tokens.
    num_computed_tokens: int = 0
    num_slots: int = 0  # tokens that its blocks hold; set by the KVCacheManager alone, like next_block_end
    next_block_end: int = 0  # number of known tokens from which the next block is offered to the prefix cache
    # block size -> hashes of leading full blocks; they outlive a preemption
    block_hashes: dict[int, list[bytes]] = field(default_factory=dict)
    num_cached_tokens: int | None = None  # prompt tokens in the prefix cache at the first admission; None before
    scheduled_time: float | None = None  # of the first admission, in seconds of time.perf_counter; None before
    max_step_tokens: int = sys.maxsize  # most known tokens that one step computes
    step_ends: tuple[int, ...] = ()  # token counts, ascending, at which a step must end, see PlanFeature.reached_end
    # Most tokens that may be computed; once more are known, all are computed again, see PlanFeature.outgrown.
    outgrown_at: int = sys.maxsize
    computes_every_token: bool = False  # compute prompt tokens even if cached, as their outputs are needed
    returns_tokens: bool = True  # its sampled tokens are its output; otherwise they mean nothing
    extras: dict[str, Any] = field(default_factory=dict)  # see NewRequest; sent at each admission
    has_sampled: bool = False  # a step has sampled one of its tokens since it was admitted
    steady_until_computed: int = 0  # limits of the fast path, see `set_steady_limits`
    steady_until_known: int = 0

    @classmethod
    def of(
        cls,
        request: EngineRequest,
        order: tuple[int, int],
        max_total_tokens: int,
        max_new_tokens_per_step: int = 1,
    ) -> Request:
        """Make a waiting request. max_total_tokens: most tokens of prompt and output together.

        max_new_tokens_per_step: most tokens that a step of this engine yields per request. The request gets 1 instead
        if its parameters ask for it, or if its logits depend on the tokens generated so far.
        """
        params = request.sampling_params
        gets_one = max_new_tokens_per_step > 1 and (params.edits_by_output or params.disable_spec_decode)
        most = 1 if gets_one else max_new_tokens_per_step
        num_prompt_tokens = len(request.prompt_token_ids)
        room = max_total_tokens - num_prompt_tokens
        rule = StopRule.of(params, request.eos_token_ids, room)
        made = cls(
            asked=request,
            request_id=request.request_id,
            order=order,
            token_ids=[*request.prompt_token_ids, *request.output_token_ids],
            num_prompt_tokens=num_prompt_tokens,
            sampling_params=params,
            eos_token_ids=request.eos_token_ids,
            stop_rule=rule,
            max_num_tokens=num_prompt_tokens + rule.max_tokens,
            ending_ids=rule.eos_token_ids | rule.stop_token_ids | NO_TOKENS,
            num_tokens=num_prompt_tokens + len(request.output_token_ids),
            max_new_tokens_per_step=most,
            most_when_admitted=most,
            prefix_root=request.prefix_root,
        )
        if request.output_token_ids:
            made.set_steady_limits()
        return made

    def start(self) -> None:
        """Set the status to RUNNING, when the request is admitted for the first time or after a preemption."""
        self.status = RequestStatus.RUNNING
        self.max_new_tokens_per_step = self.most_when_admitted
        if self.scheduled_time is None:
            self.scheduled_time = time.perf_counter()

    def limit_to_single_tokens(self) -> None:
        """Let steps yield at most one token for this request, until it is admitted the next time."""
        self.max_new_tokens_per_step = 1
        self.set_steady_limits()

    @property
    def is_limited_to_single_tokens(self) -> bool:
        """Whether `limit_to_single_tokens` was called since the last admission."""
        return self.max_new_tokens_per_step < self.most_when_admitted

    def set_steady_limits(self) -> None:
        """Recompute the limits of the scheduler's fast path, where one integer comparison replaces all other checks.

        While fewer than `steady_until_computed` tokens are computed, the next step is an ordinary decode for this
        request: it yields up to max_new_tokens_per_step tokens, fits the request's blocks, is not the first to sample a
        token, and cannot reach the length limit. While fewer than `steady_until_known` tokens are known, the next token
        is ordinary: it is not the first output token, and ends the request only if it is one of ending_ids.
        """
        self.steady_until_computed, self.steady_until_known = self.steady_limits()

    def steady_limits(self) -> tuple[int, int]:
        """Return (steady_until_computed, steady_until_known)."""
        if self.failure is not None or self.status is RequestStatus.FINISHED:
            return 0, 0
        last = self.max_num_tokens - 1
        decodes = self.num_computed_tokens + 1 == self.num_tokens
        generates = len(self.token_ids) > self.num_prompt_tokens
        most = self.max_new_tokens_per_step
        longest = min(self.num_slots - most + 1, last - most, self.outgrown_at - most + 1)
        until_computed = longest if decodes and self.has_sampled else 0
        return until_computed, last if generates else 0

    def correct_counts(self, bound: int, count: int) -> None:
        """Correct the token counts after a step that has yielded `count` tokens. They assumed `bound` tokens."""
        self.num_tokens -= bound - count
        if self.status is RequestStatus.RUNNING:
            self.num_computed_tokens -= bound - count

    @property
    def may_decode(self) -> bool:
        """Whether the next step is a decode: one token is left to compute, and the length limit is not reached.

        The token may be one that a step in flight samples.
        """
        return self.num_computed_tokens + 1 == self.num_tokens < self.max_num_tokens

    @property
    def step_limit(self) -> int:
        """Most tokens of the request that the next step may compute, not counting guesses."""
        if not self.step_ends:
            return self.max_step_tokens
        return min(self.max_step_tokens, self.step_ends[0] - self.num_computed_tokens)

    @property
    def num_unknown_tokens(self) -> int:
        """The number of tokens that steps in flight sample for the request; 0 once it has ended."""
        return 0 if self.status is RequestStatus.FINISHED else self.num_tokens - len(self.token_ids)

    @property
    def awaits_token(self) -> bool:
        """Whether a step in flight samples a token of the request."""
        return self.num_tokens > len(self.token_ids)

    def as_new(self, block_ids: tuple[tuple[int, ...], ...], extras: dict[str, Any]) -> NewRequest:
        """Return the message that brings the request to the runner.

        block_ids: the request's block table in each KV group. extras: see NewRequest.
        """
        return NewRequest(
            request_id=self.request_id,
            token_ids=tuple(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            sampling_params=self.sampling_params,
            eos_token_ids=self.eos_token_ids,
            block_ids=block_ids,
            samples_late=self.samples_late,
            extras=extras,
        )


def check_requests(requests: Collection[Request], running: Sequence[Request], num_waiting: int) -> None:
    """Raise RuntimeError unless all requests are consistent.

    Running requests must be in order. Each request must be running, waiting, or awaiting its last token. The limits of
    the fast path must be up to date.
    """
    if [request.order for request in running] != sorted({request.order for request in running}):
        raise RuntimeError(f"running requests are not in order: {[request.request_id for request in running]}")
    ending = sum(request.status is RequestStatus.ENDING for request in requests)
    if len(running) + num_waiting + ending != len(requests):
        raise RuntimeError(
            f"{len(requests)} requests are known, but {len(running)} run, {num_waiting} wait "
            f"and {ending} await their last token"
        )
    for request in requests:
        if (request.steady_until_computed, request.steady_until_known) != request.steady_limits():
            raise RuntimeError(
                f"request {request.request_id!r} has fast-path limits "
                f"{(request.steady_until_computed, request.steady_until_known)}; expected {request.steady_limits()}"
            )
