"""KV events say exactly which blocks of the prefix cache can be found, whatever the scheduler does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from event_subscriber import BlockStored, Subscriber, decode
from simulated_engine import Record, SimulatedEngine

from compiled_engine.engine.block_pool import BlockGroup, hash_blocks
from compiled_engine.engine.cache_resource import CacheResource
from compiled_engine.engine.kv_cache import KVCacheManager
from compiled_engine.engine.messages import Content, EngineRequest, prefix_root
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.features.adapters.extras import AdapterRef, extras_of
from compiled_engine.features.kv_events.events import Event, EventBatch, short_hash
from compiled_engine.features.kv_events.plan import KVEvents
from compiled_engine.sampling.params import SamplingParams

SIZE = 4


class Received:
    """A sink whose batches a subscriber receives."""

    num_batches = num_events = num_dropped = 0

    def __init__(self) -> None:
        self.subscriber = Subscriber()
        self.events: list[Any] = []

    def publish(self, events: list[Event]) -> None:
        batch = decode(msgspec.msgpack.encode(EventBatch(1.0, events, 0)))
        self.events += batch.events
        self.subscriber.receive(batch)

    def close(self) -> None:
        pass


class SeenGroups(PlanFeature):
    """Keeps the KV groups, whose blocks a test looks up."""

    groups: Sequence[BlockGroup] = ()

    def resources(self, groups: Sequence[BlockGroup]) -> Sequence[CacheResource]:
        self.groups = groups
        return ()


class Findable:
    """The blocks that a pool finds, among those of all prompts and outputs so far."""

    def __init__(self) -> None:
        self.known: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}

    def learn(self, record: Record, block_size: int) -> None:
        tokens = [*record.request.prompt_token_ids, *record.expected[0]]
        hashes: list[bytes] = []
        hash_blocks(hashes, record.request.prefix_root, tokens, block_size)
        for index, block_hash in enumerate(hashes):
            parent = hashes[index - 1] if index else None
            self.known[block_hash] = (parent, tuple(tokens[index * block_size : (index + 1) * block_size]))

    def among(self, group: BlockGroup) -> dict[int, Any]:
        return {
            short_hash(block_hash): (None if parent is None else short_hash(parent), tokens, None)
            for block_hash, (parent, tokens) in self.known.items()
            if group.pool.find(block_hash) is not None
        }


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(("steps_in_flight", "several"), [(1, 1), (2, 1), (2, 4)])
def test_events_rebuild_the_findable_blocks_under_random_operations(steps_in_flight: int, several: int) -> None:
    """10,000 operations, in pools from so small that most requests are preempted to ample."""
    num_operations, num_stored = 0, 0
    for seed in range(17):
        rng = random.Random(seed)
        sink, seen, findable = Received(), SeenGroups(), Findable()
        events, block_size = KVEvents(sink), rng.choice([1, 2, 4, 8])
        engine = SimulatedEngine(
            block_size=block_size,
            num_blocks=rng.choice([50, 80, 400]) // block_size,
            budget=rng.choice([7, 30, 100]),
            max_num_seqs=6,
            max_model_len=40,
            steps_in_flight=steps_in_flight,
            max_new_tokens_per_step=several,
            yields=lambda most: rng.randrange(most + 1),  # noqa: B023
            further=[seen, events],
        )
        roots = [[rng.randrange(11) for _ in range(30)] for _ in range(3)]
        for number in range(200):
            num_operations += 1
            choice = rng.random()
            if choice < 0.3:
                prompt = rng.choice(roots)[: rng.randrange(1, 31)] + [rng.randrange(11) for _ in range(3)]
                params = SamplingParams(max_tokens=rng.choice([1, 5, 30]), ignore_eos=True)
                findable.learn(engine.add(f"r{number}", prompt, params=params), block_size)
            elif choice < 0.35 and engine.live:
                engine.abort(rng.choice([*engine.live]))
            elif choice < 0.37 and engine.in_flight:
                engine.fail_step(launching=rng.random() < 0.5)
            elif choice < 0.38:
                engine.scheduler.reset_prefix_cache()
            elif choice < 0.6 and len(engine.in_flight) < steps_in_flight:
                engine.try_step()
            else:
                engine.step()
            engine.scheduler.check_integrity()
            if not engine.in_flight:
                events.close()  # publishes what is left of a step that was planned for nothing
                assert sink.subscriber.blocks == findable.among(seen.groups[0])
        engine.run()
        events.close()
        assert sink.subscriber.blocks == findable.among(seen.groups[0])
        num_stored += sum(len(each.block_hashes) for each in sink.events if isinstance(each, BlockStored))
    assert num_operations * 3 > 10_000
    assert num_stored > 1000


def stored(request: EngineRequest) -> Any:
    """Return the event of a request's full blocks."""
    sink, group = Received(), BlockGroup(16, SIZE)
    events = KVEvents(sink)
    events.resources([group])
    cache = KVCacheManager([group], enable_prefix_caching=True)
    running = Request.of(request, order=(0, 0), max_total_tokens=1000)
    assert cache.admit(running, reserve=0)
    running.num_computed_tokens = len(running.token_ids)
    cache.register(running)
    events.close()
    (event,) = sink.events
    return event


def test_a_plain_request_has_no_extra_keys() -> None:
    event = stored(EngineRequest("r", tuple(range(10)), SamplingParams()))
    assert (event.token_ids, event.block_size, len(event.block_hashes)) == ([*range(8)], SIZE, 2)
    assert (event.parent_block_hash, event.lora_name, event.extra_keys) == (None, None, None)


def test_the_first_block_has_a_key_of_the_cache_salt_but_not_the_salt() -> None:
    keys = []
    for salt in ("secret", "other"):
        event = stored(EngineRequest("r", tuple(range(10)), SamplingParams(), prefix_root=prefix_root(salt=salt)))
        (of_first, of_second) = event.extra_keys
        assert of_second is None
        assert "secret" not in str(event)
        keys.append(of_first)
    assert keys[0] != keys[1]


def test_blocks_of_an_adapter_name_it() -> None:
    ref = AdapterRef("abc", "/folder", "french")
    request = EngineRequest(
        "r", tuple(range(10)), SamplingParams(), prefix_root=prefix_root(adapter="abc"), extras=extras_of(ref)
    )
    event = stored(request)
    assert (event.lora_name, event.extra_keys) == ("french", [("french",)] * 2)
    salted = msgspec.structs.replace(request, prefix_root=prefix_root(salt="s", adapter="abc"))
    assert [len(keys) for keys in stored(salted).extra_keys] == [2, 1]


def test_blocks_with_a_part_of_an_image_have_its_key() -> None:
    contents = (Content(5, 2, "cat"), Content(7, 4, "dog"))
    event = stored(EngineRequest("r", tuple(range(14)), SamplingParams(), contents=contents))
    assert event.extra_keys == [None, ("cat", "dog"), ("dog",)]
