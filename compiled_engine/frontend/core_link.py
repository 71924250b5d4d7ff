"""The connection of an API process's requests to its engine core: outputs in, aborts out."""

from __future__ import annotations

from compiled_engine.frontend.request_streams import RequestStreams
from compiled_engine.messages import StepOutputs
from compiled_engine.processes.channel import Connection
from compiled_engine.processes.core_child import RunningCore
from compiled_engine.processes.core_client import CoreClient, EngineDeadError
from compiled_engine.processes.wire import ToApi

_EXIT_S = 30.0


def connect(core: RunningCore, connection: Connection[ToApi], streams: RequestStreams) -> CoreClient:
    """A client that passes steps to `streams`, and ends them when the core dies."""
    client: CoreClient

    def on_outputs(outputs: StepOutputs) -> None:
        client.abort(streams.process(outputs), stopped=True)

    def on_death(reason: str) -> None:
        streams.fail_all(lambda: EngineDeadError(reason))

    client = CoreClient(core, connection, on_outputs, on_death)
    return client


def leave(client: CoreClient, streams: RequestStreams) -> None:
    """Close the connection; the readers of requests under way get EngineDeadError. May be called again."""
    client.close("the engine was shut down")
    reason = client.dead or ""
    streams.fail_all(lambda: EngineDeadError(reason))


def end(client: CoreClient, core: RunningCore, streams: RequestStreams) -> None:
    """Leave, and wait until the core has ended. May be called again."""
    leave(client, streams)
    core.close(_EXIT_S)
