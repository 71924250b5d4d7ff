"""Images of prompts become what transformers' processors make of them, to the bit."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_folders import PLACEHOLDERS, as_file, picture, write_processor
from msgspec import structs

from compiled_engine.config import ImageInput, ImagesConfig
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.features.images.extras import PromptImage, images_of
from compiled_engine.features.images.frontend import processing, worker
from compiled_engine.features.images.frontend.download import Downloader, Target
from compiled_engine.features.images.frontend.pixel_coding import PixelCoding
from compiled_engine.features.images.frontend.processing import MediaProcessing, ProcessorFiles
from compiled_engine.features.images.frontend.requests import ImageRequests
from compiled_engine.features.images.frontend.urls import UrlPolicy
from compiled_engine.features.images.frontend.worker import load_processor
from compiled_engine.features.images.pixels import PixelStore
from compiled_engine.frontend.image_parts import ImageUrl
from compiled_engine.frontend.prompts import parse_prompt
from compiled_engine.frontend.tokenizer import Tokenizer, load_tokenizer
from compiled_engine.models.vision.description import describe_vision
from compiled_engine.models.vision.pixel_codes import CODES, OF_PIXELS, PIXELS, TABLE, look_up
from compiled_engine.process.smallest_first import never
from compiled_engine.sampling.params import SamplingParams

TEXTS = {"one": "before {0}\nafter", "alone": "{0}", "three": "a\n\n{0}{0}\n text {0}\n\n", "line": "\n{0}\n{0}\n"}


class Inputs:
    """The frontend's part of images for one tiny checkpoint, and transformers' processor of the same files."""

    def __init__(self, folder: Path, architecture: str, dtype: str = "float32") -> None:
        write_processor(folder, architecture)
        self.placeholder = PLACEHOLDERS[architecture]
        config_json = (folder / "config.json").read_text()
        vision = describe_vision(config_json)
        assert vision is not None
        self.image_token = vision.image_token_id
        self.has_positions = vision.mrope_section is not None
        files = ProcessorFiles(folder, folder, dtype, 1 << 20)
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        placeholder = json.loads(config_json).get("boi_token_index", vision.image_token_id)
        config = ImageInput(placeholder, 8, {}, 1 << 20, 1, 1 << 20, (), None)
        self.pads = architecture.startswith(("LlavaNext", "Idefics3"))  # images of a batch, to the same size
        self.images = ImagesConfig(vision, config_json, 1 << 10, 1 << 10, 1 << 10)
        self.requests = ImageRequests(MediaProcessing(files, 1, 1 << 20), config, self.images, self.tokenizer)
        self.folder = folder

    @property
    def theirs(self) -> Any:
        """Transformers' processor; the parts of one for video need torchvision."""
        from transformers import AutoProcessor

        has_video = any(name in self.placeholder for name in ("image_pad", "IMG_CONTEXT", "<|image|>"))
        if has_video and not find_spec("torchvision"):
            return load_processor(self.folder, self.folder)
        return AutoProcessor.from_pretrained(self.folder)

    def run(self, prompt: dict[str, Any]) -> tuple[tuple[int, ...], Any]:
        """Return the prompt's tokens, and the images in the request's extras."""
        parsed = parse_prompt(prompt)
        (attachment,) = self.requests.attach([parsed])
        assert attachment is not None
        attachment.wait()
        ids = parsed.token_ids if parsed.token_ids is not None else tuple(self.tokenizer.encode(parsed.text or ""))
        ids = attachment.expand(ids)
        part = attachment.part(ids, SamplingParams())
        request = EngineRequest("0", ids, SamplingParams(), extras=dict(part.extras))
        images = images_of(request)
        assert images is not None
        store = PixelStore(0)
        for image in images.images:
            store.ask("r", image.key, image.num_embeddings, now=True)
        assert not any(store.has(image.key) for image in images.images)
        assert part.give is not None
        for call in part.give([key for output in store.take_asks() for key in output.asks], never):
            store.give(**call.arguments)
        assert all(store.has(image.key) for image in images.images)
        whole = tuple(structs.replace(image, inputs=store.inputs(image.key)) for image in images.images)
        return ids, structs.replace(images, images=whole)


def pixels_of(image: PromptImage) -> torch.Tensor:
    """Return an image's pixels as the tower reads them."""
    tensors = {name: each.tensor() for name, each in image.inputs.items()}
    return look_up(tensors[CODES], tensors[TABLE], num_frames=2) if CODES in tensors else tensors[PIXELS]


class InThisProcess:
    """Stands for the processes of one checkpoint, of which each takes seconds to start: the same work is done here."""

    def __init__(self, module: str, count: int) -> None:
        assert module == processing.WORKER
        assert count == 1

    def begin(self, order: dict[str, Any]) -> None:
        self.order, self.processor = order, load_processor(Path(order["folder"]), Path(order["tokenizer"]))
        outputs = partial(worker._outputs, self.processor)
        self.coding = PixelCoding(self.processor.image_processor, outputs)  # type: ignore[attr-defined]

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        return worker._processed(message, self.processor, self.coding, self.order)

    def close(self) -> None:
        pass


# The one whose images are processed as those of users are.
IN_A_PROCESS = "Qwen3VLForConditionalGeneration"
# Their processor of images is that of Qwen 3 VL.
SAME_PROCESSOR = ("Qwen2VL", "Qwen2_5_VL", "Qwen3_5")
SHOWN = pytest.mark.shown_by(
    "features/images/frontend/test_processed_images.py::test_tokens_and_pixels_are_those_of_the_processor"
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=SHOWN) if name.startswith(SAME_PROCESSOR) else name for name in PLACEHOLDERS],
)
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inputs]:
    with pytest.MonkeyPatch.context() as patched:
        if request.param != IN_A_PROCESS:
            patched.setattr(processing, "WorkerPool", InThisProcess)
        made = Inputs(tmp_path_factory.mktemp("checkpoint"), request.param)
        yield made
        made.requests.close()


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_pixels_are_those_of_the_processor(inputs: Inputs, text: str) -> None:
    prompt = TEXTS[text].format(inputs.placeholder)
    given = [picture(40, 30, 1), picture(64, 48, 2), picture(33, 70, 3)][: prompt.count(inputs.placeholder)]
    expected = inputs.theirs(text=[prompt], images=given, return_tensors="pt")

    ids, images = inputs.run({"prompt": prompt, "multi_modal_data": {"image": given}})

    assert list(ids) == expected["input_ids"][0].tolist()
    for image, one in zip(images.images, given, strict=True):
        alone = inputs.theirs(text=[inputs.placeholder], images=[one], return_tensors="pt")
        assert torch.equal(pixels_of(image), alone["pixel_values"])
        for name in image.inputs.keys() - OF_PIXELS:
            assert torch.equal(image.inputs[name].tensor(), alone[name]), name
    if not inputs.pads:
        pixels = torch.cat([pixels_of(image) for image in images.images])
        assert torch.equal(pixels, expected["pixel_values"])
    covered = [place for image in images.images for first, count in image.runs for place in range(first, first + count)]
    assert covered == [place for place, token_id in enumerate(ids) if token_id == inputs.image_token]
    assert (images.positions is not None) == inputs.has_positions
    if inputs.has_positions:
        assert images.positions.shape == (3, len(ids))


def test_token_ids_with_placeholders_are_expanded_as_text_is(inputs: Inputs) -> None:
    prompt, image = f"a\n\n{inputs.placeholder}\nb", picture(40, 30)
    data = {"multi_modal_data": {"image": image}}
    token_ids = inputs.tokenizer.encode(prompt)

    assert inputs.run({"prompt_token_ids": token_ids, **data})[0] == inputs.run({"prompt": prompt, **data})[0]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "CMYK", "1"])
def test_every_mode_is_converted_as_the_processor_converts_it(inputs: Inputs, mode: str) -> None:
    image = picture(40, 30).convert("P") if mode == "P" else picture(40, 30, mode="L" if mode == "1" else mode)
    image = image.convert(mode)
    expected = inputs.theirs(text=[inputs.placeholder], images=[image], return_tensors="pt")["pixel_values"]

    _, images = inputs.run({"prompt": inputs.placeholder, "multi_modal_data": {"image": image}})

    assert torch.equal(pixels_of(images.images[0]), expected)


def test_forms_of_an_image_are_equal_and_have_keys_of_their_own(inputs: Inputs, tmp_path: Path) -> None:
    image = picture(40, 30)
    (tmp_path / "image.png").write_bytes(as_file(image))
    forms = [image, np.asarray(image), torch.from_numpy(np.array(image)), as_file(image), tmp_path / "image.png"]

    found = [inputs.run({"prompt": inputs.placeholder, "multi_modal_data": {"image": [form]}})[1] for form in forms]

    pixels = [pixels_of(each.images[0]) for each in found]
    assert all(torch.equal(each, pixels[0]) for each in pixels)
    keys = [each.images[0].key for each in found]
    assert keys[1] == keys[2]
    assert keys[3] == keys[4]
    assert len(set(keys)) == 3


def test_settings_of_the_processor_change_the_key(inputs: Inputs) -> None:
    image, settings = picture(40, 30), {"do_normalize": False}
    prompt = {"prompt": inputs.placeholder, "multi_modal_data": {"image": image}}
    expected = inputs.theirs(text=[inputs.placeholder], images=[image], return_tensors="pt", **settings)

    plain, changed = inputs.run(prompt)[1], inputs.run({**prompt, "mm_processor_kwargs": settings})[1]

    assert torch.equal(pixels_of(changed.images[0]), expected["pixel_values"])
    assert plain.images[0].key != changed.images[0].key


def test_settings_that_no_process_can_read_are_named(inputs: Inputs) -> None:
    prompt = {"prompt": inputs.placeholder, "multi_modal_data": {"image": picture(40, 30)}}
    with pytest.raises(
        TypeError, match=r"\['mm_processor_kwargs'\] must have values of JSON: Object of type set is not"
    ):
        inputs.run({**prompt, "mm_processor_kwargs": {"size": {5}}})


def test_images_of_a_prompt_are_fetched_together(inputs: Inputs) -> None:
    """Each answer comes when all are asked for."""
    together = threading.Barrier(3, timeout=20)

    class Meeting(Downloader):
        def fetch(self, target: Target, longest_s: float = 10) -> bytes:
            together.wait()
            return as_file(picture(40, 30, int(target.path[1:])))

    assert inputs.requests.images is not None
    policy, downloader = inputs.requests.policy, inputs.requests.downloader
    inputs.requests.policy, inputs.requests.downloader = UrlPolicy(("images.example",)), Meeting()
    urls = [ImageUrl("image", f"http://images.example/{seed}") for seed in (1, 2, 3)]
    try:
        _, images = inputs.run({"prompt": inputs.placeholder * 3, "multi_modal_data": {"image": urls}})
    finally:
        inputs.requests.policy, inputs.requests.downloader = policy, downloader
    files = [as_file(picture(40, 30, seed)) for seed in (1, 2, 3)]
    _, expected = inputs.run({"prompt": inputs.placeholder * 3, "multi_modal_data": {"image": files}})
    assert [image.key for image in images.images] == [image.key for image in expected.images]


def test_an_image_is_processed_once(inputs: Inputs) -> None:
    image, before = picture(24, 24, seed=5), inputs.requests.metrics()
    prompt = {"prompt": inputs.placeholder * 2, "multi_modal_data": {"image": [image, image]}}

    inputs.run(prompt)
    inputs.run(prompt)

    after = inputs.requests.metrics()
    assert after["mm_cache_queries"] == before["mm_cache_queries"] + 4
    assert after["mm_cache_hits"] == before["mm_cache_hits"] + 3


def test_pixels_that_are_held_no_longer_are_made_again(inputs: Inputs, tmp_path: Path) -> None:
    image, path = picture(40, 30, seed=9), tmp_path / "image.png"
    path.write_bytes(as_file(image))
    prompt = {"prompt": inputs.placeholder, "multi_modal_data": {"image": path}}
    first = inputs.run(prompt)[1].images[0]
    most, inputs.requests.most_held = inputs.requests.most_held, 0
    try:
        for changes_cache in (lambda: None, inputs.requests.forget):
            changes_cache()
            assert inputs.run(prompt)[1].images[0] == first
        assert inputs.requests.held_bytes == 0
    finally:
        inputs.requests.most_held = most


def test_bfloat16_is_rounded_as_transformers_rounds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing, "WorkerPool", InThisProcess)
    inputs = Inputs(tmp_path, "Qwen3VLForConditionalGeneration", "bfloat16")
    image = picture(40, 30)
    expected = inputs.theirs(text=[inputs.placeholder], images=[image], return_tensors="pt").to(torch.bfloat16)

    _, images = inputs.run({"prompt": inputs.placeholder, "multi_modal_data": {"image": image}})
    inputs.requests.close()

    assert torch.equal(pixels_of(images.images[0]), expected["pixel_values"])
    assert torch.equal(images.images[0].inputs["image_grid_thw"].tensor(), expected["image_grid_thw"])


SETTINGS: tuple[tuple[dict[str, Any], bool], ...] = (
    ({"size": {"shortest_edge": 1024, "longest_edge": 2048}}, True),
    ({"do_rescale": False}, True),
    ({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.3, 0.2, 0.1]}, True),
    ({"images_kwargs": {"do_normalize": False}}, False),
)


def test_pixels_of_grids_come_as_bytes_without_copies_of_frames(inputs: Inputs) -> None:
    """Tiles, and patches that may be padding, come as the processor returns them."""
    image, theirs = picture(70, 50, seed=7), inputs.theirs
    for settings, is_coded in (({}, inputs.has_positions), *(SETTINGS if inputs.has_positions else ())):
        values = theirs(text=[inputs.placeholder], images=[image], return_tensors="pt", **settings)[PIXELS]

        prompt = {"prompt": inputs.placeholder, "multi_modal_data": {"image": image}, "mm_processor_kwargs": settings}
        (found,) = inputs.run(prompt)[1].images

        assert torch.equal(pixels_of(found), values)
        num_bytes = sum(len(found.inputs[name].data) for name in found.inputs.keys() & OF_PIXELS)
        of_table = 3 * 256 * values.element_size()
        assert num_bytes == (values.numel() // 2 + of_table if is_coded else values.numel() * values.element_size())
