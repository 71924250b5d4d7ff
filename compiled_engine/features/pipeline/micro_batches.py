"""Divides running requests into micro-batches, so that all stages of a pipeline can work at a time on different steps.

A request's next token takes a whole round through the stages. So there are as many micro-batches as stages, and steps
take them in turn. A request joins the micro-batch of the step that samples its first token. Before that, the request
belongs to no micro-batch: each step may have the next chunk of its prompt, so that a long prompt keeps all stages busy
too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Sized

from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.engine.steps import StepInFlight


class MicroBatches(PlanFeature):
    """Chooses the micro-batch of each step.

    `count` is the number of micro-batches. `most_requests` is the most requests that a step may have. `steps_in_flight`
    is `count`, or one more with async scheduling, which schedules the next step of a micro-batch before the tokens of
    the micro-batch's previous step are known.
    """

    def __init__(self, count: int, most_requests: int, steps_in_flight: int) -> None:
        self.num_parts = self._count = count
        self._most_requests = most_requests
        self._depth = 2 if steps_in_flight > count else 1
        self._number = 0  # of the step that is being planned
        self._recent: deque[int] = deque(maxlen=steps_in_flight)  # micro-batches of the newest steps
        self._of: dict[Request, int] = {}  # micro-batches of requests that have sampled; outdated for others

    def divide(
        self, running: Sequence[Request], waiting: Sized, num_in_flight: int
    ) -> Iterator[tuple[Sequence[Request], int]]:
        busy = [*self._recent][len(self._recent) - num_in_flight :]
        first = self._recent[-1] + 1 if self._recent else 0
        for number in range(first, first + self._count):
            self._number = number % self._count
            if busy.count(self._number) < self._depth:
                yield self._part(running, len(waiting))

    def _part(self, running: Sequence[Request], num_waiting: int) -> tuple[Sequence[Request], int]:
        """Return the running requests that the step may have, and the number of waiting requests that it may admit.

        Micro-batches should be equally full once all waiting requests are admitted.
        """
        found = [request for request in running if self._number_of(request) in (None, self._number)]
        surplus = len(found) - self._most_requests
        if surplus > 0:  # prompts that come last wait for a step of another micro-batch
            left_out = {id(r) for r in [r for r in found if self._number_of(r) is None][-surplus:]}
            found = [request for request in found if id(request) not in left_out]
        share = -(-(len(running) + num_waiting) // self._count)
        num_own = sum(self._number_of(request) is not None for request in found)
        return found, min(self._most_requests - len(found), share - num_own)

    def _number_of(self, request: Request) -> int | None:
        """Return the micro-batch of a request; None if it has not sampled its first token."""
        return self._of.get(request) if request.has_sampled else None

    def planned(self, step: StepInFlight) -> None:
        self._recent.append(self._number)
        self._of.update(dict.fromkeys(step.sampling, self._number))

    def ended(self, request: Request) -> None:
        self._of.pop(request, None)
