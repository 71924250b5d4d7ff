"""Gives the core the data of prompts that it asks for, such as pixels. Threads prepare it, since that may take long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from compiled_engine.engine.messages import ControlCall
from compiled_engine.frontend.output_processor import Asked
from compiled_engine.process.smallest_first import WorkStopped, never
from compiled_engine.processes.core_client import CoreClient, EngineDeadError

NUM_THREADS = 16
Calls = Sequence[ControlCall]


class AskedData:
    """Prepares data for a loop that sends it between two steps."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="asked")  # they start when needed
        self._running: dict[Future[Calls], str] = {}

    def __len__(self) -> int:
        """Return how often `take` will return data."""
        return len(self._running)

    def begin(self, asked: Asked) -> None:
        """Begin to prepare what is asked for."""
        self._running[self._threads.submit(asked.give, asked.keys, never)] = asked.engine_request_id

    def take(self, timeout_s: float = 0) -> list[tuple[str, Calls]]:
        """Return data that is ready: engine request ids with the control calls for each of them.

        timeout_s: longest time to wait if none is ready. Raises what a `give` raises.
        """
        if not self._running:
            return []
        ready = wait(self._running, timeout_s, FIRST_COMPLETED).done
        return [(self._running.pop(each), each.result()) for each in ready]

    def close(self) -> None:
        """Prepare nothing any more. Does not wait for the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class AskedDataOfStreams:
    """Prepares data for requests on an event loop, and sends it.

    is_tracked: returns whether an engine request runs. fail: ends a prompt with an error, and returns the ids of its
    engine requests that run.
    """

    def __init__(self, is_tracked: Callable[[str], bool], fail: Callable[[str, Exception], list[str]]) -> None:
        self._is_tracked, self._fail = is_tracked, fail
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="asked")
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, asked: Asked, client: CoreClient) -> None:
        """Begin to prepare what is asked for, and to send it to the core."""
        task = asyncio.get_running_loop().create_task(self._give(asked, client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give(self, asked: Asked, client: CoreClient) -> None:
        def is_stopped() -> bool:
            return not self._is_tracked(asked.engine_request_id)

        try:
            calls = await asyncio.wrap_future(self._threads.submit(asked.give, asked.keys, is_stopped))
            for call in calls:
                await client.drained()  # one is sent when the one before has left
                client.tell(call, [asked.engine_request_id])
        except (WorkStopped, EngineDeadError):  # the request has ended, or ends with the core
            return
        except Exception as error:
            client.abort(self._fail(asked.request_id, error))
