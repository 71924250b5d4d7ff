"""The engine core in a thread of the caller's process, behind the same socket as in a process of its own."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import MutableMapping

from compiled_engine.core_process.connection import Connection
from compiled_engine.core_process.run_core import GivenProcessors, run_core
from compiled_engine.core_process.wire import Start, ToCore, decode_to_core
from compiled_engine.sampling.token_mask import TokenMask

log = logging.getLogger("compiled_engine")


class CoreThread:
    """See RunningCore."""

    def __init__(self) -> None:
        self.address: str | None = None
        self.socket, self._other = socket.socketpair()
        self._thread: threading.Thread | None = None

    def start(self, start: Start, processors: GivenProcessors, token_masks: MutableMapping[str, TokenMask]) -> None:
        """token_masks: those of requests, by engine request id, each before its request."""
        arguments = (start, self._other, processors, token_masks)
        self._thread = threading.Thread(target=_run, args=arguments, name="engine core", daemon=True)
        self._thread.start()

    def how_it_ended(self, timeout_s: float) -> str:
        if self._thread is not None:
            self._thread.join(timeout_s)
        return "its thread has closed the connection"

    def close(self, timeout_s: float) -> None:
        self.socket.close()
        if self._thread is None:
            self._other.close()
        else:
            self._thread.join(timeout_s)


def _run(
    start: Start, sock: socket.socket, processors: GivenProcessors, token_masks: MutableMapping[str, TokenMask]
) -> None:
    connection: Connection[ToCore] = Connection(sock, decode_to_core)
    try:
        run_core(start, connection, processors, token_masks=token_masks)
    except Exception:
        log.exception("the engine core has ended")
