"""Slots and host copies of adapters: which adapter gets which slot, what is evicted, and who waits."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.config import AdapterConfig, CacheConfig, SchedulerConfig
from compiled_engine.engine.messages import ROOT, ControlCall, EngineRequest, RunnerOutput, SchedulerOutput, prefix_root
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.adapters.extras import AdapterRef, extras_of
from compiled_engine.features.adapters.plan import Adapters
from compiled_engine.sampling.params import SamplingParams


class Engine:
    """A scheduler whose steps sample token 7, and what a core tells it of adapters."""

    def __init__(self, max_loras: int = 2, max_cpu_loras: int = 3, policy: str = "fcfs") -> None:
        scheduler = SchedulerConfig(32, 128, 128, policy)
        config = AdapterConfig(max_loras, 4, max_cpu_loras)
        self.adapters = Adapters(config, self._call)
        self.scheduler = Scheduler(scheduler, CacheConfig(4, 256, 0.9, True), 64, 100, features=[self.adapters])
        self.dropped: list[str] = []

    def _call(self, call: ControlCall) -> list[None]:
        self.dropped += [call.arguments["digest"]] * (call.name == "adapters.drop")
        return [None]

    def add(
        self,
        name: str,
        adapter: str | None,
        max_tokens: int = 2,
        adapter_name: str | None = None,
        priority: int = 0,
    ) -> None:
        ref = None if adapter is None else AdapterRef(adapter, f"/{adapter}", adapter_name or adapter)
        root = prefix_root(adapter=adapter)
        params = SamplingParams(max_tokens=max_tokens)
        request = EngineRequest(name, (1, 2, 3), params, priority=priority, prefix_root=root, extras=extras_of(ref))
        self.adapters.check(request)
        self.scheduler.add(request)

    def step(self) -> SchedulerOutput:
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.update(step, RunnerOutput([7] * sum(step.samples)))
        self.scheduler.check_integrity()
        return step

    def finish(self) -> None:
        while self.scheduler.has_unfinished():
            self.step()
        self.scheduler.check_idle()


def slots(step: SchedulerOutput) -> dict[str, int]:
    """Return the adapter slots of new requests; -1 for none."""
    return {request.request_id: request.extras.get("adapters", -1) for request in step.new}


def placed(step: SchedulerOutput) -> dict[int, str]:
    found: dict[int, str] = step.extras.get("adapters", {})
    return found


def test_adapters_share_slots_and_others_need_none() -> None:
    engine = Engine()
    for name, adapter in (("r", "a"), ("s", None), ("t", "b"), ("u", "a")):
        engine.add(name, adapter)
    step = engine.step()
    assert slots(step) == {"r": 0, "s": -1, "t": 1, "u": 0}
    assert placed(step) == {0: "a", 1: "b"}
    assert placed(engine.step()) == {}
    engine.finish()


def test_a_request_that_waits_for_a_slot_is_overtaken_by_those_that_had_come() -> None:
    engine = Engine()
    engine.add("r", "a", max_tokens=5)
    engine.add("s", "b", max_tokens=5)
    engine.add("t", "c")
    engine.add("u", "a")  # its adapter has a slot
    assert slots(engine.step()) == {"r": 0, "s": 1, "u": 0}
    engine.add("v", "b")  # came after t was skipped
    engine.add("w", None)  # needs no slot
    assert slots(engine.step()) == {"w": -1}
    assert engine.scheduler.metrics()["waiting_by_reason"]["feature"] == 2
    assert slots(engine.step()) == slots(engine.step()) == slots(engine.step()) == {}
    step = engine.step()  # r and s have ended
    assert slots(step) == {"t": 1, "v": 0}
    assert placed(step) == {1: "c", 0: "b"}
    engine.finish()


def test_a_request_that_waits_for_a_slot_may_end() -> None:
    engine = Engine(max_loras=1)
    engine.add("r", "a", max_tokens=9)
    engine.add("s", "b")
    assert slots(engine.step()) == {"r": 0}
    engine.add("t", "a")  # came after s was skipped
    assert slots(engine.step()) == {}
    engine.scheduler.abort("s")
    assert slots(engine.step()) == {"t": 0}
    engine.finish()


def test_what_comes_before_a_request_that_waits_for_a_slot_overtakes_nothing() -> None:
    engine = Engine(max_loras=1, policy="priority")
    engine.add("r", "a", max_tokens=9)
    engine.add("s", "b")
    assert slots(engine.step()) == {"r": 0}
    engine.add("t", "a", priority=-1)
    assert slots(engine.step()) == {"t": 0}
    engine.finish()


# An adapter or none, the tokens to generate, and the steps until the next request comes.
REQUESTS = st.lists(
    st.tuples(st.sampled_from([None, *"abcdef"]), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=24
)


@given(requests=REQUESTS, max_loras=st.integers(1, 3))
def test_in_any_mix_each_request_has_its_adapter_and_waits_for_few(
    requests: list[tuple[str | None, int, int]], max_loras: int
) -> None:
    """A slot in use is never given away. Who is overtaken waits for a slot, and those that overtake came before it was
    skipped, or need none; with the same adapter the order is kept."""
    engine = Engine(max_loras, max_cpu_loras=max_loras)
    admitted: list[str] = []
    contents: dict[int, str] = {}
    in_use: dict[str, int] = {}  # slots of running requests

    added = 0
    first_tried: dict[str, int] = {}  # requests that had come when it might have been admitted first

    def step() -> None:
        for name in map(str, range(added)):
            first_tried.setdefault(name, added)
        found = engine.step()
        in_use.update(slots(found))
        for name in {*in_use} - {*found.request_ids}:
            del in_use[name]
        assert not {slot for name, slot in in_use.items() if name not in slots(found)} & placed(found).keys()
        contents.update(placed(found))
        for name, slot in slots(found).items():
            admitted.append(name)
            adapter = requests[int(name)][0]
            assert slot == -1 if adapter is None else contents[slot] == adapter

    for number, (adapter, max_tokens, pause) in enumerate(requests):
        engine.add(str(number), adapter, max_tokens)
        added += 1
        counts = engine.scheduler.metrics()
        waiting, running = (counts[f"adapter_requests_{state}"] for state in ("waiting", "running"))
        assert len(running) <= max_loras
        assert sum(waiting.values()) <= counts["waiting"]
        for _ in range(pause):
            if engine.scheduler.has_unfinished():
                step()
    while engine.scheduler.has_unfinished():
        step()
    engine.scheduler.check_idle()
    assert sorted(admitted, key=int) == [str(number) for number in range(len(requests))]
    for place, name in enumerate(admitted):
        adapter = requests[int(name)][0]
        for overtaken in (other for other in admitted[place + 1 :] if int(other) < int(name)):
            other = requests[int(overtaken)][0]
            assert other is not None
            assert other != adapter
            assert adapter is None or int(name) < first_tried[overtaken]
    named = Counter(adapter for adapter, *_ in requests if adapter is not None)
    assert engine.scheduler.metrics()["adapter_requests"] == named


def test_requests_are_counted_by_the_name_of_their_adapter() -> None:
    engine = Engine(max_loras=1)
    for name, adapter in (("r", "a"), ("s", "b"), ("t", "b"), ("u", None)):
        engine.add(name, adapter)
    engine.step()
    counts = engine.scheduler.metrics()
    assert counts["max_adapters"] == 1
    assert (counts["adapter_requests_running"], counts["adapter_requests_waiting"]) == ({"a": 1}, {"b": 2})
    engine.finish()
    counts = engine.scheduler.metrics()
    assert counts["adapter_requests"] == {"a": 1, "b": 2}
    assert counts["adapter_requests_running"] == counts["adapter_requests_waiting"] == {}


def test_requests_of_a_name_count_together_though_its_adapter_was_replaced() -> None:
    engine = Engine()
    for name, adapter in (("r", "old"), ("s", "old"), ("t", "new")):
        engine.add(name, adapter, adapter_name="a")
    assert engine.scheduler.metrics()["adapter_requests_waiting"] == {"a": 3}
    engine.step()
    counts = engine.scheduler.metrics()
    assert (counts["adapter_requests_running"], counts["adapter_requests_waiting"]) == ({"a": 3}, {})
    engine.finish()
    assert engine.scheduler.metrics()["adapter_requests"] == {"a": 3}


def test_the_slot_used_least_recently_is_given_away() -> None:
    engine = Engine(max_cpu_loras=9)
    for adapter in ("a", "b", "a", "c"):
        engine.add(f"of {adapter}", adapter)
        engine.finish()
    engine.add("again", "a")
    assert placed(engine.step()) == {}  # b went for c
    engine.finish()
    engine.add("b again", "b")
    assert placed(engine.step()) == {1: "b"}
    engine.finish()
    assert engine.scheduler.metrics()["adapter_placements"] == 4


def test_copies_that_no_request_uses_are_dropped_beyond_the_most() -> None:
    engine = Engine(max_loras=2, max_cpu_loras=2)
    engine.add("r", "a", max_tokens=3)
    for adapter in ("b", "c", "d"):  # all wait
        engine.add(adapter, adapter)
    assert engine.dropped == []
    engine.finish()
    engine.add("s", "e")
    assert engine.dropped == ["a", "b", "c"]
    engine.finish()
    for _ in range(2):
        engine.adapters.unload_adapter("e")
    assert engine.dropped == ["a", "b", "c", "e"]


@pytest.mark.parametrize(("max_loras", "max_cpu_loras"), [(1, 1), (1, 2), (2, 2), (2, 4), (1, 5)])
def test_as_many_copies_stay_as_may_be_loaded(max_loras: int, max_cpu_loras: int) -> None:
    """One that comes drops one, that used least recently, and only where there is no room."""
    engine = Engine(max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    for number, adapter in enumerate("abcdefgh"):
        engine.add(adapter, adapter)
        engine.finish()
        assert engine.dropped == [*"abcdefgh"[: max(0, number + 1 - max_cpu_loras)]]


def test_the_copy_used_least_recently_is_dropped_first() -> None:
    engine = Engine(max_loras=2, max_cpu_loras=2)
    for adapter in ("a", "b", "a", "c"):
        engine.add(f"of {adapter}", adapter)
        engine.finish()
    assert engine.dropped == ["b"]


def test_an_adapter_in_use_is_not_unloaded() -> None:
    engine = Engine()
    engine.add("r", "a")
    engine.adapters.unload_adapter("a")
    assert engine.dropped == []
    assert engine.scheduler.abort("r") is not None
    engine.adapters.unload_adapter("a")
    assert engine.dropped == ["a"]


def test_after_a_failed_step_adapters_are_placed_again() -> None:
    engine = Engine()
    engine.add("r", "a")
    assert engine.scheduler.schedule() is not None
    engine.scheduler.fail_step()
    engine.add("s", "a")
    assert placed(engine.step()) == {0: "a"}
    engine.finish()


def test_a_prefix_depends_on_the_content() -> None:
    refs = [AdapterRef("digest", "/one", "x"), AdapterRef("digest", "/two", "y"), AdapterRef("other", "/one", "x")]
    roots = [prefix_root(adapter=ref.digest) for ref in refs]
    assert roots[0] == roots[1] != roots[2]
    assert ROOT == prefix_root() not in roots
    assert len({prefix_root(salt="s", adapter="digest"), prefix_root(salt="s"), roots[0]}) == 3


@pytest.mark.parametrize("used", ["a", None])
def test_has_room_counts_adapters_not_requests(used: str | None) -> None:
    engine = Engine(max_loras=1)
    engine.add("r", "a", max_tokens=5)
    engine.add("s", used)
    assert list(slots(engine.step())) == ["r", "s"]
    engine.finish()
