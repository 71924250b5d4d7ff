"""The ring of shared memory: messages arrive whole and in order, at every reader."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.processes.ring import RingDescriptors, RingReader, RingWriter


def never() -> None:
    raise AssertionError("somebody reads")


def received(ring: RingDescriptors, count: int) -> tuple[list[list[bytes]], list[threading.Thread]]:
    """Return each reader's messages, which a thread per reader adds, and the threads."""
    found: list[list[bytes]] = [[] for _ in ring.bells]

    def read(index: int) -> None:
        reader = RingReader(ring, index)
        for _ in range(count):
            found[index].append(reader.read())
        reader.close()

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(ring.bells))]
    for thread in threads:
        thread.start()
    return found, threads


@given(
    sizes=st.lists(st.integers(0, 300), max_size=30),
    capacity=st.integers(1, 200),
    num_readers=st.integers(1, 3),
)
def test_messages_arrive_whole_and_in_order(sizes: list[int], capacity: int, num_readers: int) -> None:
    """Includes messages longer than the ring."""
    messages = [random.Random(index).randbytes(size) for index, size in enumerate(sizes)]
    ring = RingDescriptors.make(num_readers, capacity)
    found, threads = received(ring, len(messages))
    writer = RingWriter(ring, lambda: None)
    for message in messages:
        writer.write(message)
    for thread in threads:
        thread.join()
    assert found == [messages] * num_readers
    writer.close()
    ring.close()


def test_a_writer_without_readers_gives_up() -> None:
    ring = RingDescriptors.make(1, 64)
    writer = RingWriter(ring, never)
    writer.write(b"x" * 20)
    with pytest.raises(AssertionError, match="somebody reads"):
        writer.write(b"x" * 64)
    writer.close()
    ring.close()


def test_two_sides_may_both_write_more_than_there_is_room_for() -> None:
    """As the executor, a step of long prompts, and its workers, the result of the step before."""
    steps, results = RingDescriptors.make(1, 64), RingDescriptors.make(1, 64)
    sent, answers = random.Random(0).randbytes(500), random.Random(1).randbytes(500)
    found: list[bytes] = []

    def work() -> None:
        writer = RingWriter(results, lambda: None)
        writer.write(b"first")
        writer.write(answers)
        found.append(RingReader(steps).read())

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    reader = RingReader(results)

    def no_room() -> None:
        reader.take_in()

    RingWriter(steps, no_room).write(sent)
    worker.join(60)
    assert found == [sent]
    assert [reader.read(), reader.read()] == [b"first", answers]


def test_a_reader_stops_waiting_when_it_is_told() -> None:
    ring = RingDescriptors.make(1)
    reader = RingReader(ring)
    stop: Callable[[], None] = never
    with pytest.raises(AssertionError):
        reader.read(stop)
    reader.close()
    ring.close()
