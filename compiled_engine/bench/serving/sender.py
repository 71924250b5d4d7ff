"""The process that sends requests and reads their answers: nothing else runs in it, so that its clock can be trusted.

It reads a job, a line of JSON, says that it is ready, waits for a line with the time to start, says how many requests
have ended, and in the end gives its report. How late it was itself is part of it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable

import msgspec

from compiled_engine.bench.serving.answer import AnswerReader, Record
from compiled_engine.bench.serving.connection import ConnectionLost, Connections
from compiled_engine.bench.serving.target import PATHS, Target

TICK_S = 0.01
PROGRESS_S = 0.2


class Outgoing(msgspec.Struct):
    """A request: its number in the whole run, when it is due, in seconds from the start, and its body."""

    index: int
    due: float
    body: msgspec.Raw


class Job(msgspec.Struct):
    """requests: in the order in which they are due. concurrency: how many may be under way; None for any number.
    timeout_s: of a request, from sending to its last byte."""

    target: Target
    endpoint: str
    requests: list[Outgoing]
    concurrency: int | None
    timeout_s: float


class Report(msgspec.Struct):
    """cpu_s: processor time of the run, wall_s: its time. lags_s: of ticks every TICK_S seconds, how late each was: so
    late this process may have read what had arrived. late_s: of each request, how late it was sent, apart from what
    waited for `concurrency`."""

    records: list[Record]
    cpu_s: float
    wall_s: float
    lags_s: list[float]
    late_s: list[float]


class Sender:
    """One run."""

    def __init__(self, job: Job, start: float, on_end: Callable[[], None]) -> None:
        self._job = job
        self._start = start
        self._on_end = on_end
        self._connections = Connections(job.target)
        self._late: list[float] = []
        self._lags: list[float] = []
        self._freed = start  # when a place was free again, after there was none

    async def run(self) -> Report:
        """Send each request when it is due; return when all have ended."""
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
    gc.disable()  # a collection would stop the clock of all streams
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
