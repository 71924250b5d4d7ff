"""The server's lifecycle, from binding the port to the end of the last request or of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from compiled_engine.engine.control import FatalError
from compiled_engine.server.connections import Connections, connections_of_a_process
from compiled_engine.server.fair_listener import FairListener
from compiled_engine.server.http_protocol import bounded_protocol
from compiled_engine.server.middleware import is_loopback
from compiled_engine.server.options import ANY_ORIGIN, ServerOptions

if TYPE_CHECKING:
    from compiled_engine.async_llm import AsyncLLM
    from compiled_engine.server.api_servers import ApiServers, Place
    from compiled_engine.server.middleware import RequestScope

log = logging.getLogger("compiled_engine")

# The server runs on this long after the engine's death, so that clients and monitoring see the error.
FAREWELL_S = 1.0
BACKLOG = 2048


def bind(options: ServerOptions) -> socket.socket:
    """Return the server's socket, bound but not listening. Raises OSError with the address if it is not available.

    Log a warning if other machines or all web pages can use the server without an API key.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    if not options.api_key and not is_loopback(options.host):
        log.warning("any client that can reach %s may use this server: it requires no API key", options.host)
    elif not options.api_key and ANY_ORIGIN in options.allowed_origin:
        log.warning("any web page that is opened on this machine may use this server: it requires no API key")
    # Asyncio sets TCP_NODELAY only on sockets with an explicit TCP protocol, which accepted sockets inherit.
    # Otherwise the second part of an answer waits 40 ms for the client to acknowledge the first.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((options.host, options.port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise OSError(f"cannot listen at {options.host}, port {options.port}: {error}") from error
    return bound


class Server(uvicorn.Server):
    """The HTTP server.

    At the first signal, it ends after the running requests, or after shutdown_timeout if they take longer. At the
    second signal, it ends immediately. `place` is the state shared with other API processes, if there are any. `others`
    are the processes that this one has started, to which it passes signals on. `announce` is called once connections
    are accepted.
    """

    def __init__(
        self,
        app: RequestScope,
        options: ServerOptions,
        place: Place | None = None,
        others: ApiServers | None = None,
        announce: Callable[[], object] = lambda: None,
    ) -> None:
        most = connections_of_a_process(options.limits.max_connections, options.api_server_count)
        self._connections = Connections(most) if place is None else Connections(most, place.count)
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(options.limits, self._connections),
                loop="none",
                lifespan="off",
                ws="none",
                log_level=options.uvicorn_log_level,
                access_log=options.logs_requests,
                server_header=False,
                proxy_headers=False,
                root_path=options.root_path and "/" + options.root_path.strip("/"),
                backlog=BACKLOG,
                timeout_keep_alive=options.limits.keep_alive_timeout,  # type: ignore[arg-type]
                timeout_graceful_shutdown=options.shutdown_timeout,  # type: ignore[arg-type]
                ssl_keyfile=options.ssl_keyfile,
                ssl_certfile=options.ssl_certfile,
            )
        )
        self._app = app
        self._place = place
        self._announce = announce
        self.others = others

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        place = self._place
        has_most = (lambda: False) if place is None else place.has_most
        if place is not None:
            await place.begin()
        self.servers: list[Any] = []
        for bound in sockets or ():
            listener = FairListener(bound, self._make_protocol, self.config.ssl, self._connections, has_most)
            listener.start(BACKLOG)
            self.servers.append(listener)
        self.started = True
        self._announce()

    def _make_protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made

    def forget(self, process: int) -> None:
        """Drop the shared state of another API process, which has ended."""
        self._app.serving.admission.forget(process)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop gracefully at the first signal, and immediately at the second."""
        if self.others is not None:
            self.others.stop()
        if self.should_exit:
            self.force_exit = True
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        self.stop()

    def stop(self) -> None:
        """Accept no more requests, and end the server after the running requests."""
        self.should_exit = True
        self._app.serving.stopping.set()


async def serve(engine: AsyncLLM, server: Server, bound: socket.socket) -> str | None:
    """Serve until a signal or a failure, then shut down the engine.

    Returns None after a signal, or the reason why the server cannot go on.
    """
    others = server.others
    watching = [asyncio.create_task(_end_with_engine(engine, server))]
    if others is not None:
        watching.append(asyncio.create_task(_end_with_others(others, server)))
    preparing = asyncio.create_task(_prepare_forms(engine))
    try:
        await server.serve(sockets=[bound])
        if others is not None:
            await others.wait_ended(server.config.timeout_graceful_shutdown or 0)
    finally:
        given_up = [task.result() for task in watching if task.done() and not task.cancelled()]
        reason = engine.errored or next(iter(given_up), None)
        for task in (*watching, preparing):
            task.cancel()
        if others is not None:
            others.kill()
        await engine.shutdown()
    return reason


async def _prepare_forms(engine: AsyncLLM) -> None:
    """Read the vocabulary for grammars before requests run, since reading it later would delay a step of the engine."""
    # Without a tokenizer there are no grammars. _end_with_engine reports why an engine has ended.
    with contextlib.suppress(ValueError, FatalError):
        await engine.prepare_structured_outputs()


async def _end_with_engine(engine: AsyncLLM, server: Server) -> str:
    reason = await engine.wait_dead()
    if server.others is not None:
        server.others.stop_replacing()
    log.error("the engine has died, and the server ends: %s", reason)
    await asyncio.sleep(FAREWELL_S)
    server.stop()
    return reason


async def _end_with_others(others: ApiServers, server: Server) -> str:
    reason = await others.keep(server.forget)
    log.error("the server ends: %s", reason)
    others.stop()
    server.stop()
    return reason


def address(options: ServerOptions, bound: socket.socket) -> str:
    """Return the server's URL, with the address and port of the socket `bound`."""
    host, port = bound.getsockname()[:2]
    scheme = "http" if options.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.contextmanager
def first_signal_interrupts() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt within the block, as Ctrl+C does. Used while the engine starts."""

    def interrupt(sig: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
