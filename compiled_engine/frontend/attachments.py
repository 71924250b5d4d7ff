"""Waits for the data that comes with prompts, in threads: for all prompts of a call, or on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from compiled_engine.frontend.request_hooks import Attachment
from compiled_engine.process.progress import Progress

# Prompts whose data is awaited at once, in a call and on an event loop.
OF_A_CALL, OF_A_LOOP = 16, 32
# Seconds before a progress bar appears.
PATIENCE_S = 0.5


def wait_for_all(attached: Sequence[Attachment | None], progress: Progress) -> None:
    """Wait until the data of all prompts is ready. Raises the first error of `Attachment.wait`."""
    if not (waiting := [each for each in attached if each is not None]):
        return
    with (
        progress.stage("prepare prompts", total=len(waiting), patience_s=PATIENCE_S) as advance,
        ThreadPoolExecutor(OF_A_CALL) as threads,
    ):
        for _ in threads.map(lambda each: each.wait(), waiting):
            advance(1)


class AttachmentThreads:
    """Threads that wait for the data of prompts on behalf of an event loop.

    Data that other machines send has threads of its own, as these machines may be slow.
    """

    def __init__(self) -> None:
        self._near = ThreadPoolExecutor(OF_A_LOOP, thread_name_prefix="attached")
        self._remote = ThreadPoolExecutor(OF_A_LOOP, thread_name_prefix="attached from afar")

    async def wait(self, attached: Sequence[Attachment | None]) -> None:
        """Wait until the data is ready. Cancelling the call ends the wait. Raises as `Attachment.wait` does."""
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
