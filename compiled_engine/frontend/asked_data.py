"""Prepares data of prompts that the core asks for, such as pixels, in threads, since the preparation may take long."""

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
    """Prepares data of prompts, such as pixels, that the core asks for.

    The caller's loop takes ready data by `take`, and sends it between steps.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="asked")  # they start when needed
        self._running: dict[Future[Calls], str] = {}

    def __len__(self) -> int:
        """Return the number of items that `take` has not returned yet."""
        return len(self._running)

    def begin(self, asked: Asked) -> None:
        """Begin to prepare the data that the core asks for with `asked`."""
        self._running[self._threads.submit(asked.give, asked.keys, never)] = asked.engine_request_id

    def take(self, timeout_s: float = 0) -> list[tuple[str, Calls]]:
        """Return the data that is ready: pairs of an engine request's id and the control calls that bring its data.

        An engine request is one completion of a prompt. timeout_s: longest time to wait if no data is ready. Raises the
        errors of `Asked.give`.
        """
        if not self._running:
            return []
        ready = wait(self._running, timeout_s, FIRST_COMPLETED).done
        return [(self._running.pop(each), each.result()) for each in ready]

    def close(self) -> None:
        """Stop preparing data. Does not wait for the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class AskedDataOfStreams:
    """Prepares data of prompts, such as pixels, that the core asks for, and sends it from an event loop.

    is_tracked: returns whether the engine request (one completion) with this id runs. fail: ends all completions of a
    prompt with an error, given the prompt's request id; returns the ids of its engine requests that still run, which
    are then aborted.
    """

    def __init__(self, is_tracked: Callable[[str], bool], fail: Callable[[str, Exception], list[str]]) -> None:
        self._is_tracked, self._fail = is_tracked, fail
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="asked")
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, asked: Asked, client: CoreClient) -> None:
        """Begin to prepare the data that the core asks for with `asked`, and to send it."""
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
