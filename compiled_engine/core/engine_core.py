"""The engine core: scheduler and runner. Requests in, token deltas out, all plain data, no API objects."""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from msgspec import structs

from compiled_engine.config import EngineConfig
from compiled_engine.core.constraints import GrammarQueue
from compiled_engine.core.control import apply
from compiled_engine.core.draft_length import DraftLength
from compiled_engine.core.executor import Executor, PendingOutput
from compiled_engine.core.hooks import PlanFeature, PlanHooks
from compiled_engine.core.scheduler import Scheduler
from compiled_engine.messages import (
    NO_CACHE,
    ControlCall,
    EngineOutput,
    EngineRequest,
    GrammarVocabulary,
    SchedulerOutput,
    StepOutputs,
)
from compiled_engine.process.forks import unless_forked
from compiled_engine.process.profiling import StepClock
from compiled_engine.sampling.params import derived
from compiled_engine.sampling.token_mask import MaskConstraint, TokenMask

# Where all requests wait for their grammars, a step waits so long for one of them.
GRAMMAR_PATIENCE_S = 0.005


CALLS = ("metrics", "reset_prefix_cache", "check_integrity")
"""Control calls that a core takes, besides those of its features: methods of EngineCore."""


class EngineCore:
    """Not thread-safe: one caller adds, aborts and steps.

    num_slots: tokens that the KV cache holds. clock: started by benchmarks; its laps are schedule, prepare,
    launch, masks, wait and output. start_s: seconds that the start took. features: those that are switched on.

    bell: None: no events arrive between steps.
    """

    bell: int | None = None

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: StepClock,
        start_s: float = 0.0,
        features: Sequence[PlanFeature] = (),
    ):
        self.config = config
        self.clock = clock
        self.executor = executor
        self._free = weakref.finalize(self, unless_forked(executor.close))  # if `close` is not called
        self._free.atexit = False
        self._steps_in_flight = config.steps_in_flight
        draft_length = None
        if (speculation := config.speculation).adapts:
            draft_length = DraftLength(speculation.num_tokens, head_rests=speculation.head_rests)
        self._scheduler = Scheduler(
            config.scheduler,
            config.cache,
            executor.num_blocks,
            config.model.vocab_size,
            self._steps_in_flight,
            config.most_new_tokens,
            pools=config.model.pooling is not None,
            whole=not config.model.causal,
            draft_length=draft_length,
            draft_sharpnesses=speculation.sharpnesses,
            features=features,
        )
        self.num_slots = executor.num_blocks * config.cache.block_size if config.model.causal else NO_CACHE
        self._hooks = PlanHooks(features)
        self._answering = {name: feature for feature in features for name in feature.calls}
        self._pending: deque[tuple[SchedulerOutput, PendingOutput]] = deque()  # the oldest step first
        self._unmasked: SchedulerOutput | None = None  # the newest, while it awaits masks that cannot be made yet
        self._masks_begun = False  # those of the newest
        self._grammars = GrammarQueue()
        self._seeds = random.Random(config.model.seed)
        self._start_s = start_s
        self._generated_tokens = 0

    def add(self, request: EngineRequest, token_mask: TokenMask | None = None) -> None:
        """Queue a request; `token_mask` restricts its tokens. A request with a grammar is queued by the first step
        after compilation, or ends with finish_reason "error" if that fails.

        Raises ValueError if the request can never fit, if its id is in use, if its parameters hold a token mask, if its
        grammar has no vocabulary, or if a feature cannot take it.

        A request without a seed gets one here, so that preemption and recompute repeat its tokens.
        """
        if request.request_id in self._grammars.waiting:
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        if request.sampling_params.token_mask is not None:
            raise ValueError("sampling_params.token_mask must be None in an EngineRequest: give the mask to add")
        if request.sampling_params.seed is None:
            params = derived(request.sampling_params, seed=self._seeds.getrandbits(63))
            request = structs.replace(request, sampling_params=params)
        for check in self._hooks.check:
            check(request)
        if request.grammar is not None:
            self._scheduler.check(request)
            if token_mask is not None:
                raise ValueError(f"request {request.request_id!r} must have a grammar or a token mask, got both")
            self._grammars.add(request)
            return
        constraint = None if token_mask is None else MaskConstraint(token_mask, self.config.model.vocab_size)
        self._scheduler.add(request, constraint)

    def set_vocabulary(self, vocabulary: GrammarVocabulary) -> None:
        """Set the vocabulary, before the first request with a grammar; once is enough. Returns at once."""
        self._grammars.set_vocabulary(vocabulary)

    def abort(self, request_id: str, *, stopped: bool = False) -> EngineOutput | None:
        """End a request now; None if it is not known any more. `stopped`: its output is complete, by a stop string."""
        if self._grammars.remove(request_id):
            return EngineOutput(request_id, (), finish_reason="abort", num_cached_tokens=0)
        return self._scheduler.abort(request_id, stopped=stopped)

    def step(self) -> StepOutputs:
        """Launch as many steps as possible, then process the oldest one and return its outputs.

        With async scheduling the device already has the next step while this one's result is processed; each stage of a
        pipeline has a further one. If requests of the newest step have a grammar or a token mask, their constraints get
        new tokens as soon as these are known, while the device still computes the logits. While their masks are
        computed, outputs are returned and the next step is scheduled; then the sampling is launched, and after it that
        step.

        A step without a request left (all ended after its launch) may stay behind; a later call
        takes it in and has no outputs. A request whose grammar or token mask fails ends with finish_reason "error"; the
        others go on.

        If a step fails, running requests are aborted and the error is raised; waiting requests continue.
        """
        failed = self._queue_compiled()
        try:
            while len(self._pending) < self._steps_in_flight and self._unmasked is None:
                if (step := self._scheduler.schedule()) is None:
                    break
                self.clock.lap("schedule")
                self._give_masks()
                self._pending.append((step, self.executor.submit(step)))
                self.clock.lap("launch")
                self._unmasked = step if step.awaits_masks else None
                self._begin_masks()
            self._give_masks()
            if not self._pending:
                return StepOutputs(others=failed)
            step, pending = self._pending.popleft()
            result = pending.result()
            outputs = self._scheduler.update(step, result)
            self._generated_tokens += len(outputs.token_ids) + sum(len(each.new_token_ids) for each in outputs.others)
            self.clock.lap("output")
            self._begin_masks()
        except BaseException:
            self._scheduler.fail_step()
            self._drain()
            raise
        self._scheduler.check_idle()
        return replace(outputs, others=[*outputs.others, *failed]) if failed else outputs

    def _begin_masks(self) -> None:
        """Begin the masks of the newest step, if it awaits any and all tokens before it are known."""
        if self._unmasked is not None and self._scheduler.knows_tokens_before(self._unmasked):
            self._scheduler.begin_masks(self._unmasked)
            self._unmasked, self._masks_begun = None, True
            self.clock.lap("masks")

    def _give_masks(self) -> None:
        """Give the executor the masks that are begun, as soon as they are made."""
        if self._masks_begun:
            self._masks_begun = False
            self.executor.sample(self._scheduler.masks())
            self.clock.lap("masks")

    def _queue_compiled(self) -> list[EngineOutput]:
        """Queue the requests whose grammars are ready; return the outputs that end requests whose grammars failed."""
        if not self._grammars.waiting:
            return []
        busy = self._pending or self._scheduler.has_unfinished()
        ready, failed = self._grammars.take(0 if busy else GRAMMAR_PATIENCE_S)
        for request, constraint in ready:
            try:
                for check in self._hooks.check:
                    check(request)
            except ValueError as error:
                failed.append(EngineOutput(request.request_id, (), finish_reason="error", stop_reason=str(error)))
            else:
                self._scheduler.add(request, constraint)
        return failed

    def _drain(self) -> None:
        """Wait for the steps that are launched. Their results and failures are dropped."""
        self._unmasked = None
        with suppress(Exception):
            self._give_masks()  # else a step has no result
        while self._pending:
            _, pending = self._pending.popleft()
            with suppress(Exception):
                pending.result()

    def call(self, call: ControlCall) -> Any:
        """Apply a call between two steps, one of CALLS or of a feature's; return plain data. Raises ControlError, see
        control.py."""
        return apply(call, self._answering.get(call.name, self), (*CALLS, *self._answering))

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every KV block is accounted for; takes time in proportion to the pool."""
        self._scheduler.check_integrity()

    def reset_prefix_cache(self) -> None:
        """Let no later request find what the prefix cache holds now; requests that run go on as they are."""
        self._scheduler.reset_prefix_cache()

    def can_step(self) -> bool:
        """Return whether a step has work to do."""
        return self.has_unfinished()

    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished() or len(self._grammars.waiting) > 0

    def metrics(self) -> dict[str, Any]:
        """The figures of scheduler, runner and grammars; `start_s`, seconds of construction; and `generated_tokens`,
        those of requests that run included."""
        own = {"start_s": self._start_s, "generated_tokens": self._generated_tokens}
        scheduler = self._scheduler.metrics()
        scheduler["waiting"] += len(self._grammars.waiting)
        return own | self.executor.metrics() | scheduler | self._grammars.metrics()

    def close(self) -> None:
        """Wait for the device and free it. So does dropping the last reference."""
        self._drain()
        self._grammars.close()
        self._free()
