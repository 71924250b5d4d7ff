"""Batches of KV events on the wire: frames, numbers, replays, and subscribers that are slow or absent."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from event_subscriber import BlockRemoved, BlockStored, KVEventBatch, Subscriber, decode

from compiled_engine.config import KVEventsConfig
from compiled_engine.features.kv_events import events
from compiled_engine.features.kv_events.publisher import Publisher
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

WAIT_MS = 20_000
END = (2**64 - 1).to_bytes(8, "big")


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    return KVEventsConfig(
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic="kv",
        buffer_steps=50,
        hwm=1000,
        max_queued=1000,
        data_parallel_rank=3,
    )


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    """A subscriber's own context."""
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def connected(context: zmq.Context[Any], publisher: Publisher, endpoint: str, *, hwm: int = 0) -> zmq.Socket[bytes]:
    """Return a subscriber's socket that has received a first message: only then is it known to be connected."""
    socket = context.socket(zmq.SUB)
    socket.set_hwm(hwm)
    socket.connect(endpoint)
    socket.subscribe("kv")
    deadline = time.monotonic() + WAIT_MS / 1000
    while not socket.poll(20):
        assert time.monotonic() < deadline
        publisher.publish(removed(0))
    while socket.poll(200):
        socket.recv_multipart()
    return socket


def removed(block_hash: int) -> list[events.Event]:
    return [events.BlockRemoved([block_hash], "GPU", 0)]


def receive(socket: zmq.Socket[bytes]) -> tuple[int, KVEventBatch]:
    assert socket.poll(WAIT_MS)
    topic, number, batch = socket.recv_multipart()
    assert (topic, len(number)) == (b"kv", 8)
    return int.from_bytes(number, "big"), decode(batch)


def replayed(context: zmq.Context[Any], endpoint: str, first: int) -> list[tuple[int, KVEventBatch]]:
    """Ask for the batches from a number on."""
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.connect(endpoint)
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    found = []
    while True:
        assert socket.poll(WAIT_MS)
        empty, number, batch = socket.recv_multipart()
        assert empty == b""
        if not batch:
            assert number == END
            return found
        found.append((int.from_bytes(number, "big"), decode(batch)))


def hashes_of(batches: list[tuple[int, KVEventBatch]]) -> list[int]:
    return [block_hash for _, batch in batches for event in batch.events for block_hash in event.block_hashes]  # type: ignore[union-attr]


def test_batches_arrive_in_order_with_numbers_and_the_rank(config: KVEventsConfig, context: zmq.Context[Any]) -> None:
    publisher, before = Publisher(config), time.time()
    socket = connected(context, publisher, config.endpoint)
    number = publisher.num_batches
    publisher.publish([events.BlockStored([7, 2**64 - 1], None, [1, 2, 3, 4], 2, None, "GPU", None)])
    publisher.publish([*removed(7), events.AllBlocksCleared()])
    found = [receive(socket) for _ in range(2)]
    publisher.close()
    assert [each for each, _ in found] == [number, number + 1]
    (first, second) = [batch for _, batch in found]
    assert first.events == [BlockStored([7, 2**64 - 1], None, [1, 2, 3, 4], 2, None, "GPU", None)]
    assert second.events[0] == BlockRemoved([7], "GPU", 0)
    for batch in (first, second):
        assert before <= batch.ts <= time.time()
        assert batch.data_parallel_rank == 3


def test_an_event_is_a_map_with_its_name_as_the_type() -> None:
    """The wire is stated here without the structs, which both sides might have wrong."""
    batch = events.EventBatch(1.5, [*removed(9), events.AllBlocksCleared()], 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == {
        "ts": 1.5,
        "events": [
            {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        "data_parallel_rank": 0,
    }


def test_a_gap_is_filled_by_a_replay(config: KVEventsConfig, context: zmq.Context[Any]) -> None:
    publisher = Publisher(config)
    for number in range(20):
        publisher.publish(removed(number))
    assert config.replay_endpoint is not None
    assert replayed(context, config.replay_endpoint, 17)[-3:] == replayed(context, config.replay_endpoint, 0)[17:]
    found = replayed(context, config.replay_endpoint, 0)
    assert [number for number, _ in found] == hashes_of(found) == [*range(20)]
    assert replayed(context, config.replay_endpoint, 20) == []
    for number in range(20, 100):
        publisher.publish(removed(number))
    deadline = time.monotonic() + WAIT_MS / 1000
    while hashes_of(found := replayed(context, config.replay_endpoint, 0)) != [*range(50, 100)]:
        assert time.monotonic() < deadline, found  # only the last buffer_steps batches are kept
    publisher.close()


def test_a_wrong_question_is_no_end(
    config: KVEventsConfig, context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(config)
    assert config.replay_endpoint is not None
    socket = context.socket(zmq.DEALER)
    socket.connect(config.replay_endpoint)
    for frames in ((b"",), (b"", b"1"), (b"x", bytes(8)), (b"", bytes(8), b"")):
        socket.send_multipart(frames)
    publisher.publish(removed(4))
    deadline = time.monotonic() + WAIT_MS / 1000
    with caplog.at_level(logging.WARNING):
        while caplog.text.count("a replay of KV events") < 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert hashes_of(replayed(context, config.replay_endpoint, 0)) == [4]
    publisher.close()


def test_neither_an_absent_nor_a_slow_subscriber_holds_batches_back(
    config: KVEventsConfig, context: zmq.Context[Any]
) -> None:
    """Batches that the slow one loses leave a gap, which a replay fills."""
    count = 5000
    publisher = Publisher(replace(config, hwm=10, buffer_steps=2 * count, max_queued=2 * count))
    slow = connected(context, publisher, config.endpoint, hwm=10)
    quick = connected(context, publisher, config.endpoint)
    first = publisher.num_batches
    for number in range(count):
        publisher.publish(removed(number) * 100)
    assert config.replay_endpoint is not None
    deadline = time.monotonic() + WAIT_MS / 1000
    while len(found := replayed(context, config.replay_endpoint, first)) < count:
        assert time.monotonic() < deadline, len(found)
    assert (publisher.num_batches, publisher.num_dropped) == (first + count, 0)
    assert [number for number, _ in found] == [*range(first, first + count)]
    publisher.publish(removed(0))
    numbers = []
    while slow.poll(500):
        numbers.append(receive(slow)[0])
    assert len(numbers) < count, "it was not slow"
    assert quick.poll(WAIT_MS)
    publisher.close()


def test_a_full_queue_drops_a_batch_and_leaves_its_number_out(
    config: KVEventsConfig, context: zmq.Context[Any]
) -> None:
    publisher = Publisher(replace(config, max_queued=1, buffer_steps=10_000))
    while not publisher.num_dropped:  # until two are published before the thread takes the first
        publisher.publish(removed(publisher.num_batches + publisher.num_dropped))
    kept = publisher.num_batches
    assert config.replay_endpoint is not None
    found: list[tuple[int, KVEventBatch]] = []
    deadline = time.monotonic() + WAIT_MS / 1000
    while len(found) < kept:
        assert time.monotonic() < deadline
        found = replayed(context, config.replay_endpoint, 0)
    numbers = [number for number, _ in found]
    assert numbers == hashes_of(found)
    assert len(numbers) == kept
    publisher.close()


def test_an_endpoint_in_use_is_refused_and_free_again_after_a_close(tmp_path: Path, config: KVEventsConfig) -> None:
    on_tcp = replace(config, endpoint="tcp://*:*", replay_endpoint=None)
    Publisher(on_tcp).close()
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ValueError, match=rf"replay_endpoint'\] is 'tcp://\*:{port}', which cannot be bound"):
            Publisher(replace(on_tcp, replay_endpoint=f"tcp://*:{port}"))


def test_an_engine_publishes_its_blocks(config: KVEventsConfig, context: zmq.Context[Any]) -> None:
    subscriber, size = Subscriber(), 16
    given = {"enable_kv_cache_events": True, "endpoint": config.endpoint, "replay_endpoint": config.replay_endpoint}
    options: dict[str, Any] = {"device": "cpu", "mode": "eager", "block_size": size, "num_blocks": 16}
    with LLM(kv_events_config=given, max_model_len=128, progress=False, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        prompt = [*range(300, 350)]
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
        tokens = prompt + list(output.outputs[0].token_ids)
        assert config.replay_endpoint is not None
        metrics = llm.metrics()
        found = replayed(context, config.replay_endpoint, 0)
        while len(found) < metrics["kv_event_batches"]:
            found = replayed(context, config.replay_endpoint, 0)
        for _, batch in found:
            assert batch.data_parallel_rank == 0
            subscriber.receive(batch)
        blocks = [of_block for _, of_block, _ in subscriber.blocks.values()]
        assert blocks == [tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size, size)]
        assert metrics["kv_event_batches_dropped"] == 0
        llm.reset_prefix_cache()
        while len(found := replayed(context, config.replay_endpoint, len(found))) == 0:
            pass
        subscriber.receive(found[-1][1])
        assert not subscriber.blocks
