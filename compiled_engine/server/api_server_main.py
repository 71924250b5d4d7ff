"""The program of an additional API process."""

from __future__ import annotations

import asyncio
import socket
import sys

import msgspec

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.process.memory import freeze_heap
from compiled_engine.server.api_servers import Order, Place
from compiled_engine.server.app import build_app
from compiled_engine.server.connections import allow_many_files
from compiled_engine.server.run import Server, serve
from compiled_engine.server.shared_figures import SharedFigures


def main() -> None:
    """Read an Order, which says what to serve, from stdin and serve until told to end. Exit if stdin is empty.

    The arguments are this process's number, after the descriptors of the listening socket and of the memory that API
    processes share (SharedFigures).
    """
    listening, figures, number = map(int, sys.argv[1:4])
    order = sys.stdin.buffer.read()
    if order:
        reason = asyncio.run(_serve(msgspec.json.decode(order, type=Order), listening, figures, number))
        sys.exit(reason is not None)


async def _serve(order: Order, listening: int, descriptor: int, number: int) -> str | None:
    options = order.options
    figures = SharedFigures(options.api_server_count, number, descriptor)
    place = Place(figures)
    engine = await AsyncLLM.join(order.address)
    app = build_app(engine, options, order.model_name, figures)
    allow_many_files()
    freeze_heap()
    return await serve(engine, Server(app, options, place), socket.socket(fileno=listening))
