"""The plan of clips: a request runs with its clip in its slot, limits hold, and nothing waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_engine.config import CacheConfig, SchedulerConfig
from compiled_engine.engine.messages import EngineRequest, RunnerOutput, SchedulerOutput, prefix_root
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.images.extras import PlainTensor
from compiled_engine.features.images.pixels import calls_of
from compiled_engine.features.speech.extras import NAME, extras_of, new_clips_of
from compiled_engine.features.speech.plan import SpeechPlan
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.speech import SpeechConfig

BLOCK, MOST_TOKENS = 4, 12


class Engine:
    """A scheduler with the plan, and a device that checks the slots of each step. num_slots: see SpeechConfig."""

    def __init__(self, num_slots: int, step_clips: int, num_blocks: int) -> None:
        self.plan = SpeechPlan(SpeechConfig(num_slots, min(step_clips, num_slots), "torch", 1, 0))
        cache = CacheConfig(BLOCK, num_blocks, 0.9, True)
        limits = SchedulerConfig(3, MOST_TOKENS, 64, "fcfs")
        self.scheduler = Scheduler(limits, cache, num_blocks, 100, features=[self.plan])
        self.step_clips = min(step_clips, num_slots)
        self.encoded: list[str] = []
        self._keys: dict[str, str] = {}
        self._slots: dict[int, str] = {}  # slot -> key of its clip
        self._slot_of: dict[str, int] = {}

    def add(self, name: str, key: str, length: int, max_tokens: int = 6) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        asked = EngineRequest(name, (1,) * length, params, extras=extras_of(key), prefix_root=prefix_root(audio=key))
        self.plan.check(asked)
        self.scheduler.add(asked)
        self._keys[name] = key

    def asked(self) -> list[str]:
        return [key for output in self.plan.take_asks() for key in output.asks]

    def give(self, key: str) -> None:
        for call in calls_of({key: {"input_features": PlainTensor("uint8", (3,), key.encode() * 3)}}):
            getattr(self.plan, call.name)(**call.arguments)

    def step(self) -> bool:
        """Run a step; returns False if there is nothing to compute."""
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is not None:
            self._run(step)
            self.scheduler.update(step, RunnerOutput([5] * sum(step.samples)))
        return step is not None

    def _run(self, step: SchedulerOutput) -> None:
        new: Any = new_clips_of(step.extras)
        assert len(new) <= self.step_clips
        for clip in new:
            key = bytes(clip.inputs["input_features"].data[:1]).decode()
            self._slots[clip.slot] = key
            self.encoded.append(key)
        for request in step.new:
            self._slot_of[request.request_id] = request.extras[NAME]
        for name in step.request_ids:
            assert self._slots[self._slot_of[name]] == self._keys[name]


ASKED = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 20)), min_size=1, max_size=7)


@settings(max_examples=40)
@given(ASKED, st.integers(1, 3), st.integers(1, 2), st.integers(8, 14), st.data())
def test_every_request_ends(
    requests: list[tuple[str, int]], num_slots: int, step_clips: int, num_blocks: int, data: st.DataObject
) -> None:
    engine = Engine(num_slots, step_clips, num_blocks)
    for number, (key, length) in enumerate(requests):
        engine.add(str(number), key, length)
    waiting: list[str] = []
    for _ in range(1000):
        moved = engine.step()
        waiting += engine.asked()
        if waiting and (not moved or data.draw(st.booleans(), label="features come")):
            engine.give(waiting.pop(0))
        elif not moved:
            break
    assert not engine.scheduler.has_unfinished()
    engine.scheduler.check_idle()
    assert set(engine.encoded) == {key for key, _ in requests}
    assert engine.plan.metrics()["clips_encoded"] == len(engine.encoded)


def test_another_request_with_the_clip_asks_if_the_one_that_asked_ends() -> None:
    engine = Engine(2, 1, 20)
    engine.add("one", "a", 3)
    engine.add("other", "a", 3)
    assert not engine.step()
    assert engine.asked() == ["a"]
    engine.scheduler.abort("one")
    engine.give("a")  # too late: nothing waits for it
    assert not engine.step()
    assert engine.asked() == ["a"]
    engine.give("a")
    while engine.step():
        pass
    assert engine.encoded == ["a"]
    assert not engine.scheduler.has_unfinished()


def test_a_clip_is_encoded_again_after_the_cache_is_emptied() -> None:
    engine = Engine(2, 1, 20)
    engine.add("one", "a", 3)
    engine.step()
    engine.asked()
    engine.give("a")
    engine.step()
    engine.scheduler.reset_prefix_cache(of_running=True)
    engine.step()
    assert engine.asked() == ["a"]
    engine.give("a")
    while engine.step():
        pass
    assert engine.encoded == ["a", "a"]


def test_a_request_without_a_clip_is_refused() -> None:
    engine = Engine(1, 1, 20)
    with pytest.raises(ValueError, match="request 'x' has no audio; allowed: one clip"):
        engine.plan.check(EngineRequest("x", (1,), SamplingParams()))


def test_a_request_for_rules_that_the_checkpoint_lacks_is_refused() -> None:
    engine, params = Engine(1, 1, 20), SamplingParams(extra_args={"transcription": "timestamps"})
    with pytest.raises(ValueError, match=r"extra_args\['transcription'\] is given; allowed: none, as the checkpoint's"):
        engine.plan.check(EngineRequest("x", (1,), params, extras=extras_of("a")))
