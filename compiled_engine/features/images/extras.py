"""The data of images in the extras of messages, as plain data.

The frontend puts a request's images into `EngineRequest.extras`. Planning (plan.py) reads them there, and puts data for
the device into the extras of NewRequest and SchedulerOutput.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from compiled_engine.engine.messages import Content, EngineRequest

NAME = "images"
Runs = tuple[tuple[int, int], ...]
"""Positions of a prompt, or rows of the embeddings on the device, each as (first, number), in order."""


class PlainTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor on the host as plain data."""

    dtype: str  # torch's name without "torch.", such as "bfloat16"
    shape: tuple[int, ...]
    data: bytes  # the elements, contiguous; a bytearray if they may be written

    @classmethod
    def of(cls, tensor: torch.Tensor) -> PlainTensor:
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes())

    def tensor(self) -> torch.Tensor:
        """Return the tensor. It shares its memory with the data if that is a bytearray, and otherwise has its own."""
        own = self.data if isinstance(self.data, bytearray) else bytearray(self.data)
        flat = torch.frombuffer(own, dtype=torch.uint8)
        return flat.view(getattr(torch, self.dtype)).view(self.shape)

    def without_data(self) -> torch.Tensor:
        """Return a tensor of this dtype and shape on the meta device."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta")


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt, as the model's processor has prepared it."""

    key: str  # hex digest of pixels and processor settings; images with the same key have the same embeddings
    # (first position, number of positions) in the prompt that take the image's embeddings, ascending. Positions between
    # two runs hold other tokens, such as separators of rows.
    runs: Runs
    # The tower's inputs for this image, by the processor's names; empty if they follow the request, see pixels.py.
    inputs: Mapping[str, PlainTensor] = {}

    @property
    def num_embeddings(self) -> int:
        return sum(length for _, length in self.runs)

    @property
    def contents(self) -> Iterator[Content]:
        """A Content for each run of positions. Its key joins the image's key and the number of embeddings before it."""
        before = 0
        for first, length in self.runs:
            yield Content(first, length, f"{self.key} {before}")
            before += length


class RequestImages(msgspec.Struct, frozen=True, array_like=True):
    """The images of a request in the order of their positions."""

    images: tuple[PromptImage, ...]
    # Positions of the prompt's tokens for models with positions in three dimensions, int32 [3, prompt length]; None for
    # other models. Later tokens have their number plus `position_offset` in all three.
    positions: PlainTensor | None = None
    position_offset: int = 0


class RowImages(msgspec.Struct, frozen=True, array_like=True):
    """The images of a request, without pixels. Planning sends them to the runner in a NewRequest."""

    runs: tuple[Runs, ...]  # see PromptImage, for each image
    positions: PlainTensor | None = None  # as in RequestImages
    position_offset: int = 0


class TowerImage(msgspec.Struct, frozen=True, array_like=True):
    """An image whose embeddings a step computes. Planning sends it to the runner in StepImages."""

    rows: Runs  # of its embeddings
    inputs: Mapping[str, PlainTensor]  # see PromptImage


class StepImages(msgspec.Struct, frozen=True, array_like=True):
    """The images whose positions a step computes. Planning sends them to the runner in a SchedulerOutput."""

    computed: Sequence[TowerImage]
    placed: Mapping[str, Sequence[tuple[int, Runs]]]  # request -> (number of the image, rows of its embeddings)


def images_of(request: EngineRequest) -> RequestImages | None:
    """Return the images of a request; None if it has none."""
    given = request.extras.get(NAME)
    return None if given is None else msgspec.convert(given, RequestImages)


def extras_of(images: Sequence[PromptImage], positions: torch.Tensor | None, offset: int) -> dict[str, Any]:
    """Return the entries for EngineRequest.extras of a request with these images.

    positions, offset: see `positions` and `position_offset` of RequestImages.
    """
    return {NAME: RequestImages(tuple(images), None if positions is None else PlainTensor.of(positions), offset)}


def contents_of(images: Sequence[PromptImage]) -> tuple[Content, ...]:
    """Return EngineRequest.contents for a request with these images: prompts share blocks only if images are equal."""
    return tuple(content for image in images for content in image.contents)
