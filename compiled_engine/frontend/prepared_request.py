"""Defines `PreparedRequest`, a checked and tokenised request, and `Running`, the collector of a request's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from compiled_engine.engine.messages import ControlCall, EngineOutput, EngineRequest
from compiled_engine.process.smallest_first import Stopped
from compiled_engine.sampling.params import SamplingParams

Give = Callable[[Sequence[str], Stopped], Sequence[ControlCall]]
"""Returns the control calls with the data of these keys. Called in any thread, as that may take long; polls its second
argument, and raises WorkStopped if that returns True. Raises TypeError, ValueError or OSError for data that is gone."""


class PreparedRequest(msgspec.Struct, frozen=True):
    """A prompt that is ready to run, and one engine request for each of its `sampling_params.n` completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    engine_requests: tuple[EngineRequest, ...]
    given: Any = None  # passed to the core with each engine request, see EngineCore.add
    output: Mapping[str, Any] = {}  # fields of its RequestOutput that features set
    give: Give | None = None  # returns data that the core asks for, see EngineOutput.asks
    collect: Callable[[PreparedRequest], Running] | None = None  # returns the request's Running; None: RunningRequest


class Running(Protocol):
    """Interface of objects that collect the outputs of a running request and make the user's result from them."""

    request: PreparedRequest
    finished: bool

    def look(self, engine_request_id: str, now: float) -> str | None:
        """Check a completion after a token was appended to it. Return its finish reason, or None while it runs.

        engine_request_id: the engine request of the completion. now: the current time in seconds of time.perf_counter.
        """

    def update(self, output: EngineOutput, now: float) -> str | None:
        """Add a step's output to one completion. Return its finish reason, or None while it runs.

        now: see `look`.
        """

    def unfinished_ids(self) -> list[str]:
        """Return the ids of the engine requests, one for each completion, that still run."""

    def snapshot(self) -> Any:
        """Return the request's whole result so far."""

    def delta(self) -> Any:
        """Return the part of the result that was added since the last call."""
