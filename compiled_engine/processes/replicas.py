"""Data parallelism: several engine cores, each in its own process on its own devices, with the interface of one core.

Replicas exchange nothing. The router chooses a replica for each request. Requests wait in the routing process instead
of in a replica's queue, so that no replica is idle while another has a queue. The routing process keeps the generated
tokens. If a replica dies, its requests continue on another replica, from their prompts and their tokens so far. The
result is the same, since sampling noise depends only on a request's seed and on positions, and every request gets a
seed before it is sent.
"""

from __future__ import annotations

import heapq
import logging
import random
import selectors
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
from msgspec import structs

from compiled_engine.config import EngineConfig
from compiled_engine.engine.control import ControlError, Failed
from compiled_engine.engine.core import PAUSED
from compiled_engine.engine.messages import ControlCall, EngineOutput, EngineRequest, StepOutputs
from compiled_engine.process.forks import unless_forked
from compiled_engine.processes.core_client import EngineDeadError
from compiled_engine.processes.replica import Replica, RoutedRequest, metrics_of_all
from compiled_engine.processes.router import Router
from compiled_engine.processes.wire import Abort, Add, Answered, Control, Stepped, Tell, ToApi, ToCore
from compiled_engine.sampling.params import derived

log = logging.getLogger("compiled_engine")

# Requests sent to a replica per request that it may run at once, so that some wait there for a place.
AHEAD = 2
# A request counts as the cause once this many replicas have died with it.
MOST_LOST = 2
_ANSWER_S = 10.0
_EXIT_S = 30.0
_LOOK_S = 1.0


class Replicas:
    """Several replicas with the methods of EngineCore. Most methods raise EngineDeadError once no replica is left.

    `bell` is a descriptor that is readable when a replica has sent something. start_s: duration of the start in
    seconds, for metrics. when_ended: called once `close` has ended all replicas.
    """

    held = ""  # each replica holds its own steps

    def __init__(
        self,
        config: EngineConfig,
        replicas: Sequence[Replica],
        start_s: float = 0.0,
        when_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.num_slots = min(replica.num_slots for replica in replicas)
        self._all = tuple(replicas)
        self._living = {replica.number: replica for replica in replicas}
        self._free = weakref.finalize(self, unless_forked(_end), self._all, when_ended)  # if `close` is not called
        block_size = config.cache.block_size
        num_blocks = self.num_slots // block_size if config.cache.enable_prefix_caching else 0
        self._router = Router(len(replicas), AHEAD * config.max_running, block_size, num_blocks)
        self._requests: dict[str, RoutedRequest] = {}
        self._waiting: list[RoutedRequest] = []  # a heap; some may have ended
        self._outputs: deque[StepOutputs] = deque()
        self._call_number = 0
        self._answers: dict[int, Answered] = {}  # to the call with that number, by replica
        self._arrivals = count()
        self._seeds = random.Random(config.model.seed)
        self._start_s, self._num_rerun = start_s, 0
        self._selector = selectors.EpollSelector()
        self.bell: int = self._selector.fileno()
        self.patience_s = 0.0  # see EngineCore; `can_step` says whether a replica has sent something
        for replica in replicas:
            self._selector.register(replica.connection, selectors.EVENT_READ, replica)

    def add(self, request: EngineRequest, given: Any = None) -> None:
        """Queue a request. A request that a replica refuses ends with finish_reason "error".

        Raises ValueError if the request's id is in use, or if `given` is not None: it has Python objects (see
        EngineCore.add), which cannot be sent to another process.
        """
        self._require_living()
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        if given is not None:
            raise ValueError(f"given must be None where data_parallel_size is above 1, got {given!r}")
        if request.sampling_params.seed is None:
            params = derived(request.sampling_params, seed=self._seeds.getrandbits(63))
            request = structs.replace(request, sampling_params=params)
        priority = request.priority if self.config.scheduler.policy == "priority" else 0
        routed = RoutedRequest(request, (priority, next(self._arrivals)))
        self._requests[request.request_id] = routed
        heapq.heappush(self._waiting, routed)
        self._send_queued()

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        routed = self._requests.get(request_id)
        if routed is None:
            return
        if routed.route is not None:
            self._send(self._living[routed.route.replica], Abort((request_id,), stopped))
        self._end(routed, finished=stopped)
        self._send_queued()

    def step(self) -> StepOutputs:
        """Return the outputs of one step of any replica: the oldest that has not been returned.

        Waits up to _LOOK_S seconds. If no outputs arrive, the result is empty.
        """
        if not self._outputs:
            self._require_living()
            self._look(_LOOK_S)
        if not self._outputs:
            self._require_living()
            return StepOutputs()
        return self._outputs.popleft()

    def can_step(self) -> bool:
        """Return whether `step` need not wait: outputs are queued, or a replica has sent something."""
        return bool(self._outputs) or bool(self._selector.select(0))

    def has_unfinished(self) -> bool:
        return bool(self._requests) or bool(self._outputs)  # outputs of ended requests may still be queued

    def call(self, call: ControlCall) -> Any:
        """Make all replicas call the function that `call` names. Wait for all answers, and return the combined result.

        Booleans are combined with "and", lists to their sorted union. For other types the result is the first
        replica's. Raises ControlError if the call fails on a replica, or if a replica does not answer in time, see
        `_call_all`.

        The call "metrics" returns totals, and some metrics of each replica under "replicas". Metrics that cannot be
        added, such as stages of the start, are the first replica's. A replica that does not answer in time contributes
        its previous metrics.
        """
        if call.name == "pause" and call.arguments.get("mode") == "abort":
            self._abort_queued()  # first, as a replica gets one of them for each request that it aborts
        answers = self._call_all(call)
        errors = [f"{self._all[number].name}: {each.error}" for number, each in answers.items() if each.error]
        if call.name != "metrics":
            late = [replica.name for number, replica in self._living.items() if number not in answers]
            errors += [f"{name} has not answered within {_ANSWER_S:g} s" for name in late]
        if errors:
            raise ControlError("; ".join(errors))
        if call.name == "metrics":
            return self._metrics(answers)
        if call.name == "reset_prefix_cache":
            self._router.forget_prefixes()
        first, values = answers[min(answers)].value, [answer.value for answer in answers.values()]
        if isinstance(first, bool):
            return all(values)
        return sorted(set().union(*values)) if isinstance(first, list) else first

    def tell(self, call: ControlCall, request_ids: Sequence[str] = ()) -> None:
        """Make replicas call the function that `call` names, before later requests and without an answer.

        request_ids: the call is for the replicas to which these requests have been sent; empty: for all replicas.
        """
        self._require_living()
        message = Tell(call, tuple(request_ids))
        needing = [routed for each in request_ids if (routed := self._requests.get(each)) is not None]
        having = {routed.route.replica for routed in needing if routed.route is not None}
        for replica in list(self._living.values()):
            if not request_ids or replica.number in having:
                self._send(replica, message)

    def _metrics(self, answers: Mapping[int, Answered]) -> dict[str, Any]:
        for number, answer in answers.items():
            self._all[number].metrics = answer.value
        found = metrics_of_all(self._all)
        queued = sum(routed.route is None for routed in self._requests.values())
        found["waiting"] += queued
        return found | {"start_s": self._start_s, "requests_queued": queued, "requests_rerun": self._num_rerun}

    def close(self) -> None:
        """End all replicas. May be called repeatedly."""
        self._living.clear()
        self._requests.clear()
        self._free()
        self._selector.close()

    def _send_queued(self) -> None:
        """Send queued requests to replicas, in order, until no replica accepts the next one."""
        while self._waiting and self._living:
            routed = self._waiting[0]
            request = routed.rest()
            if self._requests.get(request.request_id) is routed:
                routed.route = self._router.route(request)
                if routed.route is None:
                    return
                replica = self._living[routed.route.replica]
                replica.requests[request.request_id] = routed
                self._send(replica, Add(request))
            heapq.heappop(self._waiting)

    def _abort_queued(self) -> None:
        """End the requests that have not been sent to a replica, with finish_reason "abort".

        A pause with mode "abort" ends the other requests in the replicas.
        """
        queued = [routed for routed in self._requests.values() if routed.route is None]
        for routed in queued:
            self._end(routed, finished=False)
        ids = [routed.request.request_id for routed in queued]
        outputs = [EngineOutput(each, (), finish_reason="abort", stop_reason=PAUSED) for each in ids]
        if outputs:
            self._outputs.append(StepOutputs(others=outputs))

    def _end(self, routed: RoutedRequest, *, finished: bool) -> None:
        request_id = routed.request.request_id
        del self._requests[request_id]
        if routed.route is not None:
            del self._living[routed.route.replica].requests[request_id]
            self._router.end(routed.route, routed.request, routed.token_ids, finished=finished)

    def _look(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            replica: Replica = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    replica.connection.flush()
                    self._watch(replica)
                for message in replica.connection.receive() if events & selectors.EVENT_READ else ():
                    self._take(replica, message)
            except (EOFError, OSError):
                self._lose(replica, replica.how_it_ended())
            except (ValueError, msgspec.DecodeError) as error:
                self._lose(replica, f"its messages cannot be read: {type(error).__name__}: {error}")

    def _take(self, replica: Replica, message: ToApi) -> None:
        match message:
            case Stepped(outputs):
                self._take_step(replica, outputs)
            case Answered(number):
                replica.has_answered = True
                if number == self._call_number:
                    self._answers[replica.number] = message
            case Failed(kind, text):
                self._lose(replica, f"a step failed: {kind}: {text}")

    def _take_step(self, replica: Replica, outputs: StepOutputs) -> None:
        """Process a step's outputs. Outputs of requests that were aborted in the meantime are dropped."""
        requests, known = replica.requests, True
        for request_id, tokens in outputs.rows():
            routed = requests.get(request_id)
            if routed is None:
                known = False
            else:
                routed.token_ids += outputs.token_ids[tokens]
        for output in outputs.others:
            routed = requests.get(output.request_id)
            if routed is None:
                known = False
            else:
                routed.add(output)
        if not known:
            columns = [index for index, request_id in enumerate(outputs.request_ids) if request_id in requests]
            outputs = outputs.part(columns, [output for output in outputs.others if output.request_id in requests])
        if replica.clock_ahead_s:
            outputs = replace(outputs, others=[replica.by_our_clock(output) for output in outputs.others])
        ended = [output for output in outputs.others if output.finish_reason is not None]
        for output in ended:
            self._end(requests[output.request_id], finished=output.finish_reason != "error")
        if len(outputs):
            self._outputs.append(outputs)
        if ended:
            self._send_queued()

    def _lose(self, replica: Replica, why: str) -> None:
        """Handle the end of a replica. why: the reason, as text.

        The replica's requests are queued again, before later requests, and continue on other replicas. A request with
        which MOST_LOST replicas have died may be the cause, so it ends with an error instead. If no replica is left,
        later calls of `step` and other methods raise EngineDeadError.
        """
        if replica.dead is not None:
            return
        replica.dead = f"{replica.name} has ended: {why}"
        del self._living[replica.number]
        self._router.remove(replica.number)
        self._selector.unregister(replica.connection)
        replica.close(0)
        log.error("%s; %d of its requests were under way, %d replicas are left",
                  replica.dead, len(replica.requests), len(self._living))  # fmt: skip
        suspects = []
        for request_id, routed in replica.requests.items():
            routed.route = None
            routed.lost += 1
            if routed.lost < MOST_LOST:
                heapq.heappush(self._waiting, routed)
            else:
                suspects.append(EngineOutput(request_id, (), finish_reason="error", stop_reason=replica.dead))
        self._num_rerun += len(replica.requests) - len(suspects)
        replica.requests.clear()
        for output in suspects:
            del self._requests[output.request_id]
        if suspects:
            self._outputs.append(StepOutputs(others=suspects))
        self._send_queued()

    def _send(self, replica: Replica, message: ToCore) -> None:
        """Send a message. Errors of a closed connection are ignored, since reading reports them."""
        if replica.dead is None:
            try:
                replica.send(message)
            except OSError:
                return
            self._watch(replica)

    def _watch(self, replica: Replica) -> None:
        """Watch the socket for writability while there is unsent data."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if replica.connection.has_unsent else 0)
        if self._selector.get_key(replica.connection).events != events:
            self._selector.modify(replica.connection, events, replica)

    def _call_all(self, call: ControlCall) -> Mapping[int, Answered]:
        """Send a control call to all replicas, and return their answers by replica number.

        Waits at most _ANSWER_S for replicas that have answered a call before. Waits without limit for other replicas,
        and for slow calls.
        """
        self._require_living()
        self._call_number += 1
        self._answers = {}
        for replica in self._living.values():
            self._send(replica, Control(self._call_number, call))
        deadline = time.monotonic() + _ANSWER_S
        while missing := self._living.keys() - self._answers.keys():
            is_late = time.monotonic() > deadline and not call.slow
            if is_late and all(self._living[number].has_answered for number in missing):
                break
            self._look(_LOOK_S)
        self._require_living()
        return self._answers

    def _require_living(self) -> None:
        if not self._living:
            raise EngineDeadError("; ".join(replica.dead or "it was closed" for replica in self._all))


def _end(replicas: Sequence[Replica], when_ended: Callable[[], None]) -> None:
    """End all replicas at the same time, wait until they have ended, then call `when_ended`."""
    for replica in replicas:
        replica.connection.close()
    for replica in replicas:
        replica.close(_EXIT_S)
    when_ended()
