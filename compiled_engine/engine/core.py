"""The engine core: takes requests, alternates between scheduling and executing steps, and returns new tokens.

`EngineCore.step` is the body of the engine's main loop. Requests and outputs are plain data (messages.py), so that a
core can run in the caller's process or in another one.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, get_args

from msgspec import structs

from compiled_engine.config import EngineConfig
from compiled_engine.engine.control import ControlError, PauseMode, apply
from compiled_engine.engine.executor import Executor, PendingOutput
from compiled_engine.engine.messages import (
    NO_CACHE,
    ControlCall,
    EngineOutput,
    EngineRequest,
    SchedulerOutput,
    StepOutputs,
)
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.process.forks import unless_forked
from compiled_engine.process.profiling import StepClock
from compiled_engine.sampling.params import derived

log = logging.getLogger("compiled_engine")

# Longest wait for a held-back request, or for data of a request, if there is nothing else to do.
PATIENCE_S = 0.005


CALLS = ("metrics", "reset_prefix_cache", "check_integrity", "pause", "resume", "is_paused")
"""Control calls that a core serves, besides those of its features: methods of EngineCore."""


PAUSED = "the engine is paused"


class Pause(NamedTuple):
    """The arguments of `EngineCore.pause`, kept until `resume`."""

    mode: str
    clear_cache: bool


class EngineCore:
    """Schedules requests, has their steps executed, and returns outputs. Not thread-safe: one thread calls it.

    clock: measures the parts of a step for benchmarks: schedule, prepare, launch, late, wait and output. start_s:
    duration of the engine's start in seconds. features: the planning parts of the enabled features.
    """

    # A file descriptor that is readable when an event needs a step; None here, as no event arrives between steps.
    bell: int | None = None

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: StepClock,
        start_s: float = 0.0,
        *,
        features: Sequence[PlanFeature],
    ):
        self.config = config
        self.clock = clock
        self.executor = executor
        self._free = weakref.finalize(self, unless_forked(executor.close))  # if `close` is not called
        self._free.atexit = False
        self._steps_in_flight = config.steps_in_flight
        self._scheduler = Scheduler(
            config.scheduler,
            config.cache,
            executor.num_blocks,
            config.model.vocab_size,
            self._steps_in_flight,
            config.max_new_tokens_per_step,
            yields_tokens=config.model.yields_tokens,
            whole=not config.model.causal,
            features=features,
        )
        # Number of tokens that the KV cache holds.
        self.num_slots = executor.num_blocks * config.cache.block_size if config.model.causal else NO_CACHE
        self._hooks = self._scheduler.hooks
        self._submitted: deque[tuple[SchedulerOutput, PendingOutput]] = deque()  # steps in flight, the oldest first
        self._late: SchedulerOutput | None = None  # the newest step, if its late inputs cannot be computed yet
        self._late_begun = False  # whether the last submitted step's late inputs are being computed
        self._held_back: set[str] = set()  # requests that a feature holds back
        self._num_held_back_ended = 0  # number of requests that ended while they were held back
        self._ended_apart: list[EngineOutput] = []  # of requests that ended in no step, not yet returned
        self._seeds = random.Random(config.model.seed)
        self._start_s = start_s
        self._generated_tokens = 0
        self.held = ""  # why no step is planned; "" if steps are
        self.patience_s = 0.0  # how long to wait for a message before the next step, if the last one found no work
        self._pause: Pause | None = None  # since `pause`, until `resume`

    def add(self, request: EngineRequest, given: Any = None) -> None:
        """Queue a request. given: the part of the request that is not plain data, such as a token mask object.

        A feature may hold a request back, for example until its grammar is compiled. A later step then queues it, or
        ends it with finish_reason "error" if its preparation failed. A request without a seed gets one here, so that
        it gets the same tokens if it is preempted and computed again.

        Raises ValueError if the request can never fit, its id is in use, or a feature does not support it.
        """
        if request.request_id in self._held_back:
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        self._scheduler.check(request)  # first, as features prepare for a request when they check it
        for check in self._hooks.check:
            check(request)
        if request.sampling_params.seed is None:
            params = derived(request.sampling_params, seed=self._seeds.getrandbits(63))
            request = structs.replace(request, sampling_params=params)
        if self._hooks.holds_back is not None and self._hooks.holds_back(request, given):
            self._held_back.add(request.request_id)
            return
        self._scheduler.add(request)

    def abort(self, request_id: str, *, stopped: bool = False) -> EngineOutput | None:
        """End a request now, and return its last output, with finish_reason "abort".

        Returns None if the request has already ended or is unknown.

        stopped: a stop string has completed the request's output, so the metrics count it as finished, not as aborted.
        """
        if request_id in self._held_back:
            self._withdraw(request_id)
            return EngineOutput(request_id, (), finish_reason="abort", num_cached_tokens=0)
        return self._scheduler.abort(request_id, stopped=stopped)

    def step(self) -> StepOutputs:
        """Launch as many steps as possible, then process the oldest one and return its outputs.

        Outputs that belong to no step, see `_take_apart`, are added; if no step is in flight, only these are returned.

        With async scheduling, the device already has the next step while a step's result is processed; with pipeline
        stages it has one more step per further stage. If requests of the newest step sample late (see scheduler.py),
        their late inputs are computed as soon as all earlier tokens are known, while the device still computes the
        logits. Meanwhile, outputs are returned and the next step is scheduled. Then the sampling is launched, and after
        it the next step.

        A step whose requests have all ended may remain pending; a later call processes it, without outputs. If a
        feature fails a request, the request ends with finish_reason "error", and the others continue. If a step fails,
        the error is raised, and the requests that run or are part of a step in flight are aborted; waiting requests
        continue.
        """
        if self._held_back:
            self._add_ready()
        if self._pause is not None:
            self._note_held()  # the last request that had begun may have ended
        try:
            while len(self._submitted) < self._steps_in_flight and self._late is None and not self.held:
                if (step := self._scheduler.schedule()) is None:
                    break
                self.clock.lap("schedule")
                if self._late_begun:
                    self._give_late()
                self._submitted.append((step, self.executor.submit(step)))
                self.clock.lap("launch")
                if step.samples_late:
                    self._late = step
                    self._begin_late()
            if self._late_begun:
                self._give_late()
            self.patience_s = 0.0 if self._submitted or self._held_back else PATIENCE_S
            if not self._submitted:
                return StepOutputs(others=self._take_apart())
            step, pending = self._submitted.popleft()
            result = pending.result()
            outputs = self._scheduler.update(step, result)
            self._generated_tokens += len(outputs.token_ids) + sum(len(each.new_token_ids) for each in outputs.others)
            self.clock.lap("output")
            if self._late is not None:
                self._begin_late()
        except BaseException:
            # The scheduler first: it is consistent even if the wait for the device is interrupted.
            self._scheduler.fail_step()
            self._drain()
            raise
        self._scheduler.check_idle()
        if not self._ended_apart and not self._hooks.take_asks:
            return outputs
        return replace(outputs, others=[*outputs.others, *self._take_apart()])

    def _begin_late(self) -> None:
        """Start computing the newest step's late inputs, if the tokens of all earlier steps are known.

        Late inputs are data that only the step's sampling awaits, such as the tokens that grammars allow.
        """
        if self._late is not None and self._scheduler.knows_tokens_before(self._late):
            self._scheduler.begin_late(self._late)
            self._late, self._late_begun = None, True
            self.clock.lap("late")

    def _give_late(self) -> None:
        """Wait for the late inputs that `_begin_late` computes, and have the executor sample with them."""
        self._late_begun = False
        self.executor.sample(self._scheduler.finish_late())
        self.clock.lap("late")

    def _add_ready(self) -> None:
        """Queue the held-back requests that are ready. Keep the outputs of failed ones, which `_take_apart` returns."""
        assert self._hooks.take_ready is not None
        busy = self._submitted or self._ended_apart or self._scheduler.has_unfinished()
        ready, failed = self._hooks.take_ready(0 if busy else PATIENCE_S)
        self._held_back -= {output.request_id for output in failed}
        self._num_held_back_ended += len(failed)
        self._ended_apart += failed
        for request in ready:
            try:
                for check in self._hooks.check:  # again, as conditions may have changed
                    check(request)
            except ValueError as error:
                self._withdraw(request.request_id)
                output = EngineOutput(request.request_id, (), finish_reason="error", stop_reason=str(error))
                self._ended_apart.append(output)
            else:
                self._held_back.remove(request.request_id)
                self._scheduler.add(request)

    def _take_apart(self) -> list[EngineOutput]:
        """Return, once each, the outputs that belong to no step.

        They are those of requests that ended outside steps, and those that ask for data (EngineOutput.asks).
        """
        outputs, self._ended_apart = self._ended_apart, []
        for take_asks in self._hooks.take_asks:
            outputs += take_asks()
        return outputs

    def _withdraw(self, request_id: str) -> None:
        self._held_back.remove(request_id)
        self._num_held_back_ended += 1
        for withdrawn in self._hooks.withdrawn:
            withdrawn(request_id)

    def _drain(self) -> None:
        """Wait for all launched steps, and ignore their results and errors."""
        self._late = None
        if self._late_begun:
            with suppress(Exception):
                self._give_late()  # otherwise a step would have no result
        while self._submitted:
            _, pending = self._submitted.popleft()
            with suppress(Exception):
                pending.result()

    def call(self, call: ControlCall) -> Any:
        """Serve a control call, one of CALLS or of a feature, and return its result, which is plain data.

        Raises ControlError if the call is unknown or fails.
        """
        calls = {name: getattr(self, name) for name in CALLS}
        try:
            return apply(call, calls | {name: getattr(each, name) for name, each in self._hooks.answering.items()})
        finally:
            self._note_held()
            self._scheduler.forget_stale(of_running=self._pause is None or self._pause.clear_cache)

    def tell(self, call: ControlCall, request_ids: Sequence[str] = ()) -> None:
        """Serve a control call whose caller awaits no answer. A ControlError is logged.

        request_ids: ignored; only an engine of several cores chooses by it which cores serve the call.
        """
        try:
            self.call(call)
        except ControlError as error:
            log.warning("a control call has failed: %s", error)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless requests, rows and KV blocks are consistent. Checks every block."""
        self._scheduler.check_integrity()

    def reset_prefix_cache(self, of_running: bool = False) -> None:
        """Empty the prefix cache. of_running: running requests are computed again; otherwise they are not affected."""
        self._scheduler.reset_prefix_cache(of_running=of_running)

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Launch no steps until `resume`; with mode "wait", only steps of requests that have begun.

        Requests that arrive meanwhile wait. mode: "abort" ends all requests with finish_reason "abort"; "keep" stops
        them where they are; "wait" lets those that have begun run to their end, after which `is_paused` returns True.
        clear_cache: `resume` empties the prefix cache, and recomputes the kept requests' keys and values; otherwise
        the kept requests continue with their keys and values, even if the weights change meanwhile. A pause that
        follows another without `resume` between them takes its mode, and clears the cache if one of the two does.

        Raises ValueError for another mode.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode is {mode!r}; allowed: {', '.join(get_args(PauseMode))}")
        self._pause = Pause(mode, clear_cache or (self._pause is not None and self._pause.clear_cache))
        self._scheduler.admit_new(False)
        if mode == "abort":
            for request_id in [*self._held_back, *self._scheduler.request_ids()]:
                if (output := self.abort(request_id)) is not None:
                    self._ended_apart.append(structs.replace(output, stop_reason=PAUSED))

    def resume(self) -> None:
        """Run steps again, if they were paused."""
        pause, self._pause = self._pause, None
        self._scheduler.admit_new(True)
        if pause is not None and pause.clear_cache:
            self._scheduler.reset_prefix_cache(of_running=True)

    def is_paused(self) -> bool:
        """Return whether `pause` is in effect: no step is in flight, and none will be launched until `resume`."""
        return self._pause is not None and bool(self.held) and not self._submitted

    def _note_held(self) -> None:
        """Update `held`, the reason why no step is planned. Call it after anything that may change the reason."""
        waits = self._pause is not None and self._pause.mode == "wait" and self._scheduler.has_begun()
        reasons = (PAUSED if self._pause is not None and not waits else "", *(why() for why in self._hooks.holds_steps))
        self.held = next(filter(None, reasons), "")

    def can_step(self) -> bool:
        """Return whether `step` has work to do: whether a request is unfinished or an output is left to return.

        While no step may be planned (`held`), unfinished requests count only if a step is in flight.
        """
        return self.has_unfinished() and (not self.held or bool(self._submitted or self._ended_apart))

    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished() or bool(self._held_back or self._ended_apart)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of scheduler, features and runner by name, with `start_s`, generated tokens and `paused`.

        generated_tokens counts the output tokens of all requests since the start, running ones included.
        """
        own = {"start_s": self._start_s, "generated_tokens": self._generated_tokens, "paused": int(self.is_paused())}
        scheduler = self._scheduler.metrics()
        scheduler["waiting"] += len(self._held_back)
        scheduler["waiting_by_reason"]["feature"] += len(self._held_back)
        scheduler["aborted"] += self._num_held_back_ended
        return own | self.executor.metrics() | scheduler

    def close(self) -> None:
        """Wait for the device and free its memory. This also happens when the last reference to the core is dropped."""
        self._drain()
        for close in self._hooks.close:
            close()
        self._free()
