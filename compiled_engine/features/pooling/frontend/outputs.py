"""Results of pooling requests, with vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
import numpy as np

if TYPE_CHECKING:
    import torch


class PoolingOutput(msgspec.Struct, frozen=True):
    """A request's result, fp32: a vector, or for a per-token task one vector per token, [tokens, values]."""

    values: np.ndarray

    @property
    def data(self) -> torch.Tensor:
        """The values as a tensor."""
        import torch

        return torch.from_numpy(self.values)


class EmbeddingOutput(msgspec.Struct, frozen=True):
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct, frozen=True):
    """Probabilities of the labels, in the order of id2label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct, frozen=True):
    score: float


Output = TypeVar("Output")


class PoolingRequestOutput(msgspec.Struct, Generic[Output], frozen=True):
    """The result of a pooling request."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int | None = None


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput], frozen=True):
    """The result of `embed` for one prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput], frozen=True):
    """The result of `classify` for one prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput], frozen=True):
    """The result of `score` for one pair."""
