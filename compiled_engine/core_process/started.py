"""A core's first message, or why there is none."""

from __future__ import annotations

from compiled_engine.core.control import FatalError
from compiled_engine.core_process.connection import Connection
from compiled_engine.core_process.running_core import RunningCore
from compiled_engine.core_process.wire import Failed, Started, ToApi, decode_to_api

_EXIT_S = 2.0


class EngineDeadError(FatalError):
    """The engine core has ended; the text says why."""


def wait_started(core: RunningCore) -> tuple[Connection[ToApi], Started]:
    """Wait for the core's first message. Raises what the start raised; EngineDeadError if the core just ended."""
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
