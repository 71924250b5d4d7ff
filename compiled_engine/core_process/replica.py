"""One of several engine cores, each in a process of its own, as the one who divides requests among them sees it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from compiled_engine.core_process.connection import Connection
from compiled_engine.core_process.frames import frame
from compiled_engine.core_process.router import Route
from compiled_engine.core_process.running_core import RunningCore
from compiled_engine.core_process.wire import ToApi, ToCore, encode
from compiled_engine.messages import EngineOutput, EngineRequest

_EXIT_S = 0.5


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request under way, and all that it takes to run it again.

    order: (priority, arrival number). route: where it is; None while it waits for room. token_ids: what it has
    generated. lost: replicas that died with it.
    """

    request: EngineRequest
    order: tuple[int, int]
    route: Route | None = None
    token_ids: list[int] = field(default_factory=list)
    next_prompt_logprob: int = 1
    lost: int = 0

    def add(self, output: EngineOutput) -> None:
        """Take in what a step gave it."""
        self.token_ids += output.new_token_ids
        if output.prompt_logprobs is not None:
            first, rows = output.prompt_logprobs
            self.next_prompt_logprob = first + len(rows)

    def rest(self) -> EngineRequest:
        """The request, or what is left to do of it."""
        if not self.token_ids and self.next_prompt_logprob == 1:
            return self.request
        token_ids = tuple(self.token_ids)
        return replace(self.request, output_token_ids=token_ids, next_prompt_logprob=self.next_prompt_logprob)

    def __lt__(self, other: RoutedRequest) -> bool:
        return self.order < other.order


@dataclass(eq=False)
class Replica:
    """`connection` is that to `core`. name: for people. num_slots: see EngineCore. clock_ahead_s: how far our clock
    is ahead of its own. metrics: what it has answered last. has_answered: any call so far."""

    number: int
    name: str
    core: RunningCore
    connection: Connection[ToApi]
    num_slots: int
    clock_ahead_s: float = 0.0
    requests: dict[str, RoutedRequest] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    has_answered: bool = False
    dead: str | None = None

    def by_our_clock(self, output: EngineOutput) -> EngineOutput:
        """The output, with its time as this machine has it."""
        there = output.scheduled_time
        return output if there is None else output._replace(scheduled_time=there + self.clock_ahead_s)

    def send(self, message: ToCore) -> None:
        """Raises OSError if it is gone."""
        self.connection.send(frame(encode(message)))

    def how_it_ended(self) -> str:
        return self.core.how_it_ended(_EXIT_S)

    def close(self, timeout_s: float) -> None:
        """End it, if it has not ended. May be called again."""
        self.connection.close()
        self.core.close(timeout_s)
