"""What passes between the scheduler and the runner: plain data, one pair of messages a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from compiled_engine.sampling.params import SamplingParams


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the top k, most likely first.

    `rank` is the chosen token's rank in the vocabulary, 1 for the most likely.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


@dataclass(frozen=True)
class NewRequest:
    """A request that takes a row of the runner: all that the runner will ever need to know of it.

    A preempted request comes back as a new one, its generated tokens included in `token_ids`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int]
    block_ids: tuple[int, ...]


class ScheduledRequest(NamedTuple):
    """One request's share of a step: compute `num_tokens` tokens from position `num_computed_tokens` on.

    `new_block_ids` are blocks that it got since the runner last heard of it (for a NewRequest: none).
    `samples` is true when the step reaches the last known token, so that a next one is sampled.
    """

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    new_block_ids: tuple[int, ...]
    samples: bool


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. `scheduled` lists requests with a single token first (decodes), then the others.

    `removed` are requests whose rows the runner frees before anything else: finished, aborted or preempted.
    """

    step: int
    removed: tuple[str, ...]
    new: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.scheduled)


@dataclass(frozen=True)
class RunnerOutput:
    """What a step produced, by request id; a request whose step did not sample is absent from the first two.

    `prompt_logprobs` holds (position of the first entry, entries): the entry for position p is the
    log-probability of prompt token p given those before it, so positions start at 1.
    """

    token_ids: dict[str, int]
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
