"""Output streams for the requests of an API process on an event loop, and their connection to the engine core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Literal, get_args

from compiled_engine.engine.messages import EngineOutput, StepOutputs
from compiled_engine.frontend.asked_data import AskedDataOfStreams
from compiled_engine.frontend.output_processor import Asked, OutputProcessor
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.frontend.prepared_request import PreparedRequest, Running
from compiled_engine.processes.channel import Connection
from compiled_engine.processes.core_child import RunningCore
from compiled_engine.processes.core_client import CoreClient, EngineDeadError
from compiled_engine.processes.wire import ToApi

OutputKind = Literal["cumulative", "delta", "final"]
OUTPUT_KINDS: tuple[str, ...] = get_args(OutputKind)


class RequestStream:
    """Delivers the outputs of one request to one reader.

    If the reader is slow, its next output has everything that is new since its previous output.
    """

    def __init__(self, state: Running, output: OutputKind) -> None:
        self.state = state
        self._output = output
        self._has_changed = False
        self._waiting: asyncio.Future[None] | None = None
        self._failure: Exception | None = None

    def wake(self) -> None:
        """Tell the reader that the request has changed. With "final" output, the reader is told only of the end."""
        if self._output != "final" or self.state.finished:
            self._has_changed = True
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)

    def fail(self, error: Exception) -> None:
        """Let `next` raise `error`, unless the request has finished."""
        self._failure = error
        self._has_changed = True
        if self._waiting is not None and not self._waiting.done():
            with suppress(RuntimeError):  # the reader's event loop is closed
                self._waiting.set_result(None)

    async def next(self) -> RequestOutput:
        """Wait for the next output and return it; the last one has `finished`. Only one reader may call this.

        Raises the error given to `fail` if the request has not finished.
        """
        if not self._has_changed:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        self._has_changed = False
        if self._failure is not None and not self.state.finished:
            raise self._failure
        return self.state.delta() if self._output == "delta" else self.state.snapshot()


class RequestStreams:
    """The streams of requests that run or have unread output, by request id. Belongs to one event loop at a time."""

    def __init__(self, outputs: OutputProcessor) -> None:
        self._outputs = outputs
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._streams

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._streams))

    @property
    def num_unfinished(self) -> int:
        """The number of requests that still generate. Finished requests that wait for their reader do not count."""
        return sum(not stream.state.finished for stream in self._streams.values())

    def add(self, request: PreparedRequest, output: OutputKind) -> RequestStream:
        """Start tracking a request and return its stream. Raises ValueError if its id is in use."""
        request_id = request.request_id
        if request_id in self._streams:
            raise ValueError(f"request_id {request_id!r} is already in use; allowed: an id of no request under way")
        state = self._outputs.add(request, partial=output != "final")
        stream = self._streams[request_id] = RequestStream(state, output)
        return stream

    def remove(self, stream: RequestStream) -> list[str]:
        """Stop tracking a request. Return the ids of its engine requests (one per completion) that still run."""
        request_id = stream.state.request.request_id
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
        unfinished = stream.state.unfinished_ids()
        for engine_request_id in unfinished:
            self._outputs.forget(engine_request_id)
        return unfinished

    def process(self, outputs: StepOutputs) -> list[str]:
        """Process a step's outputs and wake the readers of the requests that they change.

        Return the ids of engine requests (one per completion) to abort: they ended by a stop string.
        """
        changed, complete = self._outputs.process(outputs)
        for state in changed:
            self._streams[state.request.request_id].wake()
        return complete

    def take_asked(self) -> list[Asked]:
        """Return the prompt data that the core has asked for (see EngineOutput.asks) since the last call."""
        return self._outputs.take_asked()

    def is_tracked(self, engine_request_id: str) -> bool:
        """Return whether an engine request, which is one completion, was added and has not ended or been removed."""
        return self._outputs.is_tracked(engine_request_id)

    def fail(self, request_id: str, error: Exception) -> list[str]:
        """Stop tracking a request, and raise an error in its reader.

        Return the ids of its engine requests (one per completion) that still run; [] for an unknown id.
        """
        if (stream := self._streams.get(request_id)) is None:
            return []
        unfinished = self.remove(stream)
        stream.fail(error)
        return unfinished

    def abort(self, request_id: str) -> list[str]:
        """End a request with finish_reason "abort".

        Return the ids of its engine requests (one per completion) that still run in the core; [] for an unknown id.
        """
        stream = self._streams.get(request_id)
        unfinished = [] if stream is None else stream.state.unfinished_ids()
        self.process(StepOutputs(others=[EngineOutput(each, (), finish_reason="abort") for each in unfinished]))
        return unfinished

    def fail_all(self, make_error: Callable[[], Exception]) -> list[str]:
        """Stop tracking all requests, and raise an error in each reader whose request has not finished.

        make_error: makes the error for each reader. Return the ids of engine requests (one per completion) that still
        run.
        """
        return [each for request_id in list(self._streams) for each in self.fail(request_id, make_error())]


# The connection of an API process's requests to its engine core: outputs in, aborts out.

_EXIT_S = 30.0


def connect(core: RunningCore, connection: Connection[ToApi], streams: RequestStreams) -> CoreClient:
    """Return a client of the core that passes each step's outputs to `streams`.

    The client aborts completions that ended by a stop string, and sends the core the data that the core asks for, such
    as pixels. When the core dies, readers get EngineDeadError.
    """
    client: CoreClient
    data = AskedDataOfStreams(streams.is_tracked, streams.fail)

    def on_outputs(outputs: StepOutputs) -> None:
        client.abort(streams.process(outputs), stopped=True)
        for asked in streams.take_asked():
            data.begin(asked, client)

    def on_death(reason: str) -> None:
        streams.fail_all(lambda: EngineDeadError(reason))

    client = CoreClient(core, connection, on_outputs, on_death)
    return client


def leave(client: CoreClient, streams: RequestStreams) -> None:
    """Close the connection to the core. Readers of running requests get EngineDeadError. May be called repeatedly."""
    client.close("the engine was shut down")
    reason = client.dead or ""
    streams.fail_all(lambda: EngineDeadError(reason))


def end(client: CoreClient, core: RunningCore, streams: RequestStreams) -> None:
    """Close the connection as `leave` does, and wait for the core to exit, up to _EXIT_S. May be called repeatedly."""
    leave(client, streams)
    core.close(_EXIT_S)
