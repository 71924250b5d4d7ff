"""Workloads of the performance table whose prompts have images, and the files of the processor that they need.

Images are noise and are passed as pixels, so that the time of the checkpoint's processor counts. The vision tower of
the shape has an embedding for each square of 32 x 32 pixels.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from compiled_engine.bench.bounds import Job, ModelSizes, Rates, prefill_seconds, tower_seconds, workload_seconds
from compiled_engine.bench.large_tokenizer import SPECIAL_TOKENS, write_tokenizer
from compiled_engine.bench.workloads import HIGHER, LOWER, Needs, random_prompts, request_lengths
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

PIXELS_OF_EMBEDDING = 32  # on a side
# Tokens of Qwen's vocabulary from <|object_ref_start|> to <|video_pad|>, which follow SPECIAL_TOKENS.
_TOKENS = ("object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end")
_TOKENS_OF_IMAGES = ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
_PROCESSOR: Mapping[str, Any] = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_processor(folder: Path) -> None:
    """Write to `folder` the files of Qwen3-VL's processor, and of a tokenizer with Qwen3-VL's special tokens."""
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR, indent=1))
    names = (*_TOKENS, *_TOKENS_OF_IMAGES)
    write_tokenizer(folder, special_tokens=(*SPECIAL_TOKENS, *(f"<|{name}|>" for name in names)))


@dataclass(frozen=True)
class FirstToken:
    """Measures the time from the call of `generate` to the first token of one prompt with `images` images."""

    images: int
    side: int  # of an image, in pixels
    text: int = 32  # tokens of text
    unit: ClassVar[str] = "ms"
    better: ClassVar[str] = LOWER

    def what(self) -> str:
        images = "an image" if self.images == 1 else f"{self.images} images"
        return f"first token for {images} of {self.side:,} x {self.side:,}"

    def needs(self, tokens_per_step: int) -> Needs:
        return Needs(self.text + self.images * embeddings_of(self.side) + 1)

    def warm_up(self, llm: LLM, generator: random.Random) -> None:
        self.once(llm, generator)

    def once(self, llm: LLM, generator: random.Random) -> float:
        (text,) = random_prompts(llm, generator, [self.text])
        images = [[random_image(generator, self.side) for _ in range(self.images)]]
        return _generate_seconds(llm, [text], images, [1]) * 1e3

    def bound(self, sizes: ModelSizes, rates: Rates, max_num_seqs: int) -> float:
        embeddings = embeddings_of(self.side)
        tower = tower_seconds(sizes, rates, [embeddings] * self.images)
        return (tower + prefill_seconds(sizes, rates, [self.text + self.images * embeddings])) * 1e3


@dataclass(frozen=True)
class RequestsWithImages:
    """Measures output tokens per second of requests that arrive together, each with an image of its own."""

    requests: int
    prompt: tuple[int, int]  # prompt and output: least and most tokens of text, drawn uniformly with `seed`
    output: tuple[int, int]
    side: int  # of an image, in pixels
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of `SamplingParams`
    unit: ClassVar[str] = "output tok/s"
    better: ClassVar[str] = HIGHER

    def what(self) -> str:
        least, most = self.prompt
        return (
            f"{self.requests:,} requests of {least:,} to {most:,} tokens, each with an image of "
            f"{self.side:,} x {self.side:,}"
        )

    def needs(self, tokens_per_step: int) -> Needs:
        return Needs(embeddings_of(self.side) + self.prompt[1] + self.output[1])

    def warm_up(self, llm: LLM, generator: random.Random) -> None:
        (text,) = random_prompts(llm, generator, [self.prompt[0]])
        _generate_seconds(llm, [text], [[random_image(generator, self.side)]], [2], **self.sampling)

    def once(self, llm: LLM, generator: random.Random) -> float:
        texts, output_lens = request_lengths(self.requests, self.prompt, self.output, self.seed)
        images = [[random_image(generator, self.side)] for _ in texts]
        return sum(output_lens) / _generate_seconds(llm, texts, images, output_lens, **self.sampling)

    def bound(self, sizes: ModelSizes, rates: Rates, max_num_seqs: int) -> float:
        texts, output_lens = request_lengths(self.requests, self.prompt, self.output, self.seed)
        embeddings = embeddings_of(self.side)
        jobs = [Job(embeddings + len(text), [length]) for text, length in zip(texts, output_lens, strict=True)]
        tower = tower_seconds(sizes, rates, [embeddings] * self.requests)
        return sum(output_lens) / (tower + workload_seconds(sizes, rates, jobs, max_num_seqs))


def embeddings_of(side: int) -> int:
    """Return the number of embeddings of an image with sides of this many pixels."""
    return (side // PIXELS_OF_EMBEDDING) ** 2


def random_image(generator: random.Random, side: int) -> torch.Tensor:
    """Return an image of noise, uint8 [side, side, 3]."""
    noise = torch.Generator().manual_seed(generator.getrandbits(32))
    return torch.randint(0, 256, (side, side, 3), generator=noise, dtype=torch.uint8)


def _generate_seconds(
    llm: LLM,
    texts: Sequence[Sequence[int]],
    images: Sequence[Sequence[torch.Tensor]],
    output_lens: Sequence[int],
    **sampling: Any,
) -> float:
    """Return the seconds of one call of `generate` for prompts whose images precede their text.

    texts: the token ids of each prompt's text. sampling: further fields of SamplingParams.
    """
    images_config = llm.config.images
    assert images_config is not None
    placeholder = images_config.vision.image_token_id
    chosen = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | sampling
    prompts = [
        {
            "prompt_token_ids": [placeholder] * len(seen) + [token for token in text if token != placeholder],
            "multi_modal_data": {"image": list(seen)},
        }
        for text, seen in zip(texts, images, strict=True)
    ]
    params = [SamplingParams(max_tokens=length, **chosen) for length in output_lens]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start
