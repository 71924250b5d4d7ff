"""Images through `LLM` and `AsyncLLM`: answers are those of transformers' processor and whole model."""

from __future__ import annotations

import asyncio
import base64
import copy
import gc
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from adapter_folders import make_adapter, merge
from image_engines import WITH_PROCESSOR as ENGINE
from image_engines import Oracle
from image_folders import PLACEHOLDERS, TEXT_TEMPLATE, as_file, picture, write_processor

from compiled_engine import LLM, AsyncLLM, LoRARequest, SamplingParams, StructuredOutputs
from compiled_engine.features.images.frontend.worker import load_processor
from compiled_engine.frontend.outputs import RequestOutput

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
QWEN, LLAVA = "Qwen3VLForConditionalGeneration", "LlavaForConditionalGeneration"


class Checkpoint:
    """A tiny checkpoint with its processor, and what transformers says to prompts with images."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self.oracle = Oracle(folder, architecture)
        write_processor(folder, architecture)
        self.folder, self.placeholder = folder, PLACEHOLDERS[architecture]
        self.processor = load_processor(folder, folder)

    def inputs(self, text: str, images: list[PIL.Image.Image], **options: Any) -> tuple[list[int], list[Any]]:
        """Token ids, and the tower's inputs of each image."""
        each = [self.processor(text=[self.placeholder], images=[image], return_tensors="pt") for image in images]
        ids = self.processor(text=[text], images=images or None, return_tensors="pt", **options)["input_ids"][
            0
        ].tolist()
        names = ("pixel_values", "image_grid_thw")
        return ids, [{name: one[name] for name in names if name in one} for one in each]

    def answer(self, text: str, images: list[PIL.Image.Image], **options: Any) -> tuple[list[int], list[int]]:
        """Token ids of the prompt, and the most probable answer."""
        ids, inputs = self.inputs(text, images, **options)
        found: list[int] = []
        for _ in range(GREEDY.max_tokens or 0):
            found.append(int(self.oracle.logprobs([*ids, *found], inputs)[-1].argmax()))
        return ids, found


@pytest.fixture(scope="module", params=[QWEN, LLAVA], ids=lambda name: name.removesuffix("ForConditionalGeneration"))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(checkpoint.folder, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("qwen"), QWEN)


def said(output: RequestOutput) -> tuple[list[int], list[int]]:
    return list(output.prompt_token_ids), list(output.outputs[0].token_ids)


def test_prompts_with_images_are_answered_like_by_the_whole_model(checkpoint: Checkpoint, llm: LLM) -> None:
    image = checkpoint.placeholder
    given = {
        "no image": [],
        f"see {image} and say": [picture(24, 24, 1)],
        f"{image} {image} or\n{image}": [picture(24, 24, 1), picture(48, 32, 2), picture(20, 44, 3)],
        f"twice {image} {image}": [picture(48, 32, 2), picture(48, 32, 2)],
    }
    prompts: list[Any] = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in given.items()]

    outputs = llm.generate(prompts, GREEDY)

    assert [said(output) for output in outputs] == [checkpoint.answer(*each) for each in given.items()]
    assert outputs[1].prompt == f"see {image} and say"
    assert llm.metrics()["mm_cache_queries"] >= 6


def test_images_change_the_answer_and_share_no_prefix(checkpoint: Checkpoint, llm: LLM) -> None:
    text = f"{checkpoint.placeholder} what is this? {'long ' * 4}"
    images = [picture(40, 40, seed) for seed in (10, 11, 10)]
    outputs = [llm.generate({"prompt": text, "multi_modal_data": {"image": each}}, GREEDY)[0] for each in images]

    assert [said(output) for output in outputs] == [checkpoint.answer(text, [image]) for image in images]
    assert [bool(output.num_cached_tokens) for output in outputs] == [False, False, True]
    salted = {"prompt": text, "multi_modal_data": {"image": images[0]}, "cache_salt": "own"}
    (output,) = llm.generate(salted, GREEDY)
    assert not output.num_cached_tokens
    assert said(output) == said(outputs[0])


def test_conversations_have_images_in_every_form(checkpoint: Checkpoint, llm: LLM, tmp_path: Path) -> None:
    image = picture(28, 28, 4)
    (tmp_path / "image.png").write_bytes(as_file(image))
    url = f"data:image/png;base64,{base64.b64encode(as_file(image)).decode()}"
    forms: list[dict[str, Any]] = [
        {"type": "image", "image": image},
        {"type": "image_pil", "image_pil": image},
        {"type": "image", "image": np.asarray(image)},
        {"type": "image", "image": str(tmp_path / "image.png")},
        {"type": "image", "image": url},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
    ]
    text = {"type": "text", "text": "what?"}

    outputs = llm.chat([[{"role": "user", "content": [form, text]}] for form in forms], GREEDY)

    rendered = outputs[0].prompt or ""
    assert rendered.count(checkpoint.placeholder) == 1
    expected = checkpoint.answer(rendered, [image], add_special_tokens=False)
    assert [said(output) for output in outputs] == [expected] * len(forms)


def test_a_template_of_texts_has_a_placeholder_for_each_image(qwen: Checkpoint, limited: LLM) -> None:
    """And no text of a message becomes one."""
    content = [{"type": "image", "image": picture(24, 24)}, {"type": "text", "text": "not <|image_pad|> this"}]
    (output,) = limited.chat([{"role": "user", "content": content}], GREEDY, chat_template=TEXT_TEMPLATE)
    assert output.prompt == "user: <|image_pad|>\nnot <|image_pad|> this\nassistant: "
    assert list(output.prompt_token_ids).count(qwen.oracle.vision.image_token_id) == 9


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": "IMAGE"}}, "has 0 placeholders for 1 images"),
        ({"prompt": "<|image_pad|>" * 2, "multi_modal_data": {"image": "IMAGE"}}, "has 2 placeholders for 1 images"),
        ({"prompt": "a", "multi_modal_data": {"video": ["x"]}}, r"has 'video'; allowed: 'image'"),
        ({"prompt": "a", "multi_modal_data": {"image": ["IMAGE"] * 4}}, r"has 4 images; allowed: at most 3 \(limit_mm"),
        (
            {"prompt": "<|image_pad|>", "multi_modal_data": {"image": [b"no"]}},
            r"\['image'\]\[0\]: the file is no image",
        ),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": "HUGE"}}, r"max_image_pixels"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": 5}}, "must be a PIL image"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": [1]}, "must be a dict such as"),
        ({"prompt": "<|image_pad|>" + "a" * 200, "multi_modal_data": {"image": "LARGE"}}, "max_model_len"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(limited: LLM, prompt: dict[str, Any], message: str) -> None:
    images = {"IMAGE": picture(24, 24), "HUGE": PIL.Image.new("RGB", (300, 300)), "LARGE": picture(64, 64)}

    def real(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: real(item) for key, item in value.items()}
        if isinstance(value, list):
            return list(map(real, value))
        return images.get(value, value) if isinstance(value, str) else value

    with pytest.raises((TypeError, ValueError), match=message):
        limited.generate(real(prompt), GREEDY)


PROCESSED_AGAIN = pytest.mark.shown_by(
    "features/images/test_image_prompts.py::test_an_image_that_has_changed_since_it_was_read_fails_its_request_alone",
    "features/images/test_image_prompts.py::test_many_callers_at_once",
)
# Settings of the processor, and what the tower says to what comes out.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    LLAVA: [
        (
            {"crop_size": {"height": 48, "width": 48}, "size": {"shortest_edge": 48}},
            r"has the shape \[1, 3, 48, 48\]; allowed for Llava.*: tiles \[3, 24, 24\]",
        )
    ],
    QWEN: [
        ({"patch_size": 8}, r"has the shape \[\d+, 3, 64\]; allowed for Qwen3VL.*: \[\d+, 3, 16\]"),
        ({"merge_size": 1}, r"\['image'\]: the processor's output has the grid"),
        ({"size": {"shortest_edge": 4096, "longest_edge": 20000}}, r"has \d+ embeddings; allowed: 1 to 64"),
    ],
}


def test_an_image_that_the_tower_cannot_take_is_refused_before_anything_runs(checkpoint: Checkpoint, llm: LLM) -> None:
    """And the engine goes on."""
    prompt = {"prompt": checkpoint.placeholder, "multi_modal_data": {"image": picture(100, 97)}}
    for settings, message in REFUSED[checkpoint.oracle.architecture]:
        with pytest.raises(ValueError, match=message):
            llm.generate({**prompt, "mm_processor_kwargs": settings}, GREEDY)
    for name, given, message in [
        ("mm_processor_kwargs", [], "must be a dict, got \\[\\]"),
        ("mm_processor_kwargs", {1: 2}, "must have strings as keys, got {1: 2}"),
        ("mm_processor_kwargs", {"size": float("nan")}, "must have values of JSON: "),
        ("multi_modal_uuids", ["one"], "must be a dict such as {'image': name}, got \\['one'\\]"),
    ]:
        with pytest.raises(TypeError, match=message):
            llm.generate({**prompt, name: given}, GREEDY)
    assert len(llm.generate(prompt, GREEDY)[0].outputs[0].token_ids) == 5


def test_what_images_rule_out_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Parameters, and an image of a size that the tower cannot take."""
    checkpoint = Checkpoint(tmp_path, "Gemma3ForConditionalGeneration")
    prompt = {"prompt": checkpoint.placeholder, "multi_modal_data": {"image": picture(24, 24)}}
    large = {**prompt, "mm_processor_kwargs": {"size": {"height": 48, "width": 48}}}
    params = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=-1)

    async def ask() -> None:
        engine = AsyncLLM(tmp_path, **ENGINE, core="in_process", max_logprobs=-1)
        try:
            outputs = engine.generate(prompt, params)
            with pytest.raises(ValueError, match="prompt_logprobs is -1, for which a step computes few tokens"):
                await anext(outputs)
            outputs = engine.generate(large, GREEDY)
            with pytest.raises(ValueError, match=r"has the shape \[1, 3, 48, 48\]; allowed for Gemma3.*: tiles"):
                await anext(outputs)
        finally:
            await engine.shutdown()

    asyncio.run(ask())


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(qwen: Checkpoint, loop: asyncio.AbstractEventLoop) -> Iterator[AsyncLLM]:
    made = AsyncLLM(qwen.folder, **ENGINE, core="in_process")
    yield made
    loop.run_until_complete(made.shutdown())


def test_images_beyond_the_longest_prompt_are_not_processed(
    qwen: Checkpoint, engine: AsyncLLM, loop: asyncio.AbstractEventLoop
) -> None:
    """Each of these images has 49 embeddings, so the sixth is one too many; few of the others are begun."""
    images = [picture(56, 56, seed) for seed in range(60)]
    prompt = {"prompt": qwen.placeholder * len(images), "multi_modal_data": {"image": images}}

    async def ask() -> None:
        message = r"must have at most 255 tokens \(max_model_len 256, less one to generate\), got"
        before = engine.frontend_metrics()["mm_cache_queries"]
        with pytest.raises(ValueError, match=message):
            await anext(engine.generate(prompt, GREEDY))
        assert engine.frontend_metrics()["mm_cache_queries"] - before < 20

    loop.run_until_complete(ask())


def test_images_are_held_only_until_they_are_sent(
    qwen: Checkpoint, engine: AsyncLLM, loop: asyncio.AbstractEventLoop
) -> None:
    async def ask() -> None:
        prompt = {"prompt": qwen.placeholder, "multi_modal_data": {"image": picture(24, 24, 100)}}
        images = engine.features.images
        gc.collect()  # of earlier tests
        assert (images.most_bytes(1) > 0, images.held_bytes) == (True, 0)
        attached = [await engine.attach(prompt) for _ in range(2)]
        bytes_of_table = 3 * 256 * 4
        assert images.held_bytes == 36 * 48 + bytes_of_table + 9 * 8 + 3 * 8
        outputs = engine.generate(attached.pop(), LONG)
        assert not (await anext(outputs)).finished
        attached.clear()
        gc.collect()
        assert images.held_bytes == 0
        await outputs.aclose()

    loop.run_until_complete(ask())


@pytest.mark.parametrize(
    ("options", "has_loop"),
    [
        pytest.param({"data_parallel_size": 2}, False, id="replicas, LLM"),
        *(
            pytest.param(options, has_loop, id=name, marks=PROCESSED_AGAIN)
            for options, has_loop, name in (
                ({"data_parallel_size": 2}, True, "replicas, AsyncLLM"),
                ({"mm_processor_cache_gb": 0}, True, "processed again, AsyncLLM"),
                ({"mm_processor_cache_gb": 0}, False, "processed again, LLM"),
            )
        ),
    ],
)
def test_images_in_many_parts_reach_the_core(
    qwen: Checkpoint, options: dict[str, Any], has_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pixels of all completions come once, in messages that are smaller than an image.

    Where no pixels are held and none are cached, images are processed again when the core asks for them.
    """
    if "mm_processor_cache_gb" in options:
        monkeypatch.setattr("compiled_engine.features.images.frontend.requests.MOST_HELD", 0)
    monkeypatch.setattr("compiled_engine.features.images.pixels.MOST_BYTES", 1000)
    monkeypatch.setattr("compiled_engine.processes.channel.LARGEST_MESSAGE", 8000)
    images = {f"{seed} <|image_pad|>": picture(56, 56, seed) for seed in range(3)}
    prompts: list[Any] = [{"prompt": text, "multi_modal_data": {"image": image}} for text, image in images.items()]
    params = SamplingParams(top_k=1, max_tokens=5, ignore_eos=True, n=3)

    async def ask(engine: AsyncLLM, prompt: Any) -> RequestOutput:
        async for output in engine.generate(prompt, params, output="final"):
            return output
        raise AssertionError

    async def ask_all() -> list[RequestOutput]:
        engine = AsyncLLM(qwen.folder, **ENGINE | {"max_num_seqs": 2}, **options)
        try:
            return await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))
        finally:
            await engine.shutdown()

    if has_loop:
        outputs = asyncio.run(ask_all())
    else:
        with LLM(qwen.folder, **ENGINE | {"max_num_seqs": 2}, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
    for (text, image), output in zip(images.items(), outputs, strict=True):
        ids, expected = qwen.answer(text, [image])
        assert list(output.prompt_token_ids) == ids
        assert [list(each.token_ids) for each in output.outputs] == [expected] * 3


def test_an_image_that_has_changed_since_it_was_read_fails_its_request_alone(
    qwen: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it must be processed again."""
    monkeypatch.setattr("compiled_engine.features.images.frontend.requests.MOST_HELD", 0)
    file = tmp_path / "image.png"
    prompt = {"prompt": "<|image_pad|>", "multi_modal_data": {"image": str(file)}}

    async def ask() -> list[int]:
        engine = AsyncLLM(qwen.folder, **ENGINE, core="in_process", mm_processor_cache_gb=0)
        try:
            file.write_bytes(as_file(picture(24, 24, 1)))
            attached = await engine.attach(prompt)
            file.write_bytes(as_file(picture(24, 24, 2)))
            with pytest.raises(ValueError, match=r"\['image'\] has changed since it was read"):
                await anext(engine.generate(attached, GREEDY))
            async for output in engine.generate(prompt, GREEDY, output="final"):
                return said(output)[1]
            raise AssertionError
        finally:
            await engine.shutdown()

    assert asyncio.run(ask()) == qwen.answer("<|image_pad|>", [picture(24, 24, 2)])[1]


@pytest.fixture(scope="module")
def limited(qwen: Checkpoint) -> Iterator[LLM]:
    """An engine that takes few images, and adapters."""
    options = {"limit_mm_per_prompt": {"image": 3}, "max_image_pixels": 1 << 14, "mm_processor_cache_gb": 0}
    with LLM(qwen.folder, **ENGINE | options, enable_lora=True, max_lora_rank=8) as llm:
        yield llm


def test_truncation_keeps_images_whole(limited: LLM) -> None:
    prompt = {"prompt": "a b c <|image_pad|> d", "multi_modal_data": {"image": picture(24, 24)}}
    (whole,) = limited.generate(prompt, GREEDY)
    length = len(whole.prompt_token_ids)

    def kept(tokens: int) -> RequestOutput:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, truncate_prompt_tokens=tokens)
        return limited.generate(prompt, params)[0]

    assert list(kept(length - 3).prompt_token_ids) == list(whole.prompt_token_ids)[3:]
    with pytest.raises(ValueError, match="truncate_prompt_tokens must not cut an image"):
        kept(5)


def test_an_adapter_changes_the_text_model_alone(qwen: Checkpoint, limited: LLM, tmp_path: Path) -> None:
    """Beside requests without it, with the same image."""
    targets = ("q_proj", "v_proj", "down_proj")
    adapted = copy.copy(qwen)
    adapted.oracle = copy.copy(qwen.oracle)
    adapted.oracle.model = merge(
        copy.deepcopy(qwen.oracle.model), make_adapter(tmp_path, qwen.oracle.model, targets=targets)
    )
    texts = ["see <|image_pad|> and say", "no image"]
    image = picture(24, 24, 1)
    prompts: list[Any] = [{"prompt": texts[0], "multi_modal_data": {"image": image}}, texts[1]] * 2
    adapters = [LoRARequest("a", 1, str(tmp_path))] * 2 + [None] * 2
    outputs = limited.generate(prompts, GREEDY, lora_request=adapters)
    expected = [each.answer(*given) for each in (adapted, qwen) for given in ((texts[0], [image]), (texts[1], []))]
    assert [said(output) for output in outputs] == expected
    assert expected[0] != expected[2]


@pytest.mark.parametrize("options", [{"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0}}])
def test_the_text_model_alone_refuses_images(qwen: Checkpoint, options: dict[str, Any]) -> None:
    with LLM(qwen.folder, **ENGINE | options) as llm:
        assert said(llm.generate("no image", GREEDY)[0]) == qwen.answer("no image", [])
        with pytest.raises(ValueError, match=r"must have no images: (language_model_only|limit_mm_per_prompt)"):
            llm.generate({"prompt": "<|image_pad|>", "multi_modal_data": {"image": picture(24, 24)}}, GREEDY)


def test_many_callers_at_once(qwen: Checkpoint, engine: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    async def ask(seed: int) -> tuple[list[int], list[int]]:
        prompt = {"prompt": f"{seed} <|image_pad|>", "multi_modal_data": {"image": picture(24, 24 + seed, seed)}}
        async for output in engine.generate(prompt, GREEDY, output="final"):
            return said(output)
        raise AssertionError

    async def ask_all() -> list[tuple[list[int], list[int]]]:
        found = await asyncio.gather(*(ask(seed) for seed in range(4)))
        content = [{"type": "image", "image": picture(24, 24)}]
        async for output in engine.chat([{"role": "user", "content": content}], GREEDY, output="final"):
            found.append(said(output))
        return found

    *found, chatted = loop.run_until_complete(ask_all())
    assert found == [qwen.answer(f"{seed} <|image_pad|>", [picture(24, 24 + seed, seed)]) for seed in range(4)]
    assert chatted[0].count(qwen.oracle.vision.image_token_id) == 9


def test_images_of_a_call_that_is_cancelled_are_not_processed(qwen: Checkpoint) -> None:
    """An engine of its own: the images wait for its process to start."""

    async def ask(engine: AsyncLLM, *images: PIL.Image.Image) -> None:
        prompt = {"prompt": "<|image_pad|>" * len(images), "multi_modal_data": {"image": list(images)}}
        async for _ in engine.generate(prompt, GREEDY):
            pass

    async def cancel() -> int:
        engine = AsyncLLM(qwen.folder, **ENGINE, core="in_process")
        try:
            asking = asyncio.create_task(ask(engine, *(picture(24, 24, seed) for seed in range(6))))
            while engine.frontend_metrics()["mm_cache_queries"] < 6:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.sleep(0.2)
            await ask(engine, picture(24, 24, 6))
            one = engine.frontend_metrics()["mm_cache_bytes"]
            await ask(engine, picture(24, 24, 7))
            more = engine.frontend_metrics()["mm_cache_bytes"] - one
            return round(one / more)
        finally:
            await engine.shutdown()

    assert asyncio.run(cancel()) <= 3


def test_images_that_wait_end_with_the_engine(qwen: Checkpoint) -> None:
    """And so does the thread that waits for them, without which the interpreter would not end."""

    async def ask(engine: AsyncLLM) -> None:
        images = [picture(24, 24, seed) for seed in range(3)]
        async for _ in engine.generate({"prompt": "<|image_pad|>" * 3, "multi_modal_data": {"image": images}}, GREEDY):
            pass

    async def shut_down() -> None:
        engine = AsyncLLM(qwen.folder, **ENGINE, core="in_process")
        asking = asyncio.create_task(ask(engine))
        while engine.frontend_metrics()["mm_cache_queries"] < 3:
            await asyncio.sleep(0.01)
        await engine.shutdown()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await asyncio.wait_for(asking, 30)

    before = set(threading.enumerate())
    asyncio.run(shut_down())
    after = set(threading.enumerate())
    waiting = [thread for thread in after - before if thread.name.startswith("attached")]
    for thread in waiting:
        thread.join(30)
    assert not any(thread.is_alive() for thread in waiting)


def test_processed_images_are_forgotten_on_request(checkpoint: Checkpoint, llm: LLM, limited: LLM) -> None:
    prompt = {"prompt": checkpoint.placeholder, "multi_modal_data": {"image": picture(24, 24)}}
    llm.generate(prompt, GREEDY)
    assert llm.metrics()["mm_cache_bytes"] > 0
    llm.reset_mm_cache()
    assert llm.metrics()["mm_cache_bytes"] == 0
    limited.generate({**prompt, "prompt": "<|image_pad|>"}, GREEDY)
    assert limited.metrics()["mm_cache_bytes"] == 0


def test_a_grammar_and_an_image_belong_to_one_request(limited: LLM) -> None:
    """The request is held back while its grammar is compiled, and asks for pixels afterwards."""
    prompt = {"prompt": "<|image_pad|>", "multi_modal_data": {"image": picture(24, 24, 77)}}
    form = StructuredOutputs(regex="[ab]{4}")
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=form)
    (output,) = limited.generate(prompt, params)
    assert re.fullmatch("[ab]{4}", output.outputs[0].text)


def test_tensors_are_images_too(limited: LLM) -> None:
    image = picture(24, 24)
    found = [
        said(limited.generate({"prompt": "<|image_pad|>", "multi_modal_data": {"image": each}}, GREEDY)[0])
        for each in (image, torch.from_numpy(np.array(image)), np.asarray(image).transpose(2, 0, 1))
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("architecture", ["InternVLForConditionalGeneration", "Idefics3ForConditionalGeneration"])
def test_images_of_several_tiles_are_answered_like_by_the_whole_model(architecture: str, tmp_path: Path) -> None:
    """Their embeddings lie in several runs; steps cut them, and a second prompt finds a part of them cached."""
    checkpoint = Checkpoint(tmp_path, architecture)
    image, wide = picture(48, 48, 1), picture(90, 40, 2)
    text = f"see {checkpoint.placeholder} and {checkpoint.placeholder}"
    given = {text: [image, wide], f"{text} again": [image, wide], "no image": []}
    with LLM(tmp_path, **ENGINE | {"max_model_len": 1024, "max_num_seqs": 1}) as llm:
        outputs = llm.generate(
            [{"prompt": each, "multi_modal_data": {"image": images}} for each, images in given.items()], GREEDY
        )
        assert outputs[1].num_cached_tokens
        assert llm.metrics()["tower_images"] <= 3
    assert [said(output) for output in outputs] == [checkpoint.answer(*each) for each in given.items()]
