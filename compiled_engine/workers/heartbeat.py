"""Signs of life in shared memory: each worker's last one, and the executor's view of them."""

from __future__ import annotations

import mmap
import os
import threading
import time

_EVERY_S = 0.5
_WORD = 8


class Heartbeats:
    """One number a rank: when its worker last gave a sign of life, in seconds of time.monotonic; 0 before the first."""

    def __init__(self, num_ranks: int, descriptor: int | None = None):
        """descriptor: of the memory that another process has made."""
        self.descriptor = descriptor
        if self.descriptor is None:
            self.descriptor = os.memfd_create("compiled-engine-heartbeats", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, num_ranks * _WORD)
        self._map = mmap.mmap(self.descriptor, num_ranks * _WORD)
        self._times = memoryview(self._map).cast("d")

    def last_s(self, rank: int) -> float:
        """When the rank last gave a sign of life; 0 before its first."""
        return self._times[rank]

    def beat(self, rank: int) -> None:
        """Give signs of life from now on, as long as this process runs Python."""
        threading.Thread(target=self._beat, args=(rank,), name="heartbeat", daemon=True).start()

    def _beat(self, rank: int) -> None:
        while True:
            self._times[rank] = time.monotonic()
            time.sleep(_EVERY_S)

    def close(self) -> None:
        self._times.release()
        self._map.close()
        assert self.descriptor is not None
        os.close(self.descriptor)
