"""Collects the vectors of running pooling requests, and makes the results of finished requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np

from compiled_engine.engine.messages import EngineOutput
from compiled_engine.features.pooling.extras import Vectors, vectors_in
from compiled_engine.features.pooling.frontend.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
)
from compiled_engine.features.pooling.frontend.task import PoolingTask
from compiled_engine.frontend.prepared_request import PreparedRequest

Result = TypeVar("Result", bound=PoolingRequestOutput[Any])


class RunningPooling:
    """Collects the vectors of a running pooling request. `task` converts them to its result.

    It has the interface of RunningRequest.
    """

    def __init__(self, task: PoolingTask, request: PreparedRequest) -> None:
        self.task = task
        self.request = request
        self.request_id = request.request_id
        self.finished = False
        self.vectors: list[Vectors] = []
        self.num_cached_tokens: int | None = None  # None before the first output
        self._finish: tuple[str, int | str | None] | None = None

    def look(self, engine_request_id: str, now: float) -> str | None:
        """Raise RuntimeError, since a pooling request gets no tokens."""
        raise RuntimeError(f"request {engine_request_id!r} got a token, but it pools")

    def update(self, output: EngineOutput, now: float) -> str | None:
        """Add a step's vectors. Vectors recomputed after a preemption replace the earlier vectors.

        Return the finish reason, if any.
        """
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        if (vectors := vectors_in(output.extras)) is not None:
            while self.vectors and self.vectors[-1].first >= vectors.first:
                self.vectors.pop()
            self.vectors.append(vectors)
        if output.finish_reason is not None:
            self.finished, self._finish = True, (output.finish_reason, output.stop_reason)
        return output.finish_reason

    def unfinished_ids(self) -> list[str]:
        """Return the ids of engine requests that still run."""
        return [] if self.finished else [each.request_id for each in self.request.engine_requests]

    def snapshot(self) -> Any:
        """Return the request itself. See `results`, which builds the results of all requests of a call together."""
        return self

    delta = snapshot

    def raise_if_failed(self) -> None:
        """Raise RuntimeError if the request has ended without a result."""
        reason, why = self._finish or (None, None)
        if reason in ("error", "abort") or not self.vectors:
            raise RuntimeError(f"request {self.request_id} has no result ({reason}): {why}")


def finished_rows(ended: Sequence[RunningPooling]) -> np.ndarray:
    """Return the results of requests with the same task, fp32 [rows, values].

    A request has one row, or one per token. Raises RuntimeError if a request has no result.
    """
    for each in ended:
        each.raise_if_failed()
    if not ended:
        return np.empty((0, 0), np.float32)
    data = bytearray().join([vectors.data for each in ended for vectors in each.vectors])
    rows_ML = np.frombuffer(data, np.float32).reshape(-1, ended[0].vectors[0].width)
    return np.ascontiguousarray(ended[0].task.finish(rows_ML))


def results(ended: Sequence[RunningPooling]) -> list[PoolingRequestOutput[PoolingOutput]]:
    """Return the results of `encode`: each has one row or one row per token. Raises the errors of `finished_rows`."""
    rows_ML = finished_rows(ended)
    values: Iterable[np.ndarray] = rows_ML
    if ended and ended[0].task.by_token:
        ends = accumulate((sum(vectors.num_rows for vectors in each.vectors) for each in ended), initial=0)
        values = [rows_ML[start:end] for start, end in pairwise(ends)]
    return result_of_each(PoolingRequestOutput, PoolingOutput, ended, values)


def embeddings(ended: Sequence[RunningPooling]) -> list[EmbeddingRequestOutput]:
    """Return the results of `embed`. Raises the errors of `finished_rows`."""
    return result_of_each(EmbeddingRequestOutput, EmbeddingOutput, ended, finished_rows(ended).tolist())


def classifications(ended: Sequence[RunningPooling]) -> list[ClassificationRequestOutput]:
    """Return the results of `classify`. Raises the errors of `finished_rows`."""
    return result_of_each(ClassificationRequestOutput, ClassificationOutput, ended, finished_rows(ended).tolist())


def result_of_each(
    kind: type[Result], make: Callable[[Any], Any], ended: Iterable[RunningPooling], values: Iterable[Any]
) -> list[Result]:
    """Return a result of type `kind` for each ended request. `make` converts its entry of `values` to `outputs`."""
    return [
        kind(each.request_id, make(value), list(each.request.prompt_token_ids), True, each.num_cached_tokens)
        for each, value in zip(ended, values, strict=True)
    ]
