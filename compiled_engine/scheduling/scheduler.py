"""The scheduler: which tokens of which requests the next step computes.

Prefill and decode are the same to it: every request has tokens that are known but not computed, and each step
shares a token budget among them (chunked prefill as in Sarathi-Serve; Agrawal et al., arXiv:2403.02310).
Running requests come first, then waiting ones are admitted strictly in order. When the blocks run out, the
request that is last in order is preempted, to be computed again later.
"""

from __future__ import annotations

import bisect
import operator

from compiled_engine.config import CacheConfig, SchedulerConfig
from compiled_engine.engine_io import EngineOutput, EngineRequest
from compiled_engine.scheduling.kv_cache_manager import KVCacheManager
from compiled_engine.scheduling.request import Request, RequestStatus
from compiled_engine.scheduling.step import NewRequest, RunnerOutput, ScheduledRequest, SchedulerOutput
from compiled_engine.scheduling.stop import check_stop
from compiled_engine.scheduling.waiting_queue import WaitingQueue

POLICIES = ("fcfs", "priority")

_order = operator.attrgetter("order")


class Scheduler:
    """Call `schedule`, have the runner execute its output, call `update` with both; repeat while unfinished.

    Requests may be added and aborted at any time, between `schedule` and `update` as well. If a step fails,
    abort its requests and call `update` with an empty RunnerOutput: that frees what they held.

    `num_computed_tokens` advances in `schedule`. A request that is aborted in flight keeps its blocks until
    `update`, so that none is given out while a step may still write to it.
    """

    def __init__(self, scheduler: SchedulerConfig, cache: CacheConfig, num_blocks: int) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(scheduler, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(scheduler, name)}")
        if scheduler.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {scheduler.policy!r}")
        self._config = scheduler
        self._kv_cache = KVCacheManager(num_blocks, cache.block_size, cache.enable_prefix_caching)
        # The last token of a sequence is never computed, so it needs no slot.
        self._max_total_tokens = min(scheduler.max_model_len, self._kv_cache.num_slots + 1)
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # sorted by order
        self._in_flight: dict[str, Request] = {}
        self._removed: list[str] = []
        self._least_free = num_blocks
        self._num_arrived = 0
        self._step = 0
        self._last = SchedulerOutput(0, (), (), ())
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_finished = 0
        self._num_aborted = 0

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ValueError if its id is in use, or if it can never be computed."""
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            raise ValueError(f"prompt_token_ids of request {request.request_id!r} must not be empty")
        needed = f"request {request.request_id!r} needs {num_tokens + 1} tokens ({num_tokens} of prompt + 1)"
        if num_tokens + 1 > self._config.max_model_len:
            raise ValueError(f"{needed}, but max_model_len is {self._config.max_model_len}")
        if num_tokens + 1 > self._kv_cache.num_slots:
            raise ValueError(
                f"{needed}, but the KV cache holds {self._kv_cache.num_slots} "
                f"({self._kv_cache.pool.num_blocks} blocks of {self._kv_cache.block_size})"
            )
        priority = request.priority if self._config.policy == "priority" else 0
        order = (priority, self._num_arrived)
        self._num_arrived += 1
        queued = Request.of(request, order, self._max_total_tokens)
        self._requests[request.request_id] = queued
        self._waiting.push(queued)

    def abort(self, request_id: str, *, stopped: bool = False) -> EngineOutput | None:
        """End a request; what a step in flight yields for it is ignored. None if it is unknown or ended.

        `stopped`: it counts as finished, since the caller found its output complete.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._removed.append(request_id)
            if request_id not in self._in_flight:
                self._kv_cache.free(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self._num_finished += stopped
        self._num_aborted += not stopped
        return EngineOutput(request_id, (), finish_reason="abort", num_cached_tokens=request.num_cached_tokens or 0)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def schedule(self) -> SchedulerOutput:
        """The next step; it computes something if any request is unfinished.

        Raises RuntimeError while another step is in flight.
        """
        if self._in_flight:
            raise RuntimeError(f"step {self._step} is in flight: its result must be passed to update() first")
        self._step += 1
        scheduled: list[ScheduledRequest] = []
        budget = self._schedule_running(scheduled)
        new = self._admit_waiting(scheduled, budget)
        self._least_free = min(self._least_free, self._kv_cache.pool.num_free)
        self._num_steps += bool(scheduled)
        removed, self._removed = tuple(self._removed), []
        single = [request for request in scheduled if request.num_tokens == 1]
        several = [request for request in scheduled if request.num_tokens != 1]
        self._last = SchedulerOutput(self._step, removed, tuple(new), tuple(single + several))
        return self._last

    def _schedule_running(self, scheduled: list[ScheduledRequest]) -> int:
        """Returns the budget left for waiting requests: none if blocks ran out, as they would be next to go."""
        running, budget = self._running, self._config.max_num_batched_tokens
        num_preemptions = self._num_preemptions
        index = 0
        while index < len(running):
            request = running[index]
            index += 1
            # Those behind it keep a token each, so that no long prompt holds up a decode.
            num_tokens = len(request.token_ids) - request.num_computed_tokens
            if num_tokens > 1:
                num_tokens = min(num_tokens, budget - (len(running) - index))
            while (new_block_ids := self._kv_cache.allocate(request, num_tokens)) is None:
                if self._preempt_last() is request:
                    return 0
            budget -= num_tokens
            scheduled.append(self._schedule_tokens(request, num_tokens, new_block_ids))
        return budget if self._num_preemptions == num_preemptions else 0

    def _admit_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> list[NewRequest]:
        new: list[NewRequest] = []
        while self._waiting and budget > 0 and len(self._running) < self._config.max_num_seqs:
            request = self._waiting.peek()
            # Each running request keeps room to grow by a block, lest this one be preempted right away.
            if not self._kv_cache.admit(request, reserve=len(self._running)):
                break
            self._waiting.pop()
            request.status = RequestStatus.RUNNING
            bisect.insort(self._running, request, key=_order)
            num_tokens = min(len(request.token_ids) - request.num_computed_tokens, budget)
            budget -= num_tokens
            new.append(request.as_new())
            scheduled.append(self._schedule_tokens(request, num_tokens, ()))
        return new

    def _schedule_tokens(self, request: Request, num_tokens: int, new_block_ids: tuple[int, ...]) -> ScheduledRequest:
        start = request.num_computed_tokens
        end = request.num_computed_tokens = start + num_tokens
        self._kv_cache.register(request)
        self._in_flight[request.request_id] = request
        return ScheduledRequest(request.request_id, start, num_tokens, new_block_ids, end == len(request.token_ids))

    def _preempt_last(self) -> Request:
        """Take the blocks of the last running request; it waits in its old place to be computed again."""
        request = self._running.pop()
        self._kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED
        self._waiting.push(request)
        self._removed.append(request.request_id)
        self._num_preemptions += 1
        return request

    def update(self, step: SchedulerOutput, result: RunnerOutput) -> list[EngineOutput]:
        """Take in what a step produced; an output for each request that it gave something or ended.

        Raises RuntimeError if `step` is not the one in flight.
        """
        if step.step != self._step or len(step.scheduled) != len(self._in_flight):
            raise RuntimeError(f"step {step.step} is not in flight; the last one scheduled is {self._step}")
        in_flight, self._in_flight = self._in_flight, {}
        num_finished = self._num_finished
        outputs = []
        for scheduled in step.scheduled:
            request = in_flight[scheduled.request_id]
            if request.status is RequestStatus.FINISHED:
                # Aborted in flight, perhaps because the step failed and what it was to write is not there.
                self._kv_cache.unregister(request, scheduled.num_computed_tokens)
                self._kv_cache.free(request)
                continue
            output = self._advance(request, scheduled.samples, result)
            if output is not None:
                outputs.append(output)
        if self._num_finished > num_finished:
            self._running = [r for r in self._running if r.status is RequestStatus.RUNNING]
        return outputs

    def fail_step(self) -> None:
        """Take back the last step, whose result will not come: its requests end, and its removals are sent again."""
        for scheduled in self._last.scheduled:
            self.abort(scheduled.request_id)
        if self._in_flight:
            self.update(self._last, RunnerOutput({}))
        self._removed = [*self._last.removed, *self._removed]

    def _advance(self, request: Request, samples: bool, result: RunnerOutput) -> EngineOutput | None:
        """Add what a step produced for one request; None if that is nothing to tell."""
        request_id = request.request_id
        prompt_logprobs = None
        if request_id in result.prompt_logprobs:
            prompt_logprobs = request.take_prompt_logprobs(*result.prompt_logprobs[request_id])
        cached = request.num_cached_tokens or 0
        if not samples:
            if prompt_logprobs is None:
                return None
            return EngineOutput(request_id, (), prompt_logprobs=prompt_logprobs, num_cached_tokens=cached)
        token_id = result.token_ids[request_id]
        logprobs = (result.logprobs[request_id],) if request_id in result.logprobs else None
        request.token_ids.append(token_id)
        finish = check_stop(request.stop_rule, token_id, len(request.token_ids) - request.num_prompt_tokens)
        if finish is None:
            return EngineOutput(request_id, (token_id,), logprobs, prompt_logprobs, None, None, cached)
        self._finish(request)
        reason, stop_reason = finish
        return EngineOutput(request_id, (token_id,), logprobs, prompt_logprobs, reason, stop_reason, cached)

    def _finish(self, request: Request) -> None:
        """Free what a request holds; `update` takes it off the list of those that run."""
        request.status = RequestStatus.FINISHED
        self._kv_cache.free(request)
        del self._requests[request.request_id]
        self._removed.append(request.request_id)
        self._num_finished += 1

    def metrics(self) -> dict[str, int | float]:
        """Now: running and waiting (requests), kv_usage (share of the blocks held, 0 to 1), blocks_free.

        Since the start: kv_usage_peak, prefix_queries and prefix_hits (prompt tokens), preemptions, finished
        (by a stop or the length), aborted, steps.
        """
        pool = self._kv_cache.pool
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "kv_usage": 1 - pool.num_free / pool.num_blocks,
            "kv_usage_peak": 1 - self._least_free / pool.num_blocks,
            "blocks_total": pool.num_blocks,
            "blocks_free": pool.num_free,
            "prefix_queries": self._kv_cache.prefix_queries,
            "prefix_hits": self._kv_cache.prefix_hits,
            "preemptions": self._num_preemptions,
            "finished": self._num_finished,
            "aborted": self._num_aborted,
            "steps": self._num_steps,
        }

    def check_idle(self) -> None:
        """The part of check_integrity that costs nothing: without requests, every block must be free."""
        pool = self._kv_cache.pool
        if not self._requests and pool.num_free != pool.num_blocks:
            raise RuntimeError(f"no request is left, but only {pool.num_free} of {pool.num_blocks} blocks are free")

    def check_integrity(self) -> None:
        """Raise RuntimeError, saying what is wrong, unless each block and request is accounted for once."""
        if [r.order for r in self._running] != sorted({r.order for r in self._running}):
            raise RuntimeError(f"running requests are not in order: {[r.request_id for r in self._running]}")
        if len(self._running) + len(self._waiting) != len(self._requests):
            raise RuntimeError(
                f"{len(self._requests)} requests are known, but {len(self._running)} run and {len(self._waiting)} wait"
            )
        aborted = [r for r in self._in_flight.values() if r.status is RequestStatus.FINISHED]
        self._kv_cache.check_integrity(self._running + aborted)
