"""From the order to start until the caller is gone: what thread and process have in common."""

from __future__ import annotations

import socket
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Protocol

from compiled_engine.core_process.connection import Connection
from compiled_engine.core_process.core_server import CoreServer
from compiled_engine.core_process.frames import frame
from compiled_engine.core_process.wire import Failed, Start, ToCore, encode
from compiled_engine.process.progress import RichProgress, SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.sampling.logits_processor import LogitsProcessor, LogitsProcessorFactory
from compiled_engine.sampling.token_mask import TokenMask
from compiled_engine.workers.start_core import start_core

GivenProcessors = Sequence[LogitsProcessor | LogitsProcessorFactory | str]


class RunningCore(Protocol):
    """Where the core runs: a thread, a process, or a process that somebody else has started.

    socket: the caller's end of the connection to it.
    """

    socket: socket.socket

    @property
    def address(self) -> str | None:
        """Where further callers connect; None if they cannot."""
        ...

    def how_it_ended(self, timeout_s: float) -> str:
        """Wait for its end; say how it came, as far as it can be told from outside."""
        ...

    def close(self, timeout_s: float) -> None:
        """Close the socket, and wait until it has ended. May be called again."""
        ...


def run_core(
    start: Start,
    connection: Connection[ToCore],
    processors: GivenProcessors,
    listener: socket.socket | None = None,
    token_masks: MutableMapping[str, TokenMask] | None = None,
    when_started: Callable[[], None] = lambda: None,
) -> None:
    """Start a core and serve until the other end of `connection` is gone. See CoreServer.

    If the start fails, the caller is told, and nothing is raised. What a step raises is raised, after all were told.
    """
    timeline = Timeline(start.origin_s, start.spans)
    so_far = max((span.start_s + span.seconds for span in start.spans), default=0.0)
    timeline.add("wait for the core's process", so_far, timeline.now() - so_far)
    progress = RichProgress() if start.progress else SilentProgress()
    try:
        core = start_core(start.config, progress, processors, timeline)
    except BaseException as error:
        with suppress(OSError):
            connection.send(frame(encode(Failed.of(error))))
        connection.close()
        return
    finally:
        when_started()
    try:
        CoreServer(core, start.frontend, connection, listener, token_masks).run()
    finally:
        core.close()
