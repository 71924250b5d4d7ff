"""Publishes events over ZeroMQ as vLLM does: a PUB socket for each batch, and a ROUTER socket that replays old ones.

A message on the PUB socket is (topic, sequence number, batch), with the number as 8 bytes, big-endian, and the batch in
msgpack. A subscriber that finds a gap in the numbers sends the first missing one to the ROUTER socket. The answer is
each kept batch from this number on, as (number, batch), and then the number -1 with an empty batch.

Only the publisher's thread uses the sockets. Neither a slow nor an absent subscriber delays it, as a PUB socket drops
the messages that a subscriber has no room for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque

import msgspec
import zmq

from compiled_engine.config import KVEventsConfig
from compiled_engine.features.kv_events.events import Event, EventBatch

log = logging.getLogger("compiled_engine")

END = (-1).to_bytes(8, "big", signed=True)
_CLOSE_S, _LINGER_MS = 2.0, 200


class Publisher:
    """Publishes batches of events from a thread. Raises ValueError if an endpoint cannot be used."""

    def __init__(self, config: KVEventsConfig) -> None:
        self._topic, self._rank, self._max_queued = config.topic.encode(), config.data_parallel_rank, config.max_queued
        self._queue: deque[tuple[int, float, list[Event]]] = deque()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._encode = msgspec.msgpack.Encoder().encode
        self._next = 0
        self._closing = False
        self.num_batches = self.num_events = self.num_dropped = 0
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()  # inproc endpoints need the process's own
        self._pub, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        try:
            self._pub.set_hwm(config.hwm)
            _open(self._pub, "endpoint", config.endpoint, binds=_binds(config.endpoint))
            # A whole replay must fit, as a ROUTER socket drops messages beyond this number.
            self._replay.set_hwm(config.buffer_steps + 1)
            if config.replay_endpoint is not None:
                _open(self._replay, "replay_endpoint", config.replay_endpoint, binds=True)
        except BaseException:
            self._close_sockets()
            raise
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[Event]) -> None:
        """Queue a batch. It is dropped if max_queue_size batches wait; its sequence number is then missing."""
        number, self._next = self._next, self._next + 1
        if len(self._queue) >= self._max_queued:
            self.num_dropped += 1
            return
        self.num_batches += 1
        self.num_events += len(events)
        self._queue.append((number, time.time(), events))
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Publish what is queued, and close the sockets. Call it once."""
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._bell)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._closing or self._queue:
                ready = dict(poller.poll())
                if self._bell in ready:
                    os.eventfd_read(self._bell)
                while self._queue:
                    self._send(*self._queue.popleft())
                if self._replay in ready:
                    self._answer()
        except Exception:
            log.exception("KV events are published no more")
            self._max_queued = 0
            self._queue.clear()
        finally:
            self._close_sockets()

    def _send(self, number: int, published_s: float, events: list[Event]) -> None:
        batch = self._encode(EventBatch(published_s, events, self._rank))
        numbered = number.to_bytes(8, "big")
        self._kept.append((numbered, batch))
        self._pub.send_multipart((self._topic, numbered, batch))

    def _answer(self) -> None:
        """Receive a subscriber's request for old batches, and send those that are kept. Logs a malformed request."""
        client, *rest = self._replay.recv_multipart()
        if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
            log.warning("a replay of KV events is asked for with %d frames, not an empty one and 8 bytes", len(rest))
            return
        first = rest[1]
        for number, batch in self._kept:
            if number >= first:
                self._replay.send_multipart((client, b"", number, batch))
        self._replay.send_multipart((client, b"", END, b""))

    def _close_sockets(self) -> None:
        for socket in (self._pub, self._replay):
            socket.close(linger=_LINGER_MS)


def _binds(endpoint: str) -> bool:
    """Return whether the PUB socket binds to its endpoint; otherwise it connects. The rule is vLLM's."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _open(socket: zmq.Socket[bytes], name: str, endpoint: str, *, binds: bool) -> None:
    try:
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        verb = "bound" if binds else "connected to"
        raise ValueError(f"kv_events_config[{name!r}] is {endpoint!r}, which cannot be {verb}: {error}") from error
