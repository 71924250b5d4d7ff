"""The loop around the engine core: receives messages of API processes, runs steps, and sends their outputs."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec

from compiled_engine.engine.control import ControlError, Failed
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.messages import ControlCall, EngineOutput, EngineRequest, RequestLimits, StepOutputs
from compiled_engine.processes.channel import Connection, MessageTooLargeError, frame
from compiled_engine.processes.replicas import Replicas
from compiled_engine.processes.wire import (
    Abort,
    Add,
    Answered,
    Control,
    FrontendOptions,
    Start,
    Started,
    Stepped,
    Tell,
    ToApi,
    ToCore,
    decode_to_core,
    encode,
)

log = logging.getLogger("compiled_engine")

_LAST_WORDS_S = 5.0
# Time between two steps for the messages of an API process, and the longest wait for the next part of one.
_RECEIVING_S, _GAP_S = 0.002, 0.001


class ApiProcess:
    """A client of the core, with a queue of messages to the client.

    While the client does not read, messages wait unencoded. Each is encoded once the socket has accepted the previous
    one. The queue is bounded by the tokens that the client's requests may still generate: a client that does not read
    sends no new requests.
    """

    def __init__(self, number: int, connection: Connection[ToCore], give_up: Callable[[str], None]) -> None:
        """Start with an empty queue.

        give_up: called with the id of a request that ends because its output is too large for a message.
        """
        self.number = number
        self.connection = connection
        self._give_up = give_up
        self.request_ids: set[str] = set()
        self._waiting: deque[ToApi] = deque()

    @property
    def has_unsent(self) -> bool:
        return self.connection.has_unsent or bool(self._waiting)

    def send(self, message: ToApi) -> None:
        """Send a message, or queue it if the socket does not accept it yet. Raises OSError if the client is gone."""
        self._waiting.append(message)
        self.flush()

    def flush(self) -> None:
        """Send as many queued messages as the socket accepts. Raises OSError if the client is gone."""
        self.connection.flush()
        while self._waiting and not self.connection.has_unsent:
            for each in frames_of(self._waiting.popleft(), self._give_up):
                self.connection.send(each)


def frames_of(message: ToApi, give_up: Callable[[str], None]) -> list[bytes]:
    """Return a message encoded as one or more frames to send.

    A step's outputs that are too large for one frame are divided. If a single request's output is too large, it is
    replaced by an error, and `give_up` is called with the request's id. Raises MessageTooLargeError for any other
    message that is too large.
    """
    try:
        return [frame(encode(message))]
    except MessageTooLargeError as error:
        if not isinstance(message, Stepped):
            raise
        if len(message.outputs) == 1:
            (output,) = message.outputs
            give_up(output.request_id)
            ended = EngineOutput(output.request_id, (), finish_reason="error", stop_reason=str(error))
            return frames_of(Stepped(StepOutputs(others=[ended])), give_up)
        return [each for part in _divided(message.outputs) for each in frames_of(Stepped(part), give_up)]


def _divided(outputs: StepOutputs) -> list[StepOutputs]:
    """Divide a step's outputs, which must be of at least two requests, into two parts."""
    columns, others = range(len(outputs.request_ids)), outputs.others
    if columns and others:
        return [outputs.part(columns, ()), outputs.part((), others)]
    middle = len(outputs) // 2
    return [outputs.part(columns[part], others[part]) for part in (slice(middle), slice(middle, None))]


class CoreServer:
    """Serves API processes in the caller's thread, until the process that started the core disconnects or ends.

    `starter` is the connection to that process. `listener` is the socket to which further API processes connect.
    `given` has, by request id, Python objects that EngineCore.add gets together with the request, such as token
    masks. They cannot be sent over a socket, so only a client in this process adds entries. An entry is removed
    when its request is added.
    """

    def __init__(
        self,
        core: EngineCore | Replicas,
        frontend: FrontendOptions,
        starter: Connection[ToCore],
        listener: socket.socket | None = None,
        given: MutableMapping[str, Any] | None = None,
    ) -> None:
        self._core = core
        self._frontend = frontend
        self._listener = listener
        self._given = {} if given is None else given
        self._selector = selectors.DefaultSelector()
        self._numbers = count()
        self._api_processes: list[ApiProcess] = []
        self._owners: dict[str, ApiProcess] = {}  # by running request
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        if core.bell is not None:
            self._selector.register(core.bell, selectors.EVENT_READ, core)
        self._starter = self._welcome(starter)

    def run(self) -> None:
        """Serve until the starter disconnects. Reports an exception of a step to all clients, then raises it."""
        core = self._core
        try:
            while self._starter in self._api_processes:
                self._serve_sockets(core.patience_s if core.can_step() else None)
                if core.can_step():
                    self._send_outputs(core.step())
        except BaseException as error:
            self._report_failure(Failed.of(error))
            raise
        finally:
            for api_process in self._api_processes:
                api_process.connection.close()
            self._selector.close()

    def _serve_sockets(self, timeout_s: float | None) -> None:
        """Wait for socket events up to `timeout_s` seconds (None: without limit), then send and process messages."""
        for key, events in self._selector.select(timeout_s):
            api_process = key.data
            if api_process is None:
                self._accept()
            if not isinstance(api_process, ApiProcess):
                continue
            try:
                if events & selectors.EVENT_WRITE:
                    api_process.flush()
                    self._watch(api_process)
                if events & selectors.EVENT_READ:
                    self._receive(api_process)
            except (EOFError, OSError):
                self._forget(api_process)
            except (ValueError, msgspec.DecodeError) as error:
                log.warning("API process %d is dropped: %s: %s", api_process.number, type(error).__name__, error)
                self._forget(api_process)

    def _receive(self, api_process: ApiProcess) -> None:
        """Process the messages that have arrived. If the last one is incomplete, wait a short time for the rest of it.

        A long message thus arrives within a few steps, and delays each of them only a little.
        """
        connection, deadline = api_process.connection, time.monotonic() + _RECEIVING_S
        while True:
            for message in connection.receive():
                self._take(api_process, message)
            if not connection.expects_more or time.monotonic() > deadline or not connection.wait_readable(_GAP_S):
                return

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(OSError):  # the client has already disconnected
            self._welcome(Connection(self._listener.accept()[0], decode_to_core))

    def _welcome(self, connection: Connection[ToCore]) -> ApiProcess:
        config = self._core.config
        api_process = ApiProcess(next(self._numbers), connection, self._give_up)
        limits = RequestLimits.of(config, self._core.num_slots)
        self._api_processes.append(api_process)
        self._selector.register(connection, selectors.EVENT_READ, api_process)
        self._send(api_process, Started(api_process.number, config, self._frontend, limits))
        return api_process

    def _take(self, api_process: ApiProcess, message: ToCore) -> None:
        match message:
            case Add(request):
                self._add(api_process, request)
            case Abort(request_ids, stopped):
                for request_id in request_ids:
                    if self._owners.get(request_id) is api_process:
                        self._core.abort(request_id, stopped=stopped)
                        self._release(request_id)
            case Control(number, call):
                self._send(api_process, self._answer(number, call))
            case Tell(call, request_ids):
                self._core.tell(call, request_ids)
            case Start():
                raise ValueError("the core has been started already")

    def _add(self, api_process: ApiProcess, request: EngineRequest) -> None:
        request_id = request.request_id
        given = self._given.pop(request_id, None)
        try:
            self._core.add(request, given)
        except ValueError as error:
            refused = EngineOutput(request_id, (), finish_reason="error", stop_reason=str(error))
            self._send(api_process, Stepped(StepOutputs(others=[refused])))
            return
        self._owners[request_id] = api_process
        api_process.request_ids.add(request_id)

    def _answer(self, number: int, call: ControlCall) -> Answered:
        try:
            value = self._core.call(call)
        except ControlError as error:
            return Answered(number, error=str(error))
        if call.name == "metrics":
            value |= {"api_processes": len(self._api_processes)}
        return Answered(number, value)

    def _send_outputs(self, outputs: StepOutputs) -> None:
        if not len(outputs):
            return
        if len(self._api_processes) == 1:
            self._send(self._api_processes[0], Stepped(outputs))
        else:
            for api_process, own in self._divide(outputs):
                self._send(api_process, Stepped(own))
        for output in outputs.others:
            if output.finish_reason is not None:
                self._release(output.request_id)

    def _divide(self, outputs: StepOutputs) -> list[tuple[ApiProcess, StepOutputs]]:
        """Return each API process that has outputs in a step, with these outputs.

        Outputs of requests without an owner are dropped.
        """
        columns: dict[int, list[int]] = {process.number: [] for process in self._api_processes}
        others: dict[int, list[EngineOutput]] = {process.number: [] for process in self._api_processes}
        for index, request_id in enumerate(outputs.request_ids):
            if (owner := self._owners.get(request_id)) is not None:
                columns[owner.number].append(index)
        for output in outputs.others:
            if (owner := self._owners.get(output.request_id)) is not None:
                others[owner.number].append(output)
        own = [
            (process, outputs.part(columns[process.number], others[process.number])) for process in self._api_processes
        ]
        return [(process, part) for process, part in own if len(part)]

    def _give_up(self, request_id: str) -> None:
        """Abort a request whose client has already been told that it ended."""
        if request_id in self._owners:
            self._core.abort(request_id)
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        api_process = self._owners.pop(request_id, None)
        if api_process is not None:
            api_process.request_ids.discard(request_id)

    def _send(self, api_process: ApiProcess, message: ToApi) -> None:
        """Send a message. Errors of a closed connection are ignored, since reading reports them."""
        with suppress(OSError):
            api_process.send(message)
            self._watch(api_process)

    def _watch(self, api_process: ApiProcess) -> None:
        """Watch the socket for writability while there is unsent data."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if api_process.has_unsent else 0)
        if self._selector.get_key(api_process.connection).events != events:
            self._selector.modify(api_process.connection, events, api_process)

    def _forget(self, api_process: ApiProcess) -> None:
        """Drop a client, and abort its requests."""
        self._selector.unregister(api_process.connection)
        api_process.connection.close()
        self._api_processes.remove(api_process)
        for request_id in api_process.request_ids:
            self._core.abort(request_id)
            del self._owners[request_id]

    def _report_failure(self, message: Failed) -> None:
        """Send `message` to all API processes. Wait at most _LAST_WORDS_S for processes that read slowly."""
        deadline = time.monotonic() + _LAST_WORDS_S
        for api_process in self._api_processes:
            with suppress(OSError):
                api_process.send(message)
        for api_process in self._api_processes:
            with suppress(OSError):
                while api_process.has_unsent and (left := deadline - time.monotonic()) > 0:
                    api_process.connection.wait_writable(left)
                    api_process.flush()
