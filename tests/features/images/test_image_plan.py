"""The plan of images: limits of a step and of the cache hold, whatever requests come, and nothing waits for ever."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vision_models import vision_config

from compiled_engine.config import CacheConfig, ImagesConfig, SchedulerConfig
from compiled_engine.engine.messages import EngineRequest, RunnerOutput, SchedulerOutput
from compiled_engine.engine.request import Request
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.images.embedding_cache import EmbeddingCache, FreeRows
from compiled_engine.features.images.extras import (
    NAME,
    PlainTensor,
    PromptImage,
    Runs,
    StepImages,
    contents_of,
    extras_of,
)
from compiled_engine.features.images.pixels import calls_of
from compiled_engine.features.images.plan import ImagePlan
from compiled_engine.models.vision.description import describe_vision
from compiled_engine.sampling.params import SamplingParams

BLOCK, MOST_TOKENS = 4, 12
INPUTS = {"pixels": PlainTensor("uint8", (0,), b"")}
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def images_config(cache_size: int = 12, step_size: int = 8, **changes: Any) -> ImagesConfig:
    described = describe_vision(vision_config("LlavaForConditionalGeneration"))
    assert described is not None
    return ImagesConfig(replace(described, **changes), "{}", 8, cache_size, step_size)


def request(
    name: str, parts: list[int | str], sizes: dict[str, int], given: Mapping[str, PlainTensor] = INPUTS
) -> EngineRequest:
    """A request of texts, by their lengths, and images, by their keys. sizes: embeddings of images."""
    ids: list[int] = []
    images = []
    for part in parts:
        count = part if isinstance(part, int) else sizes[part]
        if isinstance(part, str):
            images.append(PromptImage(part, ((len(ids), count),), dict(given)))
        ids += [1 if isinstance(part, int) else 9] * count
    extras = extras_of(images, None, 0) if images else {}
    return EngineRequest(name, tuple(ids), PARAMS, extras=extras, contents=contents_of(images))


class Device:
    """Does with steps what a rank does, and checks that each step has the embeddings that it reads."""

    def __init__(self, config: ImagesConfig) -> None:
        self._config = config
        self._rows: dict[int, str] = {}  # row of the embeddings -> key and number of the embedding
        self._known: dict[str, tuple[EngineRequest, dict[int, list[int]]]] = {}
        self.computed: list[str] = []

    def run(self, step: SchedulerOutput, requests: dict[str, EngineRequest]) -> None:
        for new in step.new:
            self._known[new.request_id] = requests[new.request_id], {}
        found: StepImages = step.extras.get(NAME, StepImages([], {}))
        keys = {id(image.inputs): image.key for each in requests.values() for image in images_in(each)}
        sizes = []
        for image in found.computed:
            key = keys[id(image.inputs)]
            rows = numbers(image.rows)
            sizes.append(len(rows))
            self.computed.append(key)
            self._rows |= {row: f"{key} {number}" for number, row in enumerate(rows)}
        assert len(sizes) <= 1 or sum(sizes) <= self._config.step_size
        for name, placed in found.placed.items():
            self._known[name][1].update({number: numbers(rows) for number, rows in placed})
        for name, start, count in zip(step.request_ids, step.starts, step.counts, strict=True):
            asked, placed_rows = self._known[name]
            for number, image in enumerate(images_in(asked)):
                positions = numbers(image.runs)
                if not {*positions}.isdisjoint(range(start, start + count)):
                    expected = [f"{image.key} {index}" for index in range(len(positions))]
                    assert [self._rows[row] for row in placed_rows[number]] == expected
                    if self._config.vision.both_ways:
                        assert positions[-1] < start + count


def images_in(asked: EngineRequest) -> tuple[PromptImage, ...]:
    return asked.extras[NAME].images if NAME in asked.extras else ()


def numbers(runs: Runs) -> list[int]:
    return [number for first, length in runs for number in range(first, first + length)]


def run_all(
    requests: list[EngineRequest], config: ImagesConfig, num_blocks: int = 40, at_a_time: int = 3
) -> tuple[Device, ImagePlan]:
    plan, device = ImagePlan(config), Device(config)
    limits = SchedulerConfig(at_a_time, MOST_TOKENS, 64, "fcfs")
    cache = CacheConfig(BLOCK, num_blocks, 0.9, True)
    scheduler = Scheduler(limits, cache, num_blocks, 100, features=[plan])
    by_name = {each.request_id: each for each in requests}
    for each in requests:
        plan.check(each)
        scheduler.add(each)
    for _ in range(1000):
        step = scheduler.schedule()
        if step is None:
            break
        device.run(step, by_name)
        scheduler.check_integrity()
        scheduler.update(step, RunnerOutput([5] * sum(step.samples)))
    assert not scheduler.has_unfinished()
    scheduler.check_idle()
    return device, plan


names = st.sampled_from("abcdef")
prompts = st.lists(st.one_of(st.integers(1, 6), names), min_size=1, max_size=6)


@given(
    st.lists(prompts, min_size=1, max_size=8),
    st.lists(st.integers(1, 8), min_size=6, max_size=6),
    st.integers(8, 20),
    st.integers(1, 12),
    st.integers(20, 40),
    st.booleans(),
)
def test_steps_have_the_embeddings_that_they_read(
    asked: list[list[int | str]], sizes: list[int], cache_size: int, step_size: int, num_blocks: int, both_ways: bool
) -> None:
    config = images_config(cache_size, step_size, both_ways=both_ways)
    of_keys = dict(zip("abcdef", sizes, strict=True))
    requests = [request(str(number), parts, of_keys) for number, parts in enumerate(asked)]
    fitting = [each for each in requests if len(each.prompt_token_ids) <= 50]
    device, plan = run_all(fitting, config, num_blocks)
    assert plan.metrics()["tower_images"] == len(device.computed)


def test_an_image_is_computed_once_for_all_that_have_it() -> None:
    asked = [request(str(number), [number, "a", 3], {"a": 5}) for number in (1, 2, 3)]
    device, plan = run_all(asked, images_config())
    assert device.computed == ["a"]
    assert plan.metrics() == {
        "image_requests": 3,
        "images": 3,
        "image_cache_hits": 2,
        "tower_images": 1,
        "tower_embeddings": 5,
        "image_cache_rows": 12,
        "image_cache_rows_used": 5,
    }


def test_the_image_used_longest_ago_is_evicted() -> None:
    sizes = dict.fromkeys("abcd", 5)
    asked = [request(str(number), [1, key, 1], sizes) for number, key in enumerate("abacab")]
    device, _ = run_all(asked, images_config(cache_size=10), at_a_time=1)
    assert device.computed == ["a", "b", "c", "b"]


def test_a_request_waits_at_an_image_that_does_not_fit_in_the_step() -> None:
    asked = [request("r", [2, "a", "b", 1], {"a": 5, "b": 4})]
    plan = ImagePlan(images_config(step_size=8))
    scheduler = Scheduler(SchedulerConfig(3, 12, 64, "fcfs"), CacheConfig(4, 40, 0.9, True), 40, 100, features=[plan])
    scheduler.add(asked[0])
    step = scheduler.schedule()
    assert step is not None
    assert step.counts == [7]


def scheduler_of(plan: ImagePlan, num_requests: int = 3, num_blocks: int = 40) -> Scheduler:
    limits = SchedulerConfig(num_requests, MOST_TOKENS, 64, "fcfs")
    return Scheduler(limits, CacheConfig(BLOCK, num_blocks, 0.9, True), num_blocks, 100, features=[plan])


def run_step(scheduler: Scheduler) -> dict[str, int]:
    """Run a step; return the numbers of its requests' tokens."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.check_integrity()
    scheduler.update(step, RunnerOutput([5] * sum(step.samples)))
    return dict(zip(step.request_ids, step.counts, strict=True))


def test_text_overtakes_an_image_without_room() -> None:
    """Other images do not."""
    scheduler = scheduler_of(ImagePlan(images_config(step_size=8)), num_requests=4)
    sizes = {"a": 5, "b": 4, "c": 1}
    for name, parts in {"first": ["a"], "image": ["b", 1], "small": ["c", 1], "text": [2]}.items():
        scheduler.add(request(name, parts, sizes))
    assert run_step(scheduler) == {"first": 5, "text": 2}
    assert run_step(scheduler) == {"first": 1, "text": 1, "image": 5, "small": 2}


@pytest.mark.parametrize("before", [0, 2])
def test_decodes_do_not_keep_a_whole_image_waiting(before: int) -> None:
    """Its tokens belong to one step, which decodes leave no room for while new requests are admitted."""
    scheduler = scheduler_of(ImagePlan(images_config(both_ways=True)), num_requests=8)
    for number in range(6):
        scheduler.add(request(f"text {number}", [1], {}))
    run_step(scheduler)
    scheduler.add(request("image", [*([before] if before else []), "a", 1], {"a": 8}))
    for number in range(6, 60, 3):
        for each in range(number, number + 3):
            scheduler.add(request(f"text {each}", [1], {}))
        if run_step(scheduler).get("image", 0) >= 8:
            break
    else:
        pytest.fail("the image was never computed")


def test_the_tiles_of_an_image_may_be_in_several_steps() -> None:
    """Tokens see each other within a tile alone (Gemma's pan and scan)."""
    scheduler = scheduler_of(ImagePlan(replace(images_config(24, 24, both_ways=True), most_embeddings=24)))
    image = PromptImage("a", ((1, 8), (11, 8), (21, 8)), dict(INPUTS))
    scheduler.add(EngineRequest("r", (1,) * 30, PARAMS, extras=extras_of([image], None, 0)))
    assert [run_step(scheduler)["r"] for _ in range(3)] == [11, 10, 9]


def test_embeddings_of_a_failed_step_are_not_found() -> None:
    plan = ImagePlan(images_config())
    scheduler = Scheduler(SchedulerConfig(3, 12, 64, "fcfs"), CacheConfig(4, 40, 0.9, True), 40, 100, features=[plan])
    for name in ("one", "other"):
        scheduler.add(request(name, [2, "a", 3], {"a": 5}))
        step = scheduler.schedule()
        assert step is not None
        assert len(step.extras[NAME].computed) == 1
        scheduler.fail_step()
        scheduler.check_integrity()
    assert plan.metrics()["image_cache_rows_used"] == 0


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (((2, 9),), "image 0 has 9 embeddings; allowed: 1 to 8"),
        (((2, 0),), r"image 0 has the positions \(\(2, 0\),\), which are not those of its prompt"),
        (((4, 2), (3, 2)), "which are not those of its prompt"),
        (((18, 4),), "which are not those of its prompt"),
    ],
)
def test_images_that_do_not_fit_are_refused(runs: Runs, message: str) -> None:
    asked = EngineRequest("r", (1,) * 20, PARAMS, extras=extras_of([PromptImage("a", runs, {})], None, 0))
    with pytest.raises(ValueError, match=f"request 'r': {message}" if message.startswith("image") else message):
        ImagePlan(images_config()).check(asked)


def test_log_probabilities_of_a_prompt_leave_room_for_a_whole_image() -> None:
    plan = ImagePlan(images_config(both_ways=True, tile_embeddings=256))
    asked = request("r", [2, "a"], {"a": 8})
    plan.check(msgspec.structs.replace(asked, sampling_params=SamplingParams(prompt_logprobs=65_535)))
    many = msgspec.structs.replace(asked, sampling_params=SamplingParams(prompt_logprobs=65_536))
    with pytest.raises(ValueError, match=r"request 'r': prompt_logprobs is 65536, .*; allowed: at most 65535"):
        plan.check(many)


def test_positions_must_suit_the_model() -> None:
    asked = request("r", ["a"], {"a": 4})
    with pytest.raises(ValueError, match="request 'r': the positions of its tokens do not suit the model"):
        ImagePlan(images_config(mrope_section=(2, 3, 3))).check(asked)


@given(st.lists(st.integers(1, 9), max_size=20), st.data())
def test_free_rows_are_given_once(counts: list[int], data: st.DataObject) -> None:
    free, taken = FreeRows(30), list[Runs]()
    for count in counts:
        if count <= free.count:
            taken.append(free.take(count))
            assert sum(length for _, length in taken[-1]) == count
        elif taken:
            free.give_back(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        held = [number for runs in taken for number in numbers(runs)]
        assert len(held) == len({*held}) == 30 - free.count
    with pytest.raises(RuntimeError, match="31 rows of embeddings asked for"):
        free.take(31)


def test_the_integrity_check_finds_a_request_that_was_not_freed() -> None:
    cache = EmbeddingCache(8)
    held = Request.of(request("r", [3], {}), (0, 0), 64)
    cache.take(held, 3, 0)
    cache.check_integrity([held])
    with pytest.raises(RuntimeError, match="requests \\['r'\\] hold images"):
        cache.check_integrity([])
    with pytest.raises(RuntimeError, match="no request is left, but 1 may hold images"):
        cache.check_all_free()


class Asking:
    """A scheduler of requests whose pixels are elsewhere. Each image has 5 embeddings."""

    def __init__(self, config: ImagesConfig | None = None, num_blocks: int = 40, num_requests: int = 3) -> None:
        self.plan = ImagePlan(config or images_config())
        self.scheduler = scheduler_of(self.plan, num_requests, num_blocks)

    def add(self, name: str, parts: list[int | str]) -> None:
        self.plan.check(asked := request(name, parts, dict.fromkeys("abcdef", 5), {}))
        self.scheduler.add(asked)

    def step(self) -> tuple[list[str], list[tuple[str, tuple[str, ...]]]]:
        """Run a step. Return its requests, and the images that requests ask for."""
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is not None:
            self.scheduler.update(step, RunnerOutput([5] * sum(step.samples)))
        self.computed = [] if step is None else [image.inputs for image in step.extras.get(NAME, NOTHING).computed]
        asks = [(output.request_id, tuple(output.asks)) for output in self.plan.take_asks()]
        return ([] if step is None else step.request_ids), asks

    def give(self, *keys: str) -> None:
        for call in calls_of({key: inputs_of(key) for key in keys}):
            self.plan.give_inputs(**call.arguments)


NOTHING = StepImages([], {})


def inputs_of(key: str) -> dict[str, PlainTensor]:
    return {"a": PlainTensor("uint8", (1, 3), key.encode() * 3), "b": PlainTensor("uint8", (0,), b"")}


def test_a_request_waits_until_its_pixels_are_complete() -> None:
    """Requests behind it do not, and requests with the same image share them until they are computed."""
    asking = Asking()
    asking.give("a")  # nobody has asked
    asking.add("one", [2, "a", 3])
    asking.add("other", ["a", 2])
    asking.add("text", [4])
    assert asking.step() == (["text"], [("one", ("a",))])
    first, last = calls_of({"a": inputs_of("a")})
    asking.plan.give_inputs(**last.arguments)
    assert asking.step() == (["text"], [])
    for call in (last, first):
        asking.plan.give_inputs(**call.arguments)
    requests, asks = asking.step()
    assert ({*requests}, asks) == ({"text", "one", "other"}, [])
    assert asking.computed == [inputs_of("a")]
    assert len(asking.plan.pixels) == 0


def test_an_image_that_is_on_the_device_is_not_asked_for() -> None:
    asking = Asking()
    asking.add("one", [2, "a"])
    assert asking.step()[1] == [("one", ("a",))]
    asking.give("a")
    asking.step()
    asking.add("same prefix", [2, "a", 1])
    asking.add("other prefix", [3, "a", 1])
    assert asking.step() == (["one", "same prefix", "other prefix"], [])
    counts = asking.scheduler.metrics()
    assert (counts["prefix_queries"], counts["prefix_hits"]) == (7 + 8 + 9, 4)  # each once, of whole blocks


def test_images_of_a_prompt_are_asked_for_together_and_those_of_others_within_a_bound() -> None:
    """4 steps' worth of embeddings, of which there are 10; pixels make room when they are computed."""
    asking = Asking(images_config(cache_size=40, step_size=10), num_requests=8)
    asking.add("first", [1, "a", "b", "c", 1])
    for name in "defghijk":
        asking.plan.check(asked := request(name, [1, name], dict.fromkeys("defghijk", 5), {}))
        asking.scheduler.add(asked)
    asks = [ask for _ in range(3) for ask in asking.step()[1]]
    assert asks == [("first", ("a", "b", "c")), *((name, (name,)) for name in "defgh")]
    asking.give("a", "b")
    assert asking.step()[0] == ["first"]
    assert [ask for _ in range(3) for ask in asking.step()[1]] == [("i", ("i",)), ("j", ("j",))]


@pytest.mark.parametrize("has_come", [False, True])
def test_what_a_request_has_asked_for_is_asked_for_again_when_it_ends(has_come: bool) -> None:
    asking = Asking()
    asking.add("one", ["a", 2])
    asking.add("other", [1, "a", 2])
    assert asking.step() == ([], [("one", ("a",))])
    if has_come:
        asking.give("a")
    asking.scheduler.abort("one")
    assert asking.step() == ([], [("other", ("a",))])
    asking.give("a")
    assert asking.step() == (["other"], [])
    asking.scheduler.abort("other")
    assert len(asking.plan.pixels) == 0


def test_a_preempted_request_asks_again_if_its_embeddings_are_gone() -> None:
    asking = Asking(images_config(cache_size=5), num_blocks=4)
    asking.add("one", [1, "a", 1])
    asking.step()
    asking.give("a")
    asking.step()
    asking.scheduler.reset_prefix_cache(of_running=True)
    asked = []
    while asking.scheduler.has_unfinished():
        for _, keys in asking.step()[1]:
            asked += keys
            asking.give(*keys)
    assert asked == ["a"]
    assert asking.plan.metrics()["tower_images"] == 2
