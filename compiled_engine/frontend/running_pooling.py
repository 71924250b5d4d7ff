"""A request that pools, under way: its vectors so far."""

from __future__ import annotations

from typing import Any

import numpy as np

from compiled_engine.frontend.input_processor import PreparedRequest
from compiled_engine.frontend.pooling import PoolingOutput, PoolingRequestOutput
from compiled_engine.messages import EngineOutput, Vectors


class RunningPooling:
    """The counterpart of RunningRequest, which has completions."""

    def __init__(self, request: PreparedRequest) -> None:
        self.request = request
        self.finished = False
        self._finish: tuple[str, int | str | None] | None = None
        self._vectors: list[Vectors] = []
        self._num_cached_tokens: int | None = None

    def look(self, engine_request_id: str, now: float) -> str | None:
        """No token of it is in the columns of a step."""
        raise RuntimeError(f"request {engine_request_id!r} got a token, but it pools")

    def update(self, output: EngineOutput, now: float) -> str | None:
        """Add a step's vectors; those that are computed again after a preemption replace the earlier ones."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if (vectors := output.vectors) is not None:
            self._vectors = [each for each in self._vectors if each.first < vectors.first] + [vectors]
        if output.finish_reason is not None:
            self.finished, self._finish = True, (output.finish_reason, output.stop_reason)
        return output.finish_reason

    def unfinished_ids(self) -> list[str]:
        """Ids of the engine requests that still run."""
        return [] if self.finished else [each.request_id for each in self.request.engine_requests]

    def snapshot(self) -> Any:
        """The result, a PoolingRequestOutput[PoolingOutput], once it is finished."""
        request, task = self.request, self.request.pooling
        reason, why = self._finish or (None, None)
        assert task is not None
        values = np.empty(0, np.float32)
        failed = reason in ("error", "abort") or not self._vectors
        if not failed:
            rows_ML = np.frombuffer(b"".join(each.data for each in self._vectors), np.float32)
            rows_ML = task.finish(rows_ML.reshape(-1, self._vectors[0].width))
            values = np.ascontiguousarray(rows_ML if task.by_token else rows_ML[0])
        return PoolingRequestOutput(
            request.request_id,
            PoolingOutput(values),
            list(request.prompt_token_ids),
            self.finished,
            self._num_cached_tokens,
            reason if failed else None,
            why,
        )

    delta = snapshot
