"""All requests of an API process that are under way, and where their outputs go."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from compiled_engine.frontend.input_processor import PreparedRequest
from compiled_engine.frontend.output_processor import OutputProcessor
from compiled_engine.frontend.request_stream import OutputKind, RequestStream
from compiled_engine.messages import EngineOutput, StepOutputs


class RequestStreams:
    """Streams by request id. Belongs to one event loop at a time."""

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
        """Requests that are not only waiting for their reader."""
        return sum(not stream.state.finished for stream in self._streams.values())

    def add(self, request: PreparedRequest, output: OutputKind) -> RequestStream:
        """Start to follow a request. Raises ValueError if its id is in use."""
        request_id = request.request_id
        if request_id in self._streams:
            raise ValueError(f"request_id {request_id!r} is already in use; allowed: an id of no request under way")
        state = self._outputs.add(request, partial=output != "final")
        stream = self._streams[request_id] = RequestStream(state, output)
        return stream

    def remove(self, stream: RequestStream) -> list[str]:
        """Stop following a request; its engine requests that still run."""
        request_id = stream.state.request.request_id
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
        unfinished = stream.state.unfinished_ids()
        for engine_request_id in unfinished:
            self._outputs.forget(engine_request_id)
        return unfinished

    def process(self, outputs: StepOutputs) -> list[str]:
        """Process a step and wake the readers; return engine requests to abort, which ended by a stop string."""
        changed, complete = self._outputs.process(outputs)
        for state in changed:
            self._streams[state.request.request_id].wake()
        return complete

    def abort(self, request_id: str) -> list[str]:
        """End a request with finish_reason "abort"; its engine requests that still run. None if it is not known."""
        stream = self._streams.get(request_id)
        unfinished = [] if stream is None else stream.state.unfinished_ids()
        self.process(StepOutputs(others=[EngineOutput(each, (), finish_reason="abort") for each in unfinished]))
        return unfinished

    def fail_all(self, make_error: Callable[[], Exception]) -> list[str]:
        """Raise an error in every reader of an unfinished request; return the engine requests that still run."""
        unfinished = []
        for stream in list(self._streams.values()):
            unfinished += self.remove(stream)
            stream.fail(make_error())
        return unfinished
