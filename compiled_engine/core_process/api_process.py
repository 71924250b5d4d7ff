"""The core's view of one API process: its requests, and what it is still to be sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from compiled_engine.core_process.connection import Connection
from compiled_engine.core_process.frames import MessageTooLargeError, frame
from compiled_engine.core_process.wire import Stepped, ToApi, ToCore, encode
from compiled_engine.messages import EngineOutput, StepOutputs


class ApiProcess:
    """While it does not read, steps wait as objects, and are encoded one at a time when there is room.

    What waits is bounded by what its requests may still generate: it cannot send new ones without reading.
    """

    def __init__(self, number: int, connection: Connection[ToCore], give_up: Callable[[str], None]) -> None:
        """give_up: called with the id of a request whose output is too large for a message, so that it has ended."""
        self.number = number
        self.connection = connection
        self._give_up = give_up
        self.request_ids: set[str] = set()
        self._waiting: deque[ToApi] = deque()

    @property
    def has_unsent(self) -> bool:
        return self.connection.has_unsent or bool(self._waiting)

    def send(self, message: ToApi) -> None:
        """Raises OSError if it is gone."""
        self._waiting.append(message)
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes. Raises OSError if the other end is gone."""
        self.connection.flush()
        while self._waiting and not self.connection.has_unsent:
            for each in frames_of(self._waiting.popleft(), self._give_up):
                self.connection.send(each)


def frames_of(message: ToApi, give_up: Callable[[str], None]) -> list[bytes]:
    """The message as frames. A step too large for one is divided; a request's output that is, becomes an error."""
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
    """Of several requests."""
    columns, others = range(len(outputs.request_ids)), outputs.others
    if columns and others:
        return [outputs.part(columns, ()), outputs.part((), others)]
    middle = len(outputs) // 2
    return [outputs.part(columns[part], others[part]) for part in (slice(middle), slice(middle, None))]
