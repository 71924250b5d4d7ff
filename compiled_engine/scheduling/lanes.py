"""Which running requests a step may have, where the stages of a pipeline work at several steps side by side.

A request's next token takes a whole round through the stages. So requests are divided among as many lanes as there are
stages, and steps take the lanes in turn: while one lane's tokens are on their way, the other stages compute those of
the other lanes. A request joins the lane of the step that samples its first token. A prompt before that belongs to no
lane: each step may have the next chunk of it, so that a long one keeps all stages busy too.

With one stage there is one lane, and every step may have every request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from compiled_engine.scheduling.request import Request


class Lanes:
    """most_requests: of a step, and so of a lane. steps_in_flight: one more than there are lanes at most, for which a
    lane's next step is scheduled before the tokens of its last one are known."""

    def __init__(self, count: int, most_requests: int, steps_in_flight: int) -> None:
        self._count, self._most_requests = count, most_requests
        self._depth = 2 if steps_in_flight > count else 1
        self._newest = count - 1

    def in_turn(self, in_flight: Iterable[int]) -> Iterator[int]:
        """The lanes that a step may be of, the one whose turn it is first. in_flight: those of the steps in flight."""
        busy = list(in_flight)
        for number in range(1, self._count + 1):
            lane = (self._newest + number) % self._count
            if busy.count(lane) < self._depth:
                yield lane

    def took(self, lane: int) -> None:
        """It was its turn."""
        self._newest = lane

    def of_step(self, running: list[Request], lane: int) -> list[Request]:
        """Those of the running requests that a step of the lane may have, in their order."""
        if self._count == 1:
            return running
        found = [request for request in running if request.lane is None or request.lane == lane]
        surplus = len(found) - self._most_requests
        if surplus > 0:  # prompts that come last wait for another lane's step
            left_out = {id(r) for r in [r for r in found if r.lane is None][-surplus:]}
            found = [request for request in found if id(request) not in left_out]
        return found

    def room(self, of_step: Sequence[Request], lane: int, num_running: int, num_waiting: int) -> int:
        """How many waiting requests a step may admit: lanes are to be equally full once all have been admitted."""
        if self._count == 1:
            return num_waiting  # the runner's rows are the bound
        room = self._most_requests - len(of_step)
        share = -(-(num_running + num_waiting) // self._count)
        return min(room, share - sum(request.lane == lane for request in of_step))

    @staticmethod
    def join(request: Request, lane: int) -> None:
        """A step of the lane samples a token of the request."""
        request.lane = lane
