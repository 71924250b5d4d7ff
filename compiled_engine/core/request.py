"""A request as the scheduler sees it: its tokens so far, how many are computed, where they lie, and when it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

from compiled_engine.messages import ROOT, EngineRequest, NewRequest
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import NO_TOKENS


class Finish(NamedTuple):
    """See EngineOutput."""

    reason: str
    stop_reason: int | str | None


LENGTH = Finish("length", None)


class StopRule(msgspec.Struct, frozen=True):
    """Conditions that end one request. Counts are of output tokens; `max_tokens` is the smallest limit on length."""

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: frozenset[int], room: int) -> StopRule:
        """`room`: most output tokens within the context length and the KV cache."""
        return cls(
            frozenset() if params.ignore_eos else eos_token_ids,
            frozenset(params.stop_token_ids or ()),
            params.min_tokens,
            room if params.max_tokens is None else min(params.max_tokens, room),
        )


def check_stop(rule: StopRule, token_id: int, num_output_tokens: int) -> Finish | None:
    """Return how a request ends with `token_id`, the last of its `num_output_tokens` output tokens; None if it goes on.

    A stop token before `min_tokens` is ignored; the limit on length always holds.
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
    """WAITING and PREEMPTED requests are in the waiting queue. Only RUNNING ones hold blocks.

    ENDING: the length ends it with a token that is in flight, so there is nothing left to schedule.
    """

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    ENDING = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Request:
    """A request, from `Scheduler.add` until it ends. Compared by identity: an id may be used again.

    asked: the request as it came, with what features need of it.
    order: (priority, arrival number); the smaller one is served first.
    token_ids: the prompt, then what was generated, as far as it is known.
    max_num_tokens: the length at which it ends, prompt included.
    ending_ids: the tokens that may end it sooner, and the error codes.
    samples_late: whether its sampling awaits what a feature makes while its steps run.
    failure: why it ends with the next processed step; None if it does not.
    prefix_root: see EngineRequest.
    num_tokens: how many tokens there are, counting those that steps in flight sample. An upper bound as long as such a
    step may yield fewer than max_new_tokens_per_step; exact when all are processed.
    num_computed_tokens: leading tokens whose K and V are in the cache, counting the steps in flight. As exact as
    num_tokens.
    max_new_tokens_per_step: how many tokens a step may yield for it. most_when_admitted: the same, until it
    stops drafting.
    num_slots: tokens that its blocks hold. Only the KVCacheManager sets this and next_block_end.
    next_block_end: tokens that have to be known for the next block to be offered to the prefix cache.
    block_hashes: by block size, of leading full blocks, as far as they were needed; they outlive a preemption.
    num_cached_tokens: prompt tokens found in the prefix cache when first admitted; None before.
    scheduled_time: when it was first admitted, in seconds of time.perf_counter; None before.
    max_step_tokens: known tokens that one step may compute.
    step_ends: numbers of tokens, in order: a step that comes to one ends there, and features are told.
    computes_every_token: whether tokens of its prompt are computed though they are cached, for what they yield.
    yields_tokens: whether the tokens that steps sample for it are its output.
    extras: see NewRequest; what is the same at each admission.
    has_sampled: whether a step has sampled one of its tokens since it was admitted.
    steady_until_computed, steady_until_known: see `set_steady_limits`.
    """

    asked: EngineRequest
    request_id: str
    order: tuple[int, int]
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int]
    stop_rule: StopRule
    max_num_tokens: int
    ending_ids: frozenset[int]
    num_tokens: int
    samples_late: bool = False
    failure: str | None = None
    prefix_root: bytes = ROOT
    max_new_tokens_per_step: int = 1
    most_when_admitted: int = 1
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_slots: int = 0
    next_block_end: int = 0
    block_hashes: dict[int, list[bytes]] = field(default_factory=dict)
    num_cached_tokens: int | None = None
    scheduled_time: float | None = None
    max_step_tokens: int = sys.maxsize
    step_ends: tuple[int, ...] = ()
    computes_every_token: bool = False
    yields_tokens: bool = True
    extras: dict[str, Any] = field(default_factory=dict)
    has_sampled: bool = False
    steady_until_computed: int = 0
    steady_until_known: int = 0

    @classmethod
    def of(
        cls,
        request: EngineRequest,
        order: tuple[int, int],
        max_total_tokens: int,
        max_new_tokens_per_step: int = 1,
    ) -> Request:
        """`max_total_tokens`: most tokens of prompt and output together. max_new_tokens_per_step: of any request; one
        whose logits depend on the tokens generated so far gets one, and so does one that asks for no drafts."""
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
        """Run: the request is admitted to a step, for the first time or again."""
        self.status = RequestStatus.RUNNING
        self.max_new_tokens_per_step = self.most_when_admitted
        if self.scheduled_time is None:
            self.scheduled_time = time.perf_counter()

    def stop_drafting(self) -> None:
        """Have no drafts until the request is admitted again, if ever: a head has not read all of its tokens."""
        self.max_new_tokens_per_step = 1
        self.set_steady_limits()

    @property
    def has_stopped_drafting(self) -> bool:
        """Return whether the request would have drafts if it had not stopped drafting."""
        return self.max_new_tokens_per_step < self.most_when_admitted

    def set_steady_limits(self) -> None:
        """Set the limits again after anything but a steady share or a steady token, which nearly all are: for those,
        the scheduler makes one comparison.

        While fewer than `steady_until_computed` tokens are computed, the request's share of a step is ordinary: it
        samples any number of tokens up to max_new_tokens_per_step, in blocks that it has, is not the first such share,
        and cannot reach the length. While fewer than `steady_until_known` tokens are known, the next token is ordinary:
        it is not the first, and only the last if it is one of ending_ids.
        """
        self.steady_until_computed, self.steady_until_known = self.steady_limits()

    def steady_limits(self) -> tuple[int, int]:
        """Compute the two limits."""
        if self.failure is not None or self.status is RequestStatus.FINISHED:
            return 0, 0
        last = self.max_num_tokens - 1
        decodes = self.num_computed_tokens + 1 == self.num_tokens
        generates = len(self.token_ids) > self.num_prompt_tokens
        most = self.max_new_tokens_per_step
        until_computed = min(self.num_slots - most + 1, last - most) if decodes and self.has_sampled else 0
        return until_computed, last if generates else 0

    def correct_counts(self, bound: int, count: int) -> None:
        """Correct the counts: a step that could yield `bound` tokens has yielded `count`."""
        self.num_tokens -= bound - count
        if self.status is RequestStatus.RUNNING:
            self.num_computed_tokens -= bound - count

    @property
    def step_limit(self) -> int:
        """Known tokens that the next step may compute."""
        if not self.step_ends:
            return self.max_step_tokens
        return min(self.max_step_tokens, self.step_ends[0] - self.num_computed_tokens)

    @property
    def num_unknown_tokens(self) -> int:
        """The number of its tokens that steps in flight sample; 0 once it has ended."""
        return 0 if self.status is RequestStatus.FINISHED else self.num_tokens - len(self.token_ids)

    @property
    def awaits_token(self) -> bool:
        """Return whether a step in flight samples one of its tokens."""
        return self.num_tokens > len(self.token_ids)

    def as_new(self, block_ids: tuple[tuple[int, ...], ...], extras: dict[str, Any]) -> NewRequest:
        """The request as the runner gets it. block_ids: its block table in each KV group. extras: see NewRequest."""
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
    """Raise RuntimeError unless running requests are in order, every request runs, waits or awaits its last token, and
    its fast-path limits are right.
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
