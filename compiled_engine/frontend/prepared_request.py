"""A request that is checked and tokenised, and the interface of the object that collects its outputs while it runs."""

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
    """A prompt ready to run, with one engine request for each of its `sampling_params.n` completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    engine_requests: tuple[EngineRequest, ...]
    given: Any = None  # for the core besides each engine request, see EngineCore.add
    output: Mapping[str, Any] = {}  # fields of its RequestOutput that features set
    give: Give | None = None  # gives the core the data that it asks for, see EngineOutput.asks
    collect: Callable[[PreparedRequest], Running] | None = None  # makes its Running; None: RunningRequest


class Running(Protocol):
    """Collects the outputs of a running request, and makes the result that the user gets."""

    request: PreparedRequest
    finished: bool

    def look(self, engine_request_id: str, now: float) -> str | None:
        """Note that a token was appended to an engine request's completion. Return its finish reason, if any.

        `now` is in seconds of time.perf_counter.
        """

    def update(self, output: EngineOutput, now: float) -> str | None:
        """Add a step's output of an engine request. Return its finish reason, if any."""

    def unfinished_ids(self) -> list[str]:
        """Return the ids of engine requests that still run."""

    def snapshot(self) -> Any:
        """Return the request's whole result so far."""

    def delta(self) -> Any:
        """Return the changes of the result since the last call."""
