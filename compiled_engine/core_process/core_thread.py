"""The engine core in a thread of the caller's process, behind the same socket as in a process of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import MutableMapping, Sequence
from contextlib import suppress

from compiled_engine.config import EngineConfig
from compiled_engine.core.engine_core import start_core
from compiled_engine.core_process.connection import Connection
from compiled_engine.core_process.core_server import CoreServer
from compiled_engine.core_process.frames import frame
from compiled_engine.core_process.wire import Failed, FrontendOptions, ToCore, decode_to_core, encode
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline
from compiled_engine.sampling.logits_processor import LogitsProcessor, LogitsProcessorFactory
from compiled_engine.sampling.token_mask import TokenMask


class CoreThread:
    """Starts the thread. `socket`: the caller's end; closing it ends the thread."""

    def __init__(
        self,
        config: EngineConfig,
        frontend: FrontendOptions,
        logits_processors: Sequence[LogitsProcessor | LogitsProcessorFactory],
        progress: Progress,
        timeline: Timeline,
        token_masks: MutableMapping[str, TokenMask],
    ) -> None:
        self.socket, other = socket.socketpair()
        arguments = (other, config, frontend, logits_processors, progress, timeline, token_masks)
        self._thread = threading.Thread(target=_run, args=arguments, name="engine core", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """None: it has no process of its own."""
        return None

    def how_it_ended(self, timeout_s: float) -> str:
        self._thread.join(timeout_s)
        return "its thread has ended" if not self._thread.is_alive() else "its thread has closed the connection"

    def close(self, timeout_s: float) -> None:
        """Wait for its end. The socket must be closed."""
        self._thread.join(timeout_s)


def _run(
    sock: socket.socket,
    config: EngineConfig,
    frontend: FrontendOptions,
    logits_processors: Sequence[LogitsProcessor | LogitsProcessorFactory],
    progress: Progress,
    timeline: Timeline,
    token_masks: MutableMapping[str, TokenMask],
) -> None:
    connection: Connection[ToCore] = Connection(sock, decode_to_core)
    try:
        core = start_core(config, progress, logits_processors, timeline)
    except BaseException as error:
        with suppress(OSError):
            connection.send(frame(encode(Failed.of(error))))
        connection.close()
        return
    try:
        with suppress(BaseException):  # the caller has been told
            CoreServer(core, frontend, connection, token_masks=token_masks).run()
    finally:
        core.close()
