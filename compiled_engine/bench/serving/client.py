"""Program of the process that sends a load test's requests and reads the answers.

Nothing else runs in the process, so that its times are reliable. The program reads a job as a line of JSON, reports
that it is ready, and waits for a line with the start time. During the run it reports how many requests have ended.
Finally it writes its report, which includes its own delays.

Connections are asyncio protocols with httptools' parser: with thousands of streams, a client library would dominate the
measurement.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import httptools
import msgspec

from compiled_engine.bench.serving.target import PATHS, Target

KEPT_TEXT = 300


class Record(msgspec.Struct):
    """A request and its answer. Times are seconds from the start of the run."""

    index: int
    due: float  # when it should be sent
    sent: float | None = None  # None if it was not sent
    end: float | None = None  # last byte of the answer
    chunk_times: list[float] = []  # parts of the answer with output
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counted_by: str = "chunks"  # usage (the server's count), token_ids, or chunks, if the server reports neither
    error: str | None = None  # the kind of failure
    message: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    def carries_output(self) -> bool:
        delta = self.delta
        return bool(
            self.text
            or self.token_ids
            or (delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls))
        )


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class AnswerReader:
    """Parses the body of one answer, which may arrive in pieces of any size, into its record.

    start: time of the run's start, by time.monotonic.
    """

    def __init__(self, record: Record, start: float) -> None:
        self._record = record
        self._start = start
        self._rest = b""
        self._decode = msgspec.json.Decoder(_Chunk).decode
        self._beginning = b""
        self._is_done = False
        self._num_ids = 0
        self._all_have_ids = True

    def feed(self, data: bytes, now: float) -> None:
        """Parse a piece of the body that arrived at `now`, by time.monotonic."""
        if len(self._beginning) < KEPT_TEXT:
            self._beginning += data[:KEPT_TEXT]
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def finish(self, status: int, now: float) -> None:
        """Complete the record at the end of the answer, at `now` by time.monotonic.

        Records a failure if the HTTP status is not 200, the stream is incomplete, or there is no output.
        """
        record = self._record
        record.end = now - self._start
        if self._rest.removeprefix(b"data:").strip() == b"[DONE]":  # a last line without an end
            self._is_done = True
        if status != 200:
            self.fail(f"HTTP {status}", self._beginning.decode(errors="replace"))
        elif record.error is None and not self._is_done:
            self.fail("incomplete stream", "the answer ended without [DONE]")
        elif record.error is None and not record.chunk_times:
            self.fail("no output", "the answer has no text and no token")
        if record.counted_by != "usage":
            record.counted_by = "token_ids" if self._all_have_ids and self._num_ids else "chunks"
            record.output_tokens = self._num_ids if record.counted_by == "token_ids" else len(record.chunk_times)

    def fail(self, kind: str, message: str) -> None:
        """Record a failure, unless the record has one already."""
        if self._record.error is None:
            self._record.error, self._record.message = kind, message[:KEPT_TEXT]

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.fail("malformed event", f"{error}: {data[:100].decode(errors='replace')}")
            return
        record = self._record
        if chunk.error is not None:
            self.fail("error event", str(chunk.error))
        output = [choice for choice in chunk.choices if choice.carries_output()]
        if output:
            record.chunk_times.append(now - self._start)
            ids = [choice.token_ids for choice in output]
            self._all_have_ids = self._all_have_ids and None not in ids
            self._num_ids += sum(len(each) for each in ids if each is not None)
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            record.output_tokens, record.counted_by = chunk.usage.completion_tokens, "usage"
            record.prompt_tokens = chunk.usage.prompt_tokens


# Receives a part of an answer's body, and the time of its arrival.
OnBody = Callable[[bytes, float], None]


class ConnectionLost(Exception):
    """The connection was closed, or received no HTTP, before the answer was complete. had_begun: part had arrived."""

    def __init__(self, reason: str, had_begun: bool) -> None:
        super().__init__(reason)
        self.had_begun = had_begun


class Connection(asyncio.Protocol):
    """A connection to the server, over which requests are sent one after the other."""

    def __init__(self) -> None:
        self.is_open = True
        self.status = 0
        self.num_requests = 0
        self._now = 0.0
        self._parser: Any = None
        self._on_body: OnBody | None = None
        self._answered: asyncio.Future[None] | None = None
        self._begun = False

    async def ask(self, request: bytes, on_body: OnBody) -> int:
        """Send a request, pass the answer's body to `on_body`, and return the HTTP status. Raises ConnectionLost."""
        self._parser = httptools.HttpResponseParser(self)
        self._on_body, self._begun, self.status = on_body, False, 0
        self._answered = asyncio.get_running_loop().create_future()
        self.num_requests += 1
        if not self.is_open:
            raise ConnectionLost("closed", had_begun=False)
        self._transport.write(request)
        try:
            await self._answered
        except BaseException:
            self.close()
            raise
        finally:
            self._on_body = self._answered = None
        if not self._parser.should_keep_alive():
            self.close()
        return self.status

    def close(self) -> None:
        """Close the connection. May be called repeatedly."""
        self.is_open = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        if self._answered is None:  # no request is in progress
            self.close()
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail(str(exc) if exc is not None else "closed by the server")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(body, self._now)

    def on_message_complete(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionLost(reason, self._begun))


class Connections:
    """A pool of connections to one server."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._ssl = target.ssl_context()
        self._idle: list[Connection] = []

    async def ask(self, request: bytes, on_body: OnBody) -> int:
        """Send a request over an idle or a new connection, and return the HTTP status of the answer.

        on_body: see `Connection.ask`. If the server has closed an idle connection, another one is used. Raises
        ConnectionLost if a new connection is lost, or if an idle one is lost after part of the answer has arrived, and
        OSError if no connection can be made.
        """
        while True:
            connection = await self._take()
            try:
                status = await connection.ask(request, on_body)
            except ConnectionLost as error:
                if error.had_begun or connection.num_requests == 1:
                    raise
                continue
            if connection.is_open:
                self._idle.append(connection)
            return status

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _take(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, self._target.host, self._target.port, ssl=self._ssl
        )
        return connection


TICK_S = 0.01
PROGRESS_S = 0.2


class Outgoing(msgspec.Struct):
    """A request to send, and when to send it."""

    index: int  # its number in the whole run
    due: float  # seconds from the start
    body: msgspec.Raw


class Job(msgspec.Struct):
    """The requests that one process sends, and how it sends them."""

    target: Target
    endpoint: str
    requests: list[Outgoing]  # ordered by due time
    concurrency: int | None  # most requests at a time; None for no bound
    timeout_s: float  # of a request, from sending to its last byte


class Report(msgspec.Struct):
    """The records of a process's requests, and how busy and late the process was."""

    records: list[Record]
    cpu_s: float  # CPU time of the run
    wall_s: float  # duration of the run
    lags_s: list[float]  # Delay of each tick of TICK_S seconds. Arrived data may have been read this late.
    late_s: list[float]  # delay of each sending, without waiting for `concurrency`


class Sender:
    """Sends the requests of a job. on_end: called when a request has ended."""

    def __init__(self, job: Job, start: float, on_end: Callable[[], None]) -> None:
        self._job = job
        self._start = start
        self._on_end = on_end
        self._connections = Connections(job.target)
        self._late: list[float] = []
        self._lags: list[float] = []
        self._freed = start  # when a slot became free after all were taken

    async def run(self) -> Report:
        """Send each request when it is due. Return the report once all requests have ended."""
        job = self._job
        slots = None if job.concurrency is None else asyncio.Semaphore(job.concurrency)
        watch = asyncio.create_task(self._watch_lag())
        await asyncio.sleep(self._start - time.monotonic())
        cpu = time.process_time()
        tasks = []
        records = []
        for request in job.requests:
            ready = self._start + request.due
            if (wait := ready - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            if slots is not None:
                await slots.acquire()
                ready = max(ready, self._freed)
            records.append(Record(request.index, request.due))
            tasks.append(asyncio.create_task(self._send(request, records[-1], ready, slots)))
        await asyncio.gather(*tasks)
        watch.cancel()
        self._connections.close()
        wall = time.monotonic() - self._start
        return Report(records, time.process_time() - cpu, wall, self._lags, self._late)

    async def _send(self, request: Outgoing, record: Record, ready: float, slots: asyncio.Semaphore | None) -> None:
        reader = AnswerReader(record, self._start)
        status = 200
        now = time.monotonic()
        self._late.append(now - ready)
        record.sent = now - self._start
        try:
            async with asyncio.timeout(self._job.timeout_s):
                whole = self._job.target.request(PATHS[self._job.endpoint], bytes(request.body))
                status = await self._connections.ask(whole, reader.feed)
        except TimeoutError:
            reader.fail("timeout", f"no end after {self._job.timeout_s:g} s")
        except ConnectionLost as error:
            reader.fail("connection lost", str(error))
        except OSError as error:
            reader.fail(f"no connection: {type(error).__name__}", str(error))
        finally:
            reader.finish(status, time.monotonic())
            if slots is not None:
                self._freed = time.monotonic() if slots.locked() else self._freed
                slots.release()
            self._on_end()

    async def _watch_lag(self) -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            if due > self._start:
                self._lags.append(time.monotonic() - due)


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would delay all streams
    _say({"ready": True})
    start = float(sys.stdin.buffer.readline())
    ended, said = 0, time.monotonic()

    def count() -> None:
        nonlocal ended, said
        ended += 1
        if time.monotonic() - said > PROGRESS_S:
            said = time.monotonic()
            _say({"ended": ended})

    report = asyncio.run(Sender(job, start, count).run())
    _say({"ended": ended})
    sys.stdout.buffer.write(msgspec.json.encode({"report": report}) + b"\n")
    sys.stdout.buffer.flush()


def _say(value: dict[str, object]) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
