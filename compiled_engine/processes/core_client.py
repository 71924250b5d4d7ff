"""Client of an engine core: waits for the core's first message, then exchanges messages on an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec

from compiled_engine.engine.control import ControlError, Failed, FatalError
from compiled_engine.engine.messages import ControlCall, EngineRequest, StepOutputs
from compiled_engine.processes.channel import Connection, frame
from compiled_engine.processes.core_child import RunningCore
from compiled_engine.processes.wire import (
    Abort,
    Add,
    Answered,
    Control,
    Started,
    Stepped,
    Tell,
    ToApi,
    ToCore,
    decode_to_api,
    encode,
)

_EXIT_S = 2.0


class EngineDeadError(FatalError):
    """Raised if the engine core has ended; the message has the reason."""


def wait_started(core: RunningCore) -> tuple[Connection[ToApi], Started]:
    """Wait for the core's first message. Return the connection to the core, and the message.

    Raises the exception with which the start failed, or EngineDeadError if the core ended without reporting one.
    """
    connection: Connection[ToApi] = Connection(core.socket, decode_to_api)
    try:
        while not (messages := connection.receive()):
            connection.wait_readable()
    except (EOFError, OSError) as error:
        raise EngineDeadError(f"the engine core did not start: {core.how_it_ended(_EXIT_S)}") from error
    (message,) = messages
    if isinstance(message, Failed):
        raise message.as_exception("the engine core")
    assert isinstance(message, Started)
    return connection, message


class CoreClient:
    """Sends requests to an engine core, receives their outputs, and detects the end of the core.

    on_outputs: called with the outputs of each step that has outputs for this client. on_death: called once, with the
    reason, if the core ends by itself. dead: the reason why the core has ended; None while it runs.

    The socket is read on one event loop at a time, set by the last call of `attach`.
    """

    def __init__(
        self,
        core: RunningCore,
        connection: Connection[ToApi],
        on_outputs: Callable[[StepOutputs], None],
        on_death: Callable[[str], None],
    ) -> None:
        self.dead: str | None = None
        self._core = core
        self._connection = connection
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._death_watchers: list[asyncio.Future[str]] = []
        self._drain_watchers: list[asyncio.Future[None]] = []
        self._numbers = count()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        return self._loop

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read the socket on this event loop from now on. A previous event loop must be closed, or no longer run.

        Pending calls of the previous event loop are forgotten.
        """
        self._detach()
        self._loop = loop
        self._calls.clear()
        self._death_watchers.clear()
        self._drain_watchers.clear()
        if self.dead is None:
            loop.add_reader(self._connection.fileno(), self._on_readable)
            self._flush()

    def add(self, request: EngineRequest) -> None:
        """Send a request, unless the core has ended. Raises MessageTooLargeError if the request is too large."""
        self._send(Add(request))

    def abort(self, request_ids: list[str], *, stopped: bool = False) -> None:
        if request_ids:
            self._send(Abort(tuple(request_ids), stopped))

    async def call(self, name: str, **arguments: Any) -> Any:
        """Make the core call the function `name`, such as sleep, between two steps. Return its result; see `make`."""
        return await self.make(ControlCall(name, arguments))

    async def make(self, call: ControlCall) -> Any:
        """Make the core execute a control call, after all earlier messages, and return its result.

        A control call is a call of a function by its name between two steps, such as sleep.
        Raises ControlError if the call fails. Raises EngineDeadError if the core has ended, or ends before it answers.
        """
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Control(number, call))
            return await answer
        finally:
            self._calls.pop(number, None)

    def tell(self, call: ControlCall, request_ids: Sequence[str] = ()) -> None:
        """Make the core execute a control call (see `make`), after all earlier messages, without an answer.

        request_ids: the requests that need the call. If empty, and there are several cores, each core executes it.
        Raises EngineDeadError if the core has ended.
        """
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        self._send(Tell(call, tuple(request_ids)))

    async def drained(self) -> None:
        """Wait until the socket has accepted all messages to the core, or the core has ended."""
        while self.dead is None and self._connection.has_unsent:
            accepted = asyncio.get_running_loop().create_future()
            self._drain_watchers.append(accepted)
            await accepted

    async def wait_dead(self) -> str:
        """Wait until the core has ended, or `close` is called. Return the reason as text."""
        if self.dead is not None:
            return self.dead
        end = asyncio.get_running_loop().create_future()
        self._death_watchers.append(end)
        try:
            return await end
        finally:
            if end in self._death_watchers:
                self._death_watchers.remove(end)

    def close(self, reason: str) -> None:
        """Disconnect from the core. The core then ends, if this process has started it.

        Pending control calls fail. `on_death` is not called.
        """
        self._detach()
        self.dead = self.dead or reason
        self._connection.close()
        self._fail_waiting()

    def _send(self, message: ToCore) -> None:
        if self.dead is not None:
            return
        data = frame(encode(message))
        with suppress(OSError):  # the core has ended; reading reports that, perhaps with a reason from the core
            self._connection.send(data)
        self._watch_writing()

    def _flush(self) -> None:
        with suppress(OSError):
            self._connection.flush()
        if not self._connection.has_unsent:
            self._wake_drained()
        self._watch_writing()

    def _wake_drained(self) -> None:
        watchers, self._drain_watchers = self._drain_watchers, []
        for accepted in watchers:
            if not accepted.done():
                accepted.set_result(None)

    def _watch_writing(self) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        if self._connection.has_unsent:
            self._loop.add_writer(self._connection.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._connection.fileno())

    def _on_readable(self) -> None:
        try:
            messages = self._connection.receive()
        except (EOFError, OSError):
            self._die(self._core.how_it_ended(_EXIT_S))
            return
        except (ValueError, msgspec.DecodeError) as error:
            self._die(f"its messages cannot be read: {type(error).__name__}: {error}")
            return
        for message in messages:
            match message:
                case Stepped(outputs):
                    self._on_outputs(outputs)
                case Answered(number, value, failure):
                    answer = self._calls.get(number)
                    if answer is not None and not answer.done():
                        if failure is None:
                            answer.set_result(value)
                        else:
                            answer.set_exception(ControlError(failure))
                case Failed(kind, text):
                    self._die(f"a step failed: {kind}: {text}")
                    return
                case Started():
                    self._die("it said a second time that it has started")
                    return

    def _die(self, reason: str) -> None:
        self._detach()
        self._connection.close()
        self.dead = f"the engine core has ended: {reason}"
        self._fail_waiting()
        self._on_death(self.dead)

    def _fail_waiting(self) -> None:
        """Fail the pending calls, and end the waits of `wait_dead` and `drained`, since no more answers will arrive."""
        assert self.dead is not None
        with suppress(RuntimeError):  # their event loop is closed
            self._wake_drained()
            for answer in self._calls.values():
                if not answer.done():
                    answer.set_exception(EngineDeadError(self.dead))
            for end in self._death_watchers:
                if not end.done():
                    end.set_result(self.dead)

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
        self._loop = None
