"""Defines a replica as seen by the routing process, and combines the metrics of all replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from compiled_engine.engine.messages import EngineOutput, EngineRequest
from compiled_engine.features import registry
from compiled_engine.features.prompt_logprobs import extras as prompt_logprobs
from compiled_engine.processes.channel import Connection, frame
from compiled_engine.processes.core_child import RunningCore
from compiled_engine.processes.router import Route
from compiled_engine.processes.wire import ToApi, ToCore, encode

_EXIT_S = 0.5


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A queued or running request, with everything needed to continue it on another replica."""

    request: EngineRequest
    order: tuple[int, int]  # (priority, arrival number)
    route: Route | None = None  # None while it is queued
    token_ids: list[int] = field(default_factory=list)  # generated so far
    next_prompt_logprob: int = prompt_logprobs.FIRST
    lost: int = 0  # replicas that died while running it

    def add(self, output: EngineOutput) -> None:
        """Record the tokens and prompt log-probabilities that a step has computed for the request."""
        self.token_ids += output.new_token_ids
        if output.extras and (found := prompt_logprobs.rows_in(output.extras)) is not None:
            first, rows = found
            self.next_prompt_logprob = first + len(rows)

    def rest(self) -> EngineRequest:
        """Return a request with which another replica continues this one after the tokens generated so far."""
        if not self.token_ids and self.next_prompt_logprob == prompt_logprobs.FIRST:
            return self.request
        extras = prompt_logprobs.resumed(self.request, self.next_prompt_logprob)
        return structs.replace(self.request, output_token_ids=tuple(self.token_ids), extras=extras)

    def __lt__(self, other: RoutedRequest) -> bool:
        return self.order < other.order


@dataclass(eq=False)
class Replica:
    """A replica, as seen by the routing process. `requests` are those that were sent to it and have not ended."""

    number: int
    name: str  # for messages to users
    core: RunningCore
    connection: Connection[ToApi]  # to `core`
    num_slots: int  # see EngineCore
    clock_ahead_s: float = 0.0  # how far this machine's clock is ahead of the replica's
    requests: dict[str, RoutedRequest] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)  # last answer
    has_answered: bool = False  # it has answered some call
    dead: str | None = None  # why it ended; None while it runs

    def by_our_clock(self, output: EngineOutput) -> EngineOutput:
        """Return `output` with its `scheduled_time` converted to this machine's clock."""
        there = output.scheduled_time
        return output if there is None else structs.replace(output, scheduled_time=there + self.clock_ahead_s)

    def send(self, message: ToCore) -> None:
        """Send a message. Raises OSError if the replica is gone."""
        self.connection.send(frame(encode(message)))

    def how_it_ended(self) -> str:
        return self.core.how_it_ended(_EXIT_S)

    def close(self, timeout_s: float) -> None:
        """End the replica, if it has not ended. May be called repeatedly."""
        self.connection.close()
        self.core.close(timeout_s)


# Metrics that are summed, also by key where they are dicts: counts since the start, which include ended replicas, and
# current values, which do not.
COUNTERS = (
    *("generated_tokens", "steps", "finished", "aborted", "preemptions", "prefix_queries", "prefix_hits"),
    *("traces", "compiles", "captures", "graph_replays", "graph_padded_tokens", "graph_fallbacks"),
    *("graph_replays_by_key", "graph_fallbacks_by_reason", "recordings", "recorded_replays"),
    *registry.COUNTERS,
)
GAUGES = (
    *("running", "waiting", "blocks_total", "blocks_free", "kv_cache_bytes"),
    *("waiting_by_reason", "graph_bytes_used", "graph_bytes_predicted"),
    *registry.GAUGES,
)
OF_EACH = ("running", "waiting", "kv_usage", "prefix_queries", "prefix_hits", "generated_tokens", "steps", "start_s")


def metrics_of_all(replicas: Sequence[Replica]) -> dict[str, Any]:
    """Return the combined newest metrics of the replicas. At least one replica must have answered.

    Counts since the start (COUNTERS) are summed over all replicas, current values (GAUGES) over living ones. Most other
    metrics are those of the first living replica, or of the first one if none lives. "replicas" has some metrics of
    each replica.
    """
    answers = [replica.metrics for replica in replicas if replica.metrics]
    living = [replica.metrics for replica in replicas if replica.dead is None and replica.metrics]
    found = dict((living or answers)[0])
    for names, those in ((COUNTERS, answers), (GAUGES, living)):
        for name in names:
            if all(name in each for each in answers):
                found[name] = _sum(type(found[name]), [each[name] for each in those])
    found["kv_usage"] = 1 - found["blocks_free"] / found["blocks_total"] if found["blocks_total"] else 0.0
    found["kv_usage_peak"] = max(each["kv_usage_peak"] for each in answers)
    return found | {"replicas": [_of_one(replica) for replica in replicas]}


def _sum(kind: type, values: Sequence[Any]) -> Any:
    """Return the sum of numbers, or of dicts of numbers by key. kind: the type of the values."""
    if kind is not dict:
        return sum(values)
    totals = Counter[str]()
    for each in values:
        totals.update(each)  # keeps zeros, unlike a sum of Counters
    return dict(totals)


def _of_one(replica: Replica) -> dict[str, Any]:
    of_metrics = {name: replica.metrics[name] for name in OF_EACH if name in replica.metrics}
    if replica.dead is not None:
        of_metrics |= {"running": 0, "waiting": 0, "kv_usage": 0.0}
    return {"replica": replica.number, "lives": replica.dead is None, "ended": replica.dead, **of_metrics}
