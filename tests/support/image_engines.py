"""Engines that read images, requests with images, and what transformers' whole model says to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_models import PLACEHOLDER, Image, images_together, random_image, save_vision_folder

from compiled_engine.config import EngineConfig
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.messages import EngineOutput, EngineRequest
from compiled_engine.features.images.extras import PlainTensor, PromptImage, contents_of, extras_of
from compiled_engine.models.vision.description import describe_vision
from compiled_engine.models.vision.inputs import num_embeddings
from compiled_engine.models.vision.positions import image_positions
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.vision import VisionDescription

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 256,
    "block_size": 8,
    "skip_tokenizer_init": True,
}


# Options of an LLM with a processor.
WITH_PROCESSOR: dict[str, Any] = {
    "mode": "eager",
    "device": "cpu",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_blocks": 128,
    "image_workers": 1,
    "progress": False,
}

TOLERANCE = 3e-4  # of log-probabilities
Outputs = dict[str, tuple[list[int], list[float]]]


def key_of(image: Image) -> str:
    """Return a key that is different for different images."""
    return str(hash(image["pixel_values"].numpy().tobytes()))


@dataclass(frozen=True)
class Prompt:
    """A prompt: token ids, with None in the place of each image, and the images."""

    ids: tuple[int | None, ...]
    images: tuple[Image, ...] = ()

    def expanded(self, vision: VisionDescription) -> tuple[int, ...]:
        """Return the token ids, with a placeholder for each embedding of an image."""
        rest = iter(self.images)
        found: list[int] = []
        for each in self.ids:
            found += [PLACEHOLDER] * num_embeddings(vision, next(rest)) if each is None else [each]
        return tuple(found)


class Oracle:
    """A tiny multimodal model of transformers, saved as a checkpoint, which gives the expected results."""

    def __init__(self, folder: Path, architecture: str, config_json: str | None = None) -> None:
        """config_json: by default that of vision_config."""
        self.folder, self.architecture = folder, architecture
        self.model = save_vision_folder(folder, architecture, config_json=config_json)
        # Images are given as the processor prepares them.
        (folder / "preprocessor_config.json").write_text(
            '{"max_soft_tokens": 20}' if "Gemma4" in architecture else "{}"
        )
        found = describe_vision((folder / "config.json").read_text())
        assert found is not None
        self.vision = found
        self._greedy: dict[tuple[Any, ...], tuple[list[int], list[float]]] = {}

    def image(self, height: int, width: int, seed: int = 0) -> Image:
        return random_image(self.vision, height, width, seed)

    def logprobs(self, ids: Sequence[int], images: Sequence[Image]) -> torch.Tensor:
        """Return the log-probabilities of all positions, [L, V]."""
        given: dict[str, Any] = {"input_ids": torch.tensor([list(ids)])}
        if images:
            given |= images_together(self.model, images)
        types = (given["input_ids"] == PLACEHOLDER).long()
        if self.vision.mrope_section or self.vision.stated_positions:
            given["mm_token_type_ids"] = types
        elif self.vision.both_ways:
            given["token_type_ids"] = types
        with torch.no_grad():
            return self.model(**given, use_cache=False).logits[0].log_softmax(-1)

    def greedy(self, prompt: Prompt, count: int) -> tuple[list[int], list[float]]:
        """Return the most probable continuation and its log-probabilities. They are kept until `forget`."""
        key = prompt.ids, tuple(key_of(image) for image in prompt.images)
        tokens, logprobs = self._greedy.setdefault(key, ([], []))
        ids = [*prompt.expanded(self.vision), *tokens]
        for _ in range(count - len(tokens)):
            last = self.logprobs(ids, prompt.images)[-1]
            ids.append(int(last.argmax()))
            tokens.append(ids[-1])
            logprobs.append(float(last.max()))
        return tokens[:count], logprobs[:count]

    def forget(self) -> None:
        """Forget kept continuations, after a change of the model."""
        self._greedy.clear()

    def request(self, name: str, prompt: Prompt, keys: Sequence[str] = (), **params: Any) -> EngineRequest:
        """Return a greedy request. keys: of the images, by default made of their pixels."""
        ids = prompt.expanded(self.vision)
        images, start = [], 0
        for number, image in enumerate(prompt.images):
            start = ids.index(PLACEHOLDER, start)
            count = num_embeddings(self.vision, image)
            key = keys[number] if keys else key_of(image)
            images.append(
                PromptImage(key, ((start, count),), {name: PlainTensor.of(each) for name, each in image.items()})
            )
            start += count
        extras: dict[str, Any] = {}
        if images:
            positions, offset = None, 0
            if self.vision.mrope_section:
                positions, offset = image_positions(self.vision, ids, prompt.images)
            extras = extras_of(images, positions, offset)
        sampling = SamplingParams(**{"temperature": 0, "logprobs": 0, "ignore_eos": True, "max_tokens": 6} | params)
        return EngineRequest(name, ids, sampling, extras=extras, contents=contents_of(images))


def config_of(oracle: Oracle, **options: Any) -> EngineConfig:
    return resolve(EngineOptions(model=oracle.folder, **OPTIONS | options))


@contextmanager
def running(oracle: Oracle, **options: Any) -> Iterator[EngineCore]:
    """Run an engine of the oracle's checkpoint within a block."""
    core = start_core(config_of(oracle, **options), SilentProgress())
    try:
        yield core
    finally:
        core.close()


def outputs_of(core: EngineCore, requests: Sequence[EngineRequest], steps_between: int = 0) -> Outputs:
    """Run requests together, and return the tokens and log-probabilities of each.

    steps_between: a request comes these many steps after the one before it.
    """
    found: Outputs = {request.request_id: ([], []) for request in requests}
    waiting = list(requests)
    while waiting or core.has_unfinished():
        while waiting:
            core.add(waiting.pop(0))
            if steps_between:
                break
        for _ in range(max(1, steps_between)):
            for output in core.step():
                take(output, found)
            core.check_integrity()
    return found


def take(output: EngineOutput, found: Outputs) -> None:
    assert output.finish_reason in (None, "length"), output
    tokens, logprobs = found[output.request_id]
    tokens += output.new_token_ids
    if output.logprobs is not None:
        logprobs += [each.logprobs[0] for each in output.logprobs]


def check(oracle: Oracle, prompts: Mapping[str, Prompt], found: Outputs) -> None:
    """Assert that the results are the tokens and log-probabilities of transformers' whole model."""
    for name, prompt in prompts.items():
        tokens, logprobs = oracle.greedy(prompt, len(found[name][0]))
        assert tokens
        assert found[name][0] == tokens, name
        assert found[name][1] == pytest.approx(logprobs, abs=TOLERANCE), name
