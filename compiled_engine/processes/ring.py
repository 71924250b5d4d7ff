"""A stream of messages over a ring buffer in shared memory, from one process to one or more readers.

Every reader gets all messages. The memory is anonymous: processes inherit its descriptor, and it is freed when the last
of them ends, however it ends. The same holds for each reader's doorbell, an eventfd. The doorbell also orders memory
accesses: the writer signals after writing, and a reader reads after the signal.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

CAPACITY = 4 << 20
_WORD = 8
_LENGTH = struct.Struct("<Q")
_NEXT_LOOK_S = 50e-6


class RingDescriptors(NamedTuple):
    """File descriptors of a ring buffer, which processes inherit: its memory, and an eventfd (doorbell) per reader."""

    memory: int
    bells: tuple[int, ...]

    @classmethod
    def make(cls, num_readers: int, capacity: int = CAPACITY) -> RingDescriptors:
        memory = os.memfd_create("compiled-engine-ring", os.MFD_CLOEXEC)
        os.ftruncate(memory, _WORD * (1 + num_readers) + capacity)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        return cls(memory, tuple(os.eventfd(0, flags) for _ in range(num_readers)))

    def close(self) -> None:
        for descriptor in (self.memory, *self.bells):
            os.close(descriptor)


def await_bell(bells: select.poll, busy_s: float) -> None:
    """Wait until one of the doorbells registered with `bells` is readable.

    Polls without sleeping for the first `busy_s` seconds, since waking a sleeping processor adds to the time of a step.
    """
    give_up = time.monotonic() + busy_s
    while time.monotonic() < give_up:
        if bells.poll(0):
            return
    bells.poll()


class _Memory:
    """The memory of a ring buffer, mapped into this process.

    Layout: the number of bytes written so far; for each reader, the number of bytes read; then the data. Byte number i
    of the stream is at offset i modulo the capacity.
    """

    def __init__(self, ring: RingDescriptors):
        self._map = mmap.mmap(ring.memory, 0)
        header = _WORD * (1 + len(ring.bells))
        self.counts = memoryview(self._map)[:header].cast("Q")
        self.content = memoryview(self._map)[header:]

    def close(self) -> None:
        self.counts.release()
        self.content.release()
        self._map.close()


class RingWriter:
    """Writes messages to a ring buffer. Only one thread of one process may write.

    `no_room` is called repeatedly while the buffer is full. It must raise once the readers are gone.
    """

    def __init__(self, ring: RingDescriptors, no_room: Callable[[], None]):
        self._bells = ring.bells
        self._memory = _Memory(ring)
        self._no_room = no_room

    def write(self, message: bytes) -> None:
        """Write a message, and wait while the buffer is full. Raises the errors of `no_room`.

        A message longer than the buffer passes through in parts.
        """
        counts, content = self._memory.counts, self._memory.content
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        while rest:
            written = counts[0]
            room = len(content) - (written - min(counts[1:]))
            if not room:
                self._no_room()
                time.sleep(_NEXT_LOOK_S)
                continue
            place = written % len(content)
            part = rest[: min(room, len(content) - place)]
            content[place : place + len(part)] = part
            counts[0] = written + len(part)
            for bell in self._bells:
                os.eventfd_write(bell, 1)
            rest = rest[len(part) :]

    def close(self) -> None:
        self._memory.close()


class RingReader:
    """Reads the messages of a ring buffer as the reader with number `index`. See `await_bell` for `busy_s`."""

    def __init__(self, ring: RingDescriptors, index: int = 0, busy_s: float = 0.0):
        self._memory = _Memory(ring)
        self._own = 1 + index
        self._found = bytearray()
        self._bell = ring.bells[index]
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._busy_s = busy_s

    def read(self, wait: Callable[[], None] | None = None) -> bytes:
        """Return the next message, after waiting until all of it has been written.

        wait: called to wait until the doorbell is readable; its errors are raised. None: wait without a time limit.
        """
        wait = wait or self._wait
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, wait))
        return self._take(length, wait)

    def take_in(self) -> bool:
        """Move available bytes out of the ring buffer, so that the writer has room. `read` returns them later.

        Returns whether any bytes were available.
        """
        counts, content, own = self._memory.counts, self._memory.content, self._own
        read = counts[own]
        place = read % len(content)
        part = min(counts[0] - read, len(content) - place)
        self._found += content[place : place + part]
        counts[own] = read + part
        return part > 0

    def _take(self, count: int, wait: Callable[[], None]) -> bytes:
        while len(self._found) < count:
            if not self.take_in():
                wait()
                os.eventfd_read(self._bell)
        taken = bytes(self._found[:count])
        del self._found[:count]
        return taken

    def _wait(self) -> None:
        await_bell(self._poll, self._busy_s)

    def close(self) -> None:
        self._memory.close()
