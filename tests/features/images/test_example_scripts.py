"""Scripts in the forms of vLLM's documented examples for vision, with this engine's names."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import PIL.Image
import pytest
import torch
from image_engines import Oracle
from image_folders import as_file, picture, write_processor

from compiled_engine import LLM, EngineArgs, LoRARequest, SamplingParams

QUESTION = "USER: <image>\nWhat is the content of this image?\nASSISTANT:"
TWO = "USER: <image><image>\nWhat is the content of each image?\nASSISTANT:"
HERE: dict[str, Any] = {"device": "cpu", "enforce_eager": True, "num_blocks": 64, "image_workers": 1, "progress": False}
NUM_EMBEDDINGS = 36


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Made as the examples do that list many models: arguments as an object, with limits for each kind of media."""
    folder = tmp_path_factory.mktemp("checkpoint")
    Oracle(folder, "LlavaForConditionalGeneration")
    write_processor(folder, "LlavaForConditionalGeneration")
    arguments = EngineArgs(
        model=str(folder),
        max_model_len=256,
        max_num_seqs=2,
        trust_remote_code=True,
        mm_processor_kwargs={"do_normalize": True},
        limit_mm_per_prompt={"image": 2},
    )
    limits = {"image": 0, "video": 0, "audio": 0}
    arguments.limit_mm_per_prompt = limits | dict(arguments.limit_mm_per_prompt or {})
    with LLM(**asdict(arguments) | {"seed": 3, "mm_processor_cache_gb": 0} | HERE) as llm:
        yield llm


@pytest.fixture(scope="module")
def image() -> PIL.Image.Image:
    return picture(40, 30, 1)


def num_embeddings(output: Any) -> int:
    return list(output.prompt_token_ids).count(310)


def test_one_prompt(llm: LLM, image: PIL.Image.Image) -> None:
    params = SamplingParams(temperature=0.2, max_tokens=6, stop_token_ids=None)
    outputs = llm.generate({"prompt": QUESTION, "multi_modal_data": {"image": image}}, params)
    assert [len(each.outputs[0].token_ids) <= 6 for each in outputs] == [True]
    assert (outputs[0].prompt, num_embeddings(outputs[0])) == (QUESTION, NUM_EMBEDDINGS)


def test_a_batch_with_names_and_adapters_that_are_none(llm: LLM, image: PIL.Image.Image) -> None:
    prompts = [
        {"prompt": QUESTION, "multi_modal_data": {"image": image}, "multi_modal_uuids": {"image": f"uuid_{number}"}}
        for number in range(3)
    ]
    params = SamplingParams(temperature=0, max_tokens=6)
    adapters: list[LoRARequest] | None = None
    outputs = llm.generate(prompts, sampling_params=params, lora_request=adapters)
    assert len({tuple(each.outputs[0].token_ids) for each in outputs}) == 1


def test_several_images(llm: LLM, image: PIL.Image.Image) -> None:
    data = {"image": [image, picture(30, 50, 2)]}
    prompt = {"prompt": TWO, "multi_modal_data": data, "multi_modal_uuids": {"image": ["one", None]}}
    (output,) = llm.generate(prompt, sampling_params=SamplingParams(temperature=0.0, max_tokens=6))
    assert num_embeddings(output) == 2 * NUM_EMBEDDINGS
    with pytest.raises(ValueError, match=r"\['multi_modal_uuids'\] has 1 names of images; allowed: 2, one for each"):
        llm.generate(prompt | {"multi_modal_uuids": {"image": ["one"]}})
    with pytest.raises(TypeError, match=r"\['multi_modal_uuids'\] must be a dict such as"):
        llm.generate(prompt | {"multi_modal_uuids": {"image": 5}})


def test_a_conversation(llm: LLM, image: PIL.Image.Image) -> None:
    url = f"data:image/png;base64,{base64.b64encode(as_file(image)).decode()}"
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}, "uuid": "one"},
        {"type": "image_pil", "image_pil": image},
        {"type": "text", "text": "What's in these images?"},
    ]
    short_forms = [{"image_url": url}, {"image_pil": image}, "What's in these images?"]
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": content},
    ]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    (output,) = llm.chat(conversation, sampling_params=params, chat_template=None, lora_request=None)
    assert num_embeddings(output) == 2 * NUM_EMBEDDINGS
    conversation[-1] = {"role": "user", "content": short_forms}
    (again,) = llm.chat(conversation, params, use_tqdm=False, mm_processor_kwargs={"do_normalize": True})
    assert again.prompt_token_ids == output.prompt_token_ids
    assert again.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"image": torch.zeros(36, 64)}, "got float32 of shape .36, 64.; embeddings are not taken in place of images"),
        ({"image": {"image_embeds": torch.zeros(1, 36, 64)}}, "must be a PIL image, .* got {'image_embeds': tensor"),
        ({"image": "https://images.example/a.png"}, "a.png' is a URL, which only messages may have; allowed: a PIL"),
        ({"image": "data:image/png;base64," + 9000 * "A"}, r"A\.\.\. is a URL, which only messages may have"),
        ({"image": [None]}, r"\['image'\]\[0\] must be a PIL image, .* got None"),
        ({"image": None}, "has names of images, but no images; a name alone does not find an earlier image"),
        ({"video": [0]}, "has 'video'; allowed: 'image'"),
    ],
    ids=["embeddings", "embeddings of a family", "URL", "data URL", "None among images", "name alone", "video"],
)
def test_what_the_engine_does_not_take_is_named(llm: LLM, data: dict[str, Any], error: str) -> None:
    prompt = {"prompt": QUESTION, "multi_modal_data": data, "multi_modal_uuids": {"image": ["one"]}}
    with pytest.raises((TypeError, ValueError), match=error):
        llm.generate(prompt)


@pytest.mark.parametrize("kind", ["video_url", "audio_url", "input_audio", "image_embeds"])
def test_parts_that_are_no_images_are_named(llm: LLM, kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:any/any;base64," + 9000 * "A"}}
    with pytest.raises(ValueError, match=f"must be .* or an image, got {{'type': '{kind}'") as found:
        llm.chat([{"role": "user", "content": [part]}])
    assert len(str(found.value)) <= 400
