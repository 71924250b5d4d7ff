"""From the order to start until the caller is gone: what thread and process have in common."""

from __future__ import annotations

import socket
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress

from compiled_engine.core_process.connection import Connection
from compiled_engine.core_process.core_server import CoreServer
from compiled_engine.core_process.frames import frame
from compiled_engine.core_process.start_cores import start_cores
from compiled_engine.core_process.wire import Failed, Start, ToCore, encode
from compiled_engine.process.progress import RichProgress, SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.sampling.logits_processor import LogitsProcessor, LogitsProcessorFactory
from compiled_engine.sampling.token_mask import TokenMask
from compiled_engine.workers.launched_workers import LaunchedWorkers

GivenProcessors = Sequence[LogitsProcessor | LogitsProcessorFactory | str]


def run_core(
    start: Start,
    connection: Connection[ToCore],
    processors: GivenProcessors,
    listener: socket.socket | None = None,
    token_masks: MutableMapping[str, TokenMask] | None = None,
    when_started: Callable[[], None] = lambda: None,
    workers: LaunchedWorkers | None = None,
) -> None:
    """Start a core and serve until the other end of `connection` is gone. See CoreServer, and start_core for workers.

    If the start fails, the caller is told, and nothing is raised. What a step raises is raised, after all were told.
    """
    timeline = Timeline(start.origin_s, start.spans)
    so_far = max((span.start_s + span.seconds for span in start.spans), default=0.0)
    timeline.add("wait for the core's process", so_far, timeline.now() - so_far)
    progress = RichProgress() if start.progress else SilentProgress()
    try:
        core = start_cores(start.config, progress, processors, timeline, workers)
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
