"""The scheduler: decides which tokens of which requests the next step computes, and processes the step's result.

Prefill and decode are treated alike: every request has known tokens that are not computed, and each step divides a
token budget among requests (chunked prefill as in Sarathi-Serve; Agrawal et al., arXiv:2403.02310). Running requests
come first, then waiting ones are admitted in order. A request is only overtaken if a feature does not let it start or
gives it no share of the step, or if a pause holds it back. If blocks run out, the last request in order is preempted
and recomputed later.

With several steps in flight, a step is scheduled before the tokens of the previous one are known. Scheduling only needs
their number: length limits are known in advance, and tokens sampled for a request that has ended are dropped. If a step
may yield several tokens per request (`max_new_tokens_per_step`), only the device knows their number until the step is
processed. The scheduler assumes the maximum, allocates blocks for it, and corrects the counts in `update`.

A request may sample late: its sampling needs late inputs, such as the tokens that a grammar allows, which the host
computes while the step runs. Only the step's sampling waits for them.

The scheduler's data are in other files: a step while it is planned and in flight in steps.py, the running and waiting
requests in request_table.py, their blocks in kv_cache.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from compiled_engine.config import CacheConfig, SchedulerConfig
from compiled_engine.engine.block_pool import BlockGroup
from compiled_engine.engine.cache_resource import CacheResource, RequestRows
from compiled_engine.engine.kv_cache import KVCacheManager
from compiled_engine.engine.messages import (
    EngineOutput,
    EngineRequest,
    LateInputs,
    RequestLimits,
    RunnerOutput,
    SchedulerOutput,
    StepOutputs,
)
from compiled_engine.engine.plan_hooks import PlanFeature, PlanHooks
from compiled_engine.engine.request import Finish, Request, RequestStatus, check_stop
from compiled_engine.engine.request_table import RequestTable
from compiled_engine.engine.steps import (
    StepBuilder,
    StepInFlight,
    StepsInFlight,
    extra_outputs,
    no_token,
    step_outputs,
    tokens_output,
)

# A step with decodes has at most max_prefill_tokens * max(1, waiting requests // FEW_WAITING) prompt tokens: when many
# requests wait, waiting delays prompts more than prompts delay decodes.
FEW_WAITING = 4


class Scheduler:
    """Plans steps and processes their results.

    While requests are unfinished, call `schedule`, have the runner execute the returned step, and call `update` with
    the step and its result. Up to `steps_in_flight` steps may be scheduled before the first `update`; they are executed
    and updated in the order of scheduling. If a step's sampling awaits inputs from the host (`samples_late`), call
    `begin_late` and `finish_late` in between. If a step fails, call `fail_step`. Requests may be added and aborted at
    any time.

    A request's `num_tokens` and `num_computed_tokens` advance in `schedule`, its `token_ids` in `update`.

    max_new_tokens_per_step: most tokens that a step yields per request; if 1, every request that samples gets exactly
    one. yields_tokens: requests get output tokens; otherwise a request ends with its first token (max_tokens is 1),
    whose id is meaningless. whole: each prompt is computed in one step and holds no blocks (num_blocks is 0). features:
    see plan_hooks.py.
    """

    def __init__(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        num_blocks: int,
        vocab_size: int,
        steps_in_flight: int = 1,
        max_new_tokens_per_step: int = 1,
        yields_tokens: bool = True,
        *,
        whole: bool = False,
        features: Sequence[PlanFeature] = (),
    ) -> None:
        self._config, self._whole = scheduler, whole
        self._max_new_tokens_per_step = max_new_tokens_per_step
        most = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens // max_new_tokens_per_step)
        self.hooks = PlanHooks(features)  # the engine core uses them too
        groups = [] if whole else [BlockGroup(num_blocks, cache.block_size)]
        others: list[CacheResource] = [RequestRows(most * math.prod(feature.num_parts for feature in features))]
        for feature in features:
            others += feature.resources(groups)
        self._kv_cache = KVCacheManager(groups, others, enable_prefix_caching=cache.enable_prefix_caching)
        self._limits = RequestLimits(
            vocab_size,
            scheduler.max_model_len,
            self._kv_cache.num_slots,
            yields_tokens=yields_tokens,
            max_whole_prompt=scheduler.max_num_batched_tokens if whole else None,
        )
        self._most_prompt_tokens, self._max_total_tokens = (
            self._limits.most_prompt_tokens,
            self._limits.max_total_tokens,
        )
        self._requests = RequestTable(self._kv_cache, self.hooks)
        self._in_flight = StepsInFlight(steps_in_flight)
        # Running requests that the newest step brings to their length limit. They are retired by the next `schedule`,
        # as their last step still needs their rows.
        self._reaching_limit: list[Request] = []
        self._counts = SchedulerCounts(least_free=num_blocks)
        self._admits_new = True

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ValueError as `check` does."""
        self.check(request)
        priority = request.priority if self._config.policy == "priority" else 0
        order = (priority, self._counts.arrived)
        self._counts.arrived += 1
        self._requests.add(Request.of(request, order, self._max_total_tokens, self._max_new_tokens_per_step))

    def check(self, request: EngineRequest) -> None:
        """Raise ValueError if the request's id is in use, or if its prompt is empty or too long."""
        if request.request_id in self._requests.by_id:
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        if not 0 < (num_tokens := len(request.prompt_token_ids)) <= self._most_prompt_tokens:
            self._limits.check_length(f"prompt_token_ids of request {request.request_id!r}", num_tokens)

    def abort(self, request_id: str, *, stopped: bool = False) -> EngineOutput | None:
        """End a request and return its last output; None if it is unknown or has ended.

        Its blocks are freed at once, even if steps in flight write to them: kv_cache.py explains why this is safe. The
        results of these steps are ignored. stopped: the caller found the output complete, so count the request as
        finished, not as aborted.
        """
        request = self._requests.by_id.get(request_id)
        if request is None:
            return None
        self._requests.drop(request)
        self._counts.finished += stopped
        self._counts.aborted += not stopped
        return EngineOutput(request_id, (), finish_reason="abort", num_cached_tokens=request.num_cached_tokens or 0)

    def has_unfinished(self) -> bool:
        return bool(self._requests.by_id)

    def has_begun(self) -> bool:
        """Return whether any unfinished request has been admitted to a step."""
        return any(request.status is not RequestStatus.WAITING for request in self._requests.by_id.values())

    def request_ids(self) -> list[str]:
        """Return the ids of all unfinished requests."""
        return [*self._requests.by_id]

    def admit_new(self, admits: bool) -> None:
        """Set whether steps may admit requests for the first time. Requests that have begun continue in any case."""
        self._admits_new = admits
        self._requests.waiting.restore()

    def schedule(self) -> SchedulerOutput | None:
        """Return the next step; None if nothing can be computed now, for example until tokens in flight are known.

        Raises RuntimeError if the maximum number of steps is in flight.
        """
        self._in_flight.require_room()
        if self._reaching_limit:
            self._retire()
        preemptions_before = self._counts.preemptions
        running, waiting = self._requests.running, self._requests.waiting
        parts: Iterable[tuple[Sequence[Request], int]] = ((running, sys.maxsize),)
        if self.hooks.divide is not None:
            parts = self.hooks.divide(running, waiting, len(self._in_flight))
        for of_step, room in parts:
            builder = self._build_step(of_step, room, preemptions_before)
            if not builder.is_empty:
                break
        else:
            return None
        for request in builder.completing_block:
            self._kv_cache.register(request)
        self._counts.steps += 1
        if builder.new or builder.new_block_ids:  # otherwise no block was taken
            self._counts.least_free = min(self._counts.least_free, self._kv_cache.num_free_blocks)
        removed, registered = self._requests.take_removed(), self._kv_cache.take_registered()
        step = StepInFlight.of(self._counts.steps, builder, removed, registered, any_late=self._requests.num_late > 0)
        for planned in self.hooks.planned:
            planned(step)
        self._in_flight.append(step)
        return step.output

    def _retire(self) -> None:
        self._requests.retire(self._reaching_limit)
        self._reaching_limit = []

    def _build_step(self, of_step: Sequence[Request], room: int, preemptions_before: int) -> StepBuilder:
        """Build a step of the running requests `of_step` and at most `room` waiting ones. The step may be empty.

        preemptions_before: the number of preemptions before this step was planned. If the number has grown, blocks have
        run out, and no request is admitted, since it would be preempted next.
        """
        num_waiting, decode_tokens = len(self._requests.waiting), self._max_new_tokens_per_step
        if self.hooks.decode_tokens is not None:
            decode_tokens = self.hooks.decode_tokens(of_step, num_waiting)
        max_prefill_tokens = None
        if (most := self._config.max_prefill_tokens) is not None and any(request.may_decode for request in of_step):
            max_prefill_tokens = most * max(1, num_waiting // FEW_WAITING)
        builder = StepBuilder(max_prefill_tokens, decode_tokens)
        budget = self._schedule_running(builder, of_step)
        if num_waiting and budget > 0 and self._counts.preemptions == preemptions_before:
            self._admit_waiting(builder, builder.room_for_prompts(budget), room)
        for built in self.hooks.built:
            built(builder)
        # In an engine whose steps may yield several tokens, numbers of tokens are only exact if this step and those in
        # flight yield at most one for each request. In other engines they always are, see `_schedule_tokens`.
        if builder.single and all(step.output.single for step in self._in_flight):
            requests = (*builder.decodes, *builder.others.requests)
            self._reaching_limit += [request for request in requests if request.num_tokens == request.max_num_tokens]
        return builder

    def _schedule_running(self, builder: StepBuilder, running: Sequence[Request]) -> int:
        """Let the step compute tokens of running requests. Returns the token budget left for waiting requests.

        running: the running requests that the step may have, in order.
        """
        budget, decode_tokens = self._config.max_num_batched_tokens, builder.decode_tokens
        add_request, add_start = builder.decodes.append, builder.decode_starts.append
        outgrown: list[Request] = []
        for index, request in enumerate(running, 1):
            start = request.num_computed_tokens
            # The limits of a request that does not run are 0, so its status needs no check.
            if start < request.steady_until_computed and decode_tokens <= request.max_new_tokens_per_step:
                add_request(request)
                add_start(start)
                request.num_computed_tokens = start + decode_tokens
                request.num_tokens += decode_tokens
                budget -= decode_tokens
                continue
            if request.status is not RequestStatus.RUNNING:  # preempted just now; `running` may be a copy
                continue
            if request.num_tokens == request.max_num_tokens:  # an upper bound, which steps in flight will correct
                continue
            room = request.outgrown_at - start
            if room <= 0:  # `start` is an upper bound too
                if not request.awaits_token:
                    outgrown.append(request)
                continue
            num_uncomputed = request.num_tokens - start
            if num_uncomputed > 1:
                # Reserve the tokens of a decode for each later request, so that no long prompt delays a decode.
                room = min(room, builder.room_for_prompts(budget - (len(running) - index) * decode_tokens))
                if room < 1:
                    continue
                num_tokens, bound = min(num_uncomputed, room, request.step_limit), 1
            else:
                most, left = request.max_new_tokens_per_step, request.max_num_tokens - request.num_tokens
                num_tokens = bound = min(most, decode_tokens, left, room)
            for limit_share in self.hooks.limit_share:
                num_tokens = limit_share(request, num_tokens)
            if not num_tokens:
                continue
            while (new_block_ids := self._kv_cache.allocate(request, num_tokens)) is None:
                self._counts.preemptions += 1
                if self._requests.preempt_last() is request:
                    return 0
            if new_block_ids:
                builder.new_block_ids[request.request_id] = new_block_ids
            budget -= num_tokens
            self._schedule_tokens(builder, request, num_tokens, bound)
        if outgrown:
            self._requests.preempt(outgrown)
        return budget

    def _admit_waiting(self, builder: StepBuilder, budget: int, room: int) -> None:
        waiting, running = self._requests.waiting, self._requests.running
        for reconsiders in self.hooks.reconsiders:
            if reconsiders():
                waiting.restore()
        while budget > 0 and len(builder.new) < room and (request := waiting.peek()) is not None:
            # A preempted request waits until its tokens in flight are known, and requests behind it in order wait too.
            if request.awaits_token or (self._whole and request.num_tokens > budget):
                break
            if request.num_tokens > request.outgrown_at:
                for let_grow in self.hooks.outgrown:
                    let_grow(request)
            if not self._admits_new and request.status is RequestStatus.WAITING:
                waiting.skip()
                continue
            if self.hooks.may_start and not all(may_start(request) for may_start in self.hooks.may_start):
                waiting.skip()
                continue
            # Reserve a block for each running request, so that the new one is not preempted at once.
            if not self._kv_cache.admit(request, reserve=len(running)):
                break
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget, request.step_limit)
            for limit_share in self.hooks.limit_share:
                num_tokens = limit_share(request, num_tokens)
            if not num_tokens:
                self._kv_cache.cancel(request)
                waiting.skip()
                continue
            self._requests.start(request)
            budget -= num_tokens
            extras = {**request.extras}
            for admitted in self.hooks.admitted:
                admitted(request, extras)
            block_ids = self._kv_cache.block_ids(request)
            builder.new.append(request.as_new(block_ids, extras))
            self._schedule_tokens(builder, request, num_tokens, bound=1)

    def _schedule_tokens(self, builder: StepBuilder, request: Request, num_tokens: int, bound: int) -> None:
        """Let the step compute the request's next `num_tokens` tokens, guesses included, and advance its token counts.

        bound: most new tokens that the step yields for the request if it reaches the last known token.
        """
        start = request.num_computed_tokens
        end = request.num_computed_tokens = start + num_tokens
        samples = end >= request.num_tokens
        builder.add(request, start, num_tokens, samples)
        begins_at_last_token = start + 1 == request.num_tokens  # a decode: further tokens are guesses
        if not begins_at_last_token:
            builder.num_prefill_tokens += num_tokens
        if end >= request.next_block_end:
            if num_tokens <= self._max_new_tokens_per_step:
                builder.completing_block.append(request)
            else:
                self._kv_cache.register(request)
        if end in request.step_ends:
            request.step_ends = request.step_ends[1:]
            for reached_end in self.hooks.reached_end:
                reached_end(request, end)
        if samples:
            request.has_sampled = True
            request.num_tokens += bound
            if bound < builder.decode_tokens:
                builder.bounds[request] = bound
            # With several tokens per step, `_build_step` finds these requests.
            if request.num_tokens == request.max_num_tokens and self._max_new_tokens_per_step == 1:
                self._reaching_limit.append(request)
        request.set_steady_limits()

    def knows_tokens_before(self, step: SchedulerOutput) -> bool:
        """Return whether the host has the tokens from which this step's late inputs are computed.

        They are the earlier tokens of the requests that sample late. The host lacks some while an earlier step in
        flight samples any of these requests.
        """
        # One unknown token is the step's own.
        return not any(request.num_unknown_tokens > 1 for request in self._in_flight.find(step).late)

    def begin_late(self, step: SchedulerOutput) -> None:
        """Start computing the inputs that only a step's sampling awaits. `finish_late` returns them.

        Another step may be scheduled in between. Raises RuntimeError unless `knows_tokens_before`.
        """
        if not self.knows_tokens_before(step):
            raise RuntimeError(f"step {step.step} samples late, after tokens of a step in flight")
        late = self._in_flight.find(step).late
        for begin_late in self.hooks.begin_late:
            begin_late(late)

    def finish_late(self) -> LateInputs:
        """Wait for the inputs whose computation the last `begin_late` has started, and return them.

        A request whose input fails ends in `update`.
        """
        extras: dict[str, Any] = {}
        for finish_late in self.hooks.finish_late:
            extras |= finish_late()
        return LateInputs(extras)

    def update(self, step: SchedulerOutput, result: RunnerOutput) -> StepOutputs:
        """Process a step's result, and return outputs for the requests that got tokens or features' data, or ended.

        Raises RuntimeError if `step` is not the oldest one in flight, or yields more tokens than allowed.
        """
        in_flight = self._in_flight.oldest(step)
        num_ended = self._counts.finished + self._counts.aborted
        others = extra_outputs(in_flight, result, self.hooks.output_extras) if result.extras else []
        single = self._max_new_tokens_per_step == 1 or step.single
        add = self._add_single_tokens if single else self._add_several_tokens
        outputs = add(in_flight, result, others)
        self._in_flight.popleft()
        for updated in self.hooks.updated:
            updated(in_flight, result)
        if self._counts.finished + self._counts.aborted > num_ended:
            self._requests.sweep()
        return outputs

    def _add_single_tokens(
        self, in_flight: StepInFlight, result: RunnerOutput, others: list[EngineOutput]
    ) -> StepOutputs:
        """Process a step with one token per request, and return its outputs.

        Requests on the fast path only get a token and log-probabilities, in the columns of StepOutputs. others: outputs
        of the step so far; the outputs of all other requests are appended.
        """
        if result.lengths is not None:
            raise RuntimeError(f"step {in_flight.output.step} yields several tokens for a request; allowed: one")
        in_columns = not (result.many_logprobs or result.extras)
        not_steady: list[int] = []
        indices = range(len(in_flight.sampling))
        for request, token_id, index in zip(in_flight.sampling, result.token_ids, indices, strict=True):
            known = request.token_ids
            if in_columns and len(known) < request.steady_until_known and token_id not in request.ending_ids:
                known.append(token_id)
                if len(known) >= request.next_block_end:
                    self._kv_cache.register(request)
                continue
            not_steady.append(index)
            if (output := self._add_tokens(request, slice(index, index + 1), result)) is not None:
                for name, column in result.columns.items():
                    output.extras[name] = column[index]
                others.append(output)
        return step_outputs(in_flight, result, not_steady, others)

    def _add_several_tokens(
        self, in_flight: StepInFlight, result: RunnerOutput, others: list[EngineOutput]
    ) -> StepOutputs:
        """Process a step with 0 to `max_new_tokens_per_step` tokens per request, and return its outputs.

        The requests' token counts, which assume the maximum, are corrected. others: see `_add_single_tokens`.
        """
        lengths = result.lengths if result.lengths is not None else [1] * len(in_flight.sampling)
        in_columns = not (result.many_logprobs or result.extras)
        places: list[int] = []
        first = 0
        for index, (request, count) in enumerate(zip(in_flight.sampling, lengths, strict=True)):
            tokens, first = slice(first, first + count), first + count
            if not 0 <= count <= (bound := in_flight.bounds.get(request, in_flight.decode_tokens)):
                raise RuntimeError(f"request {request.request_id!r} gets {count} tokens; allowed: 0 to {bound}")
            request.correct_counts(bound, count)
            token_ids, known = result.token_ids[tokens], request.token_ids
            is_steady = len(known) + count <= request.steady_until_known and request.ending_ids.isdisjoint(token_ids)
            if in_columns and is_steady:
                if count:
                    places.append(index)
                    known += token_ids
                    if len(known) >= request.next_block_end:
                        self._kv_cache.register(request)
            elif (output := self._add_tokens(request, tokens, result)) is not None:
                for name, column in result.columns.items():
                    output.extras[name] = column[index]
                others.append(output)
        every = StepOutputs(in_flight.sampling_ids, result.token_ids, (), result.logprobs, lengths, result.columns)
        return every.part(places, others)

    def _add_tokens(self, request: Request, tokens: slice, result: RunnerOutput) -> EngineOutput | None:
        """Append a step's tokens to a request, up to the token that ends it, and return its output.

        tokens: the slice of `result.token_ids` that has the request's tokens. Returns None if the request has already
        ended, or if the output would be empty.
        """
        if request.status is RequestStatus.FINISHED:
            return None
        end, num_known = tokens.start, len(request.token_ids)
        finish = None if request.failure is None else Finish("error", request.failure)
        while finish is None and end < tokens.stop:
            token_id = result.token_ids[end]
            finish = no_token(request, token_id, self.hooks.nothing_allowed)
            if finish is None:
                end += 1
                request.token_ids.append(token_id)
                finish = check_stop(request.stop_rule, token_id, len(request.token_ids) - request.num_prompt_tokens)
        if len(request.token_ids) >= request.next_block_end:
            self._kv_cache.register(request)
        extras: dict[str, Any] = {}
        if num_known == request.num_prompt_tokens and request.returns_tokens:
            for first_extras in self.hooks.first_extras:
                extras |= first_extras(request)
        if result.extras:  # inlined, as a step may end many requests
            for extras_of in self.hooks.output_extras:
                extras |= extras_of(request, result.extras)
        output = tokens_output(request, slice(tokens.start, end), finish, result, extras)
        if finish is None:
            request.set_steady_limits()
        else:
            self._requests.end(request)
            self._counts.finished += finish.reason != "error"
            self._counts.aborted += finish.reason == "error"
        return output if output.new_token_ids or extras or finish is not None else None

    def fail_step(self) -> None:
        """Drop the steps in flight after a failure, and end all requests that run or are in a dropped step.

        The next step frees the rows of these requests, and the rows that the dropped steps were to free.
        """
        self._kv_cache.unregister(self._kv_cache.take_registered())
        removed: list[str] = []
        for step in self._in_flight:
            self._kv_cache.unregister(step.registered)
            removed += step.output.removed
        # A step that failed while being scheduled is not in flight yet, but its requests are running.
        affected = [*self._requests.running, *(request for step in self._in_flight for request in step.requests)]
        self._in_flight.clear()
        for request in affected:
            if request.status is not RequestStatus.FINISHED:
                self._requests.end(request)
                self._counts.aborted += 1
        self._requests.sweep()
        self._requests.removed = list(dict.fromkeys(removed + self._requests.removed))
        for failed in self.hooks.failed:
            failed()

    def reset_prefix_cache(self, *, of_running: bool = False) -> None:
        """Empty the prefix cache.

        of_running: preempt all running requests, which are then computed again; otherwise they keep their blocks.
        """
        self._kv_cache.reset_prefix_cache()
        self._retire()
        while of_running and self._requests.running:
            self._counts.preemptions += 1
            self._requests.preempt_last()

    def forget_stale(self, *, of_running: bool) -> None:
        """Empty the prefix cache if a feature reports stale keys and values.

        Running requests then keep their blocks but add none to the prefix cache. If all keys and values are stale and
        of_running is True, or if keys and values are lost, they are preempted instead, and computed again.
        """
        for takes_stale in self.hooks.takes_stale:
            if stale := takes_stale():
                self.reset_prefix_cache(of_running=stale == "lost" or (of_running and stale == "all"))
                for request in self._requests.running:
                    self._kv_cache.keep_apart(request)

    def metrics(self) -> dict[str, Any]:
        """Return the scheduler's and the features' metrics by name, see SchedulerCounts.metrics."""
        waiting = len(self._requests.waiting)
        found: dict[str, Any] = self._counts.metrics(
            self._kv_cache, running=len(self._requests.by_id) - waiting, waiting=waiting
        )
        found["waiting_by_reason"] = self._waiting_by_reason()
        for metrics in self.hooks.metrics:
            found |= metrics()
        return found

    def _waiting_by_reason(self) -> dict[str, int]:
        """Return the numbers of waiting requests by the reason why they wait.

        "feature": the request is skipped, because a feature or a pause does not let it start. All others wait in order
        and count under one reason: the kind of resource that the first one lacked when it was last tried, or else
        "turn".
        """
        found = dict.fromkeys(("feature", *(each.kind for each in self._kv_cache.resources), "turn"), 0)
        found["feature"] = self._requests.waiting.num_skipped
        found[self._kv_cache.lacking or "turn"] += len(self._requests.waiting) - found["feature"]
        return found

    def check_idle(self) -> None:
        """Raise RuntimeError if no request is left and blocks are still held. Takes constant time."""
        if not self._requests.by_id:
            self._kv_cache.check_all_free()

    def check_integrity(self) -> None:
        """Raise RuntimeError, naming the fault, unless requests, rows and blocks are consistent."""
        self._requests.check_integrity()


@dataclass(slots=True)
class SchedulerCounts:
    """Counts of requests, steps, preemptions and free blocks since the start of a scheduler, for its metrics."""

    least_free: int  # fewest free blocks after scheduling a step
    arrived: int = 0
    steps: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0

    def metrics(self, kv_cache: KVCacheManager, *, running: int, waiting: int) -> dict[str, Any]:
        """Return current values and counts since the start, as metrics by name.

        Current values are running and waiting requests, kv_usage (fraction of blocks held, 0 to 1) and blocks_free.
        prefix_queries and prefix_hits count prompt tokens; finished counts requests that ended by a stop condition or
        their length.
        """
        blocks, free = kv_cache.num_blocks, kv_cache.num_free_blocks
        total = max(blocks, 1)
        least_free, used = (self.least_free, 1 - free / total) if blocks else (total, 0.0)
        return {
            "running": running,
            "waiting": waiting,
            "kv_usage": used,
            "kv_usage_peak": 1 - least_free / total,
            "blocks_total": blocks,
            "blocks_free": free,
            "prefix_queries": kv_cache.prefix_queries,
            "prefix_hits": kv_cache.prefix_hits,
            "preemptions": self.preemptions,
            "finished": self.finished,
            "aborted": self.aborted,
            "steps": self.steps,
        }
