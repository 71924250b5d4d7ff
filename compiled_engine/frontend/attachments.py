"""Waits in threads for the data that comes with prompts, such as images, for a call of `LLM` or an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from compiled_engine.frontend.prepared_request import PreparedRequest
from compiled_engine.frontend.request_hooks import Attachment

# Prompts whose data is awaited at once, in a call and on an event loop.
OF_A_CALL, OF_A_LOOP = 16, 32


class Arrivals:
    """Makes the requests of a call of `LLM`, each once the data of its prompt is ready.

    Data is prepared while other requests run. Running requests and prompts in preparation are together at most
    `most_running` + 16 (OF_A_CALL). So a call with many images neither waits for all of them, nor holds all of them in
    memory.

    attached: the attachment of each prompt, None for a prompt without data. makers: for each prompt, the function that
    makes its request, called in the caller's thread. order: the prompts' indices, in the order in which requests are
    made.
    """

    def __init__(
        self,
        attached: Sequence[Attachment | None],
        makers: Sequence[Callable[[], PreparedRequest]],
        order: Sequence[int],
        most_running: int,
    ) -> None:
        self._prompts = dict(enumerate(zip(attached, makers, strict=True)))
        self._left, self._begun = deque(order), deque[tuple[int, Future[None] | None]]()
        self._most = most_running + OF_A_CALL
        self._threads = ThreadPoolExecutor(OF_A_CALL, thread_name_prefix="arriving")
        self._is_over = threading.Event()
        self.request_ids = [""] * len(makers)  # of the requests that `take` has returned, by prompt

    def __len__(self) -> int:
        """Return the number of requests that `take` has not returned yet."""
        return len(self._prompts)

    def take(self, num_running: int) -> list[PreparedRequest]:
        """Return the next requests whose data is ready. Waits for one if no request of the call runs.

        num_running: number of the call's requests that run. Raises the errors of `Attachment.wait` and of the makers.
        """
        while self._left and num_running + len(self._begun) < self._most:
            index = self._left.popleft()
            attachment, _ = self._prompts[index]
            waiting = None if attachment is None else self._threads.submit(attachment.wait, self._is_over.is_set)
            self._begun.append((index, waiting))
        ready: list[PreparedRequest] = []
        while self._begun:
            index, waiting = self._begun[0]
            if waiting is not None:
                if (num_running or ready) and not waiting.done():
                    break
                waiting.result()
            self._begun.popleft()
            _, make = self._prompts.pop(index)
            ready.append(make())
            self.request_ids[index] = ready[-1].request_id
        return ready

    def close(self) -> None:
        """Stop waiting for data."""
        self._is_over.set()
        self._threads.shutdown(wait=False, cancel_futures=True)


class AttachmentThreads:
    """Waits for the data of prompts in threads, on behalf of an event loop.

    Data that other machines send has separate threads, as these machines may be slow.
    """

    def __init__(self) -> None:
        self._near = ThreadPoolExecutor(OF_A_LOOP, thread_name_prefix="attached")
        self._remote = ThreadPoolExecutor(OF_A_LOOP, thread_name_prefix="attached from afar")

    async def wait(self, attached: Sequence[Attachment | None]) -> None:
        """Wait until the data of all attachments is ready. Cancelling the call ends the wait.

        Raises the errors of `Attachment.wait`.
        """
        is_over = threading.Event()
        try:
            for each in attached:
                if each is not None and not each.is_ready:
                    threads = self._remote if each.is_remote else self._near
                    await asyncio.wrap_future(threads.submit(each.wait, is_over.is_set))
        finally:
            is_over.set()

    def close(self) -> None:
        """End the threads, without waiting for them."""
        for threads in (self._near, self._remote):
            threads.shutdown(wait=False, cancel_futures=True)
