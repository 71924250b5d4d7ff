"""What goes into and comes out of the engine core: plain, serialisable data; no API object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compiled_engine.sampling.params import SamplingParams
from compiled_engine.scheduling.step import TokenLogprobs


@dataclass(frozen=True)
class EngineRequest:
    """A tokenised request. `priority`: lower is served first when the scheduler's policy is priority.

    `eos_token_ids` end generation unless sampling_params.ignore_eos.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0


class EngineOutput(NamedTuple):
    """What one step added to a request.

    `finish_reason` is None while it runs, then "stop", "length", "abort" or "error"; `stop_reason` is the stop token id
    that ended it, None for an end-of-sequence token, or what the error is. `prompt_logprobs`: (first position,
    entries), see RunnerOutput. `num_cached_tokens` counts prompt tokens that came from the prefix cache; it comes with
    the first token or before, and None says nothing new. So does `scheduled_time`: when it was first scheduled, in
    seconds of time.perf_counter.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[int, tuple[TokenLogprobs, ...]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    scheduled_time: float | None = None


@dataclass(frozen=True)
class StepOutputs:
    """What one step added to requests; iterates over an EngineOutput for each.

    In columns are those that got their next token and nothing else, which nearly all do: `request_ids`, `token_ids`.
    """

    request_ids: Sequence[str] = ()
    token_ids: Sequence[int] = ()
    others: Sequence[EngineOutput] = ()

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.others)

    def __iter__(self) -> Iterator[EngineOutput]:
        for request_id, token_id in zip(self.request_ids, self.token_ids, strict=True):
            yield EngineOutput(request_id, (token_id,))
        yield from self.others
