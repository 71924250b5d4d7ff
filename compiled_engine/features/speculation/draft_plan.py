"""Plans drafts, and counts their results.

Decides how many drafts a step has, how sharply they are sampled, and when the draft head is skipped. Skipping the head
saves the head's time in steps without drafts. A head that has not read all of a request's tokens cannot draft for it,
so the requests of a step that skips the head stop drafting until they are admitted again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compiled_engine.engine.messages import RunnerOutput
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request, RequestStatus
from compiled_engine.engine.steps import StepBuilder, StepInFlight
from compiled_engine.features.speculation.draft_length import DraftLength, Drafts
from compiled_engine.features.speculation.draft_sharpness import DraftSharpness, set_sharpness, sharpness_of
from compiled_engine.features.speculation.extras import VERIFIED_DRAFTS, VerifiedDrafts

# Metrics that add up over replicas.
COUNTERS = (
    *("drafted_requests", "draft_tokens", "accepted_tokens", "accepted_by_position"),
    *("draft_lengths", "rested"),
)
GAUGES = ("resting",)


@dataclass(slots=True)
class DraftCounts:
    """Counts of drafts since the start."""

    by_position: list[int]  # accepted drafts, by position from 0
    requests: int = 0  # how often a request had drafts in a step
    tokens: int = 0  # drafts

    def verified(self, num_drafts: int, num_right: int) -> None:
        """Count a request's drafts in a step. The first `num_right` of `num_drafts` drafts were right."""
        self.requests += 1
        self.tokens += num_drafts
        for position in range(num_right):
            self.by_position[position] += 1

    def metrics(self) -> dict[str, Any]:
        """Return the counts under the names of metrics."""
        return {
            "drafted_requests": self.requests,
            "draft_tokens": self.tokens,
            "accepted_tokens": sum(self.by_position),
            "accepted_by_position": {str(position): count for position, count in enumerate(self.by_position)},
        }


@dataclass(slots=True)
class TimedStep:
    """A step whose duration may be measured."""

    step: StepInFlight
    num_drafts: int | None  # drafts per decode, if the step has only decodes and at least half of them have as many
    begun_s: float  # time of planning, in seconds of time.perf_counter

    @property
    def rows(self) -> tuple[int | None, bool, list[str], list[int]]:
        """Key of the step's rows. The runner reuses the previous step's rows if the two steps have equal keys."""
        output = self.step.output
        return self.num_drafts, output.single, output.request_ids, output.counts


class DraftPlan(PlanFeature):
    """Plans the drafts of each step.

    `most` is the most drafts of a request in a step, and `max_num_requests` the most requests of a step. `length`
    chooses the number of drafts of each step; None: always `most`. See SpeculationConfig for `sharpnesses`.
    """

    def __init__(
        self,
        most: int,
        max_num_requests: int,
        steps_in_flight: int,
        *,
        length: DraftLength | None = None,
        sharpnesses: Sequence[float] = (1.0,),
    ) -> None:
        self._most, self._max_num_requests, self._steps_ahead = most, max_num_requests, steps_in_flight - 1
        self._length = length
        self._sharpness = DraftSharpness(sharpnesses) if len(sharpnesses) > 1 else None
        self._step_sharpness = sharpnesses[0]  # of the step that is being planned
        self._counts = DraftCounts([0] * most)
        self._drafts = Drafts(most)  # of the step that is being planned
        self._num_drafts: int | None = None  # TimedStep.num_drafts of the step that is being planned
        self._stopped: set[Request] = set()
        self._num_stopped = 0
        self._in_flight: deque[TimedStep] = deque()
        self._updated: TimedStep | None = None  # the step processed last
        self._updated_s = 0.0  # when that was, in seconds of time.perf_counter

    def decode_tokens(self, running: Sequence[Request], num_waiting: int) -> int:
        """Choose the step's number of drafts.

        Return the most tokens that a decode computes: its newest token and the drafts.

        If no request runs, the number of waiting requests counts.
        """
        if self._length is not None:
            num_requests = len(running) or min(num_waiting, self._max_num_requests)
            drafting = [
                request
                for request in running
                if request.max_new_tokens_per_step > 1 and request.num_computed_tokens + 1 == request.num_tokens
            ]
            self._drafts = self._length.choose(num_requests, len(drafting))
        return 1 + self._drafts.number

    def built(self, builder: StepBuilder) -> None:
        if self._length is not None and self._length.skips_head:
            self._skip_head(builder)
        if self._sharpness is not None and not builder.single and not builder.is_empty:
            self._step_sharpness = self._sharpness.choose()
        num_decodes, num_requests = len(builder.decodes), len(builder.decodes) + len(builder.others.requests)
        of_decodes = not (builder.num_prefill_tokens or builder.new) and 2 * num_decodes >= num_requests
        self._num_drafts = builder.decode_tokens - 1 if of_decodes else None

    def _skip_head(self, builder: StepBuilder) -> None:
        """Decide whether the step skips the head. If it does, its requests stop drafting.

        The step skips the head if `_drafts.skips_head` is set, or if it has no drafts and all its requests have stopped
        drafting before.
        """
        requests = (*builder.decodes, *builder.others.requests)
        reading = [request for request in requests if request.max_new_tokens_per_step > 1]
        builder.single = self._drafts.skips_head or not (reading or self._drafts.number)
        if not builder.single:
            return
        self._num_stopped += len(reading)
        self._stopped.update(reading)
        for request in reading:
            request.limit_to_single_tokens()

    def planned(self, step: StepInFlight) -> None:
        if not step.output.single:
            set_sharpness(step.output, self._step_sharpness)
        self._in_flight.append(TimedStep(step, self._num_drafts, time.perf_counter()))

    def updated(self, step: StepInFlight, result: RunnerOutput) -> None:
        timed = self._in_flight.popleft()
        if not step.output.single:
            self._verify(step, result)
        if self._length is not None:
            self._time(timed, self._length)

    def _verify(self, step: StepInFlight, result: RunnerOutput) -> None:
        lengths = [1] * len(step.sampling) if result.lengths is None else result.lengths
        every_drafts = result.columns.get(VERIFIED_DRAFTS) or [VerifiedDrafts()] * len(lengths)
        for request, count, (num_drafts, num_right) in zip(step.sampling, lengths, every_drafts, strict=True):
            if num_drafts:
                self._counts.verified(num_drafts, num_right)
                if self._sharpness is not None and not request.sampling_params.greedy:
                    self._sharpness.verified(sharpness_of(step.output), right=num_right > 0)
            bound = step.bounds.get(request, step.decode_tokens)
            if self._length is not None and bound > 1:
                self._length.verified(bound - 1, count - 1)

    def _time(self, timed: TimedStep, length: DraftLength) -> None:
        """Report the duration of a step of decodes to `length`.

        The host works on the neighbouring steps while the step runs. So nothing is reported unless the steps after it
        are in flight already, and they and the step before it have the same number of drafts.
        """
        before, begun_s = self._updated, max(timed.begun_s, self._updated_s)
        self._updated, self._updated_s = timed, time.perf_counter()
        if timed.num_drafts is None or before is None or len(self._in_flight) < self._steps_ahead:
            return
        in_a_row = True
        for beside in (before, *self._in_flight):
            if beside.step.decode_tokens != timed.step.decode_tokens:
                return
            in_a_row &= beside.rows == timed.rows
        num_requests, skipped = len(timed.step.requests), timed.step.output.single
        seconds = self._updated_s - begun_s
        length.took(num_requests, timed.num_drafts, seconds, head_rested=skipped, in_a_row=in_a_row)

    def ended(self, request: Request) -> None:
        self._stopped.discard(request)

    def failed(self) -> None:
        self._in_flight.clear()

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of DraftCounts, DraftLength and DraftSharpness, with `resting` and `rested`.

        resting: running requests that have stopped drafting now. rested: how often a request has stopped drafting.
        """
        found = self._counts.metrics()
        for chosen in (self._length, self._sharpness):
            found |= {} if chosen is None else chosen.metrics()
        running = [request for request in self._stopped if request.status is RequestStatus.RUNNING]
        found["resting"] = sum(request.is_limited_to_single_tokens for request in running)
        return found | {"rested": self._num_stopped}


class NoDrafts(PlanFeature):
    """Reports the metrics of drafts in an engine without drafts."""

    def metrics(self) -> dict[str, Any]:
        return DraftCounts([]).metrics() | {"resting": 0, "rested": 0}
