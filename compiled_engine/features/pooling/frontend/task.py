"""Defines the parameters of pooling requests, with vLLM's names, and post-processes the engine's vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from compiled_engine.pooling import CLASSIFY, EMBED, NONE, NORMALISE, SIGMOID, SOFTMAX, Pooling

TOKEN_EMBED, TOKEN_CLASSIFY = "token_embed", "token_classify"
BY_TOKEN = {TOKEN_EMBED: EMBED, TOKEN_CLASSIFY: CLASSIFY}
LEAST_LENGTH = 1e-12  # lower bound on the norm that a vector is divided by


@dataclass(frozen=True)
class PoolingParams:
    """Parameters of a pooling request. None leaves a choice to the model."""

    dimensions: int | None = None  # An embedding is cut to these before it is normalised.
    # use_activation and normalize are synonyms: normalise embeddings, or turn logits into probabilities.
    use_activation: bool | None = None
    normalize: bool | None = None
    # Keep the first tokens of a text, plus its special tokens; -1: as many as the model takes.
    truncate_prompt_tokens: int | None = None
    task: str | None = None  # embed, classify, token_embed or token_classify

    def __post_init__(self) -> None:
        for name, least in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"{name} must be an integer or None, got {value!r}")
            if value is not None and (value < least or value == 0):
                raise ValueError(f"{name} must be at least 1{', or -1' if least < 0 else ''}, got {value}")
        for name in ("use_activation", "normalize"):
            if not isinstance(getattr(self, name), bool | None):
                raise TypeError(f"{name} must be True, False or None, got {getattr(self, name)!r}")
        if None not in (self.use_activation, self.normalize) and self.use_activation != self.normalize:
            raise ValueError(f"normalize is {self.normalize}, but use_activation is {self.use_activation}")

    @property
    def activates(self) -> bool | None:
        return self.use_activation if self.normalize is None else self.normalize


@dataclass(frozen=True)
class PoolingTask:
    """Converts a request's vectors to results. Raises ValueError for a task or dimensions that the model lacks."""

    name: str
    pooling: Pooling
    params: PoolingParams
    hidden_size: int

    def __post_init__(self) -> None:
        pooling, dimensions, width = self.pooling, self.params.dimensions, self.pooling.width(self.hidden_size)
        allowed = (pooling.task, next(name for name, task in BY_TOKEN.items() if task == pooling.task))
        if self.name not in allowed:
            raise ValueError(f"task is {self.name!r}, but the model can {' and '.join(allowed)}; see convert")
        if self.by_token and len(pooling.kinds) > 1 and pooling.head:
            raise ValueError(f"task is {self.name!r}, but the model's head reads several kinds of pooling")
        if dimensions is not None and pooling.task != EMBED:
            raise ValueError(f"dimensions must be None, as the model classifies, got {dimensions}")
        if dimensions is not None and dimensions > width:
            raise ValueError(f"dimensions must be at most {width}, the model's, got {dimensions}")

    @property
    def by_token(self) -> bool:
        """Whether each token has its own result."""
        return self.name in BY_TOKEN

    def finish(self, rows_ML: np.ndarray) -> np.ndarray:
        """Return the results for M vectors of L values: cut to the dimensions, then normalised or activated.

        For a reranker with logits of "no" and "yes", a result is the score of "yes" alone.
        """
        pooling, asked = self.pooling, self.params.activates
        rows_ML = rows_ML[:, : self.params.dimensions or pooling.dimensions]
        activation = pooling.activation if (pooling.activates if asked is None else asked) else NONE
        if asked and pooling.task == EMBED:
            activation = NORMALISE
        if pooling.head and len(pooling.head[-1].tokens) > 1:  # logits of the tokens for "no" and "yes"
            if activation == NONE:
                return rows_ML[:, 1:] - rows_ML[:, :1]
            return _ACTIVATIONS[activation](rows_ML)[:, 1:]
        return rows_ML if activation == NONE else _ACTIVATIONS[activation](rows_ML)


def _normalised(rows_ML: np.ndarray) -> np.ndarray:
    lengths_M1 = np.sqrt(np.einsum("ml,ml->m", rows_ML, rows_ML))[:, None]
    return rows_ML / np.maximum(lengths_M1, np.float32(LEAST_LENGTH))


def _softmax(rows_ML: np.ndarray) -> np.ndarray:
    powers_ML = np.exp(rows_ML - rows_ML.max(axis=1, keepdims=True))
    return powers_ML / powers_ML.sum(axis=1, keepdims=True)


def _sigmoid(rows_ML: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(np.float32(0), -rows_ML))


_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    NORMALISE: _normalised,
    SOFTMAX: _softmax,
    SIGMOID: _sigmoid,
}
