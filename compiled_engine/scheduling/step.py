"""What passes between the scheduler and the runner: plain data, one pair of messages a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

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
    """One request's share of a step: see SchedulerOutput, whose lists have the same in columns."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    new_block_ids: tuple[int, ...]
    samples: bool


@dataclass(frozen=True)
class SchedulerOutput:
    """One step of R requests in lists of R entries: those with a single token first (decodes), then the others.

    removed: requests whose rows the runner frees before anything else: finished, aborted or preempted.
    starts, counts: request i computes `counts[i]` tokens from position `starts[i]` on. The last one may be the
        token that the step before samples, whose id the scheduler does not know yet.
    samples: whether the step reaches a request's last token, so that a next one is sampled.
    new_block_ids: of requests that got blocks since the runner last heard of them (never a NewRequest).
    token_masks: of requests that sample and have a token_mask: what it allows (see sampling/token_mask.py).
    """

    step: int
    removed: tuple[str, ...]
    new: tuple[NewRequest, ...]
    request_ids: list[str]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    new_block_ids: dict[str, tuple[int, ...]]
    token_masks: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @cached_property
    def scheduled(self) -> tuple[ScheduledRequest, ...]:
        """The lists turned by request."""
        blocks = [self.new_block_ids.get(request_id, ()) for request_id in self.request_ids]
        columns = zip(self.request_ids, self.starts, self.counts, blocks, self.samples, strict=True)
        return tuple(ScheduledRequest(*share) for share in columns)


@dataclass(frozen=True)
class RunnerOutput:
    """What a step produced.

    token_ids: one for each request that samples, in the order of the step; or why there is none (see
        sampling/no_token.py).
    logprobs: by request id, of requests that sample and want them.
    prompt_logprobs: by request id, (position of the first entry, entries): the entry for position p is the
        log-probability of prompt token p given those before it, so positions start at 1.
    """

    token_ids: Sequence[int] = ()
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
