"""A step from its scheduling until its result is taken in: who has which share of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress

from compiled_engine.messages import NewRequest, SchedulerOutput
from compiled_engine.scheduling.request import Request


def all_but(indices: Iterable[int], count: int) -> list[bool]:
    """For each of `count` entries whether it is none of those at `indices`."""
    chosen = [True] * count
    for index in indices:
        chosen[index] = False
    return chosen


@dataclass(slots=True)
class Shares:
    """Requests, and what each computes: lists of the same length, as in SchedulerOutput."""

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class StepDraft:
    """A step of a lane that is being put together.

    decodes: requests with a share of `decode_tokens` tokens, which starts at `decode_starts` and samples, but for those
    whose index is in `unsampled`. longer: other shares; those of prompts have `num_prefill_tokens` together, at most
    `max_prefill_tokens` where others run. completed: requests whose share of as many tokens as a decode completes a
    block, which no request of this step may read. bounds: how many tokens may be sampled of those that sample fewer
    than decode_tokens.
    """

    lane: int = 0
    max_prefill_tokens: int | None = None
    decode_tokens: int = 1
    decodes: list[Request] = field(default_factory=list)
    decode_starts: list[int] = field(default_factory=list)
    unsampled: list[int] = field(default_factory=list)
    longer: Shares = field(default_factory=Shares)
    num_prefill_tokens: int = 0
    bounds: dict[Request, int] = field(default_factory=dict)
    completed: list[Request] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def add(self, request: Request, start: int, count: int, samples: bool) -> None:
        if count == self.decode_tokens:
            if not samples:
                self.unsampled.append(len(self.decodes))
            self.decodes.append(request)
            self.decode_starts.append(start)
            return
        longer = self.longer
        longer.requests.append(request)
        longer.starts.append(start)
        longer.counts.append(count)
        longer.samples.append(samples)

    def room_for_prompts(self, budget: int) -> int:
        """How much of `budget` tokens prompts may still have where others run."""
        most = self.max_prefill_tokens
        return budget if most is None else min(budget, most - self.num_prefill_tokens)

    def shares(self) -> Shares:
        """All of them, those of decodes first."""
        count, longer = len(self.decodes), self.longer
        samples = all_but(self.unsampled, count)
        return Shares(
            self.decodes + longer.requests,
            self.decode_starts + longer.starts,
            [self.decode_tokens] * count + longer.counts,
            samples + longer.samples,
        )


@dataclass(slots=True)
class StepInFlight:
    """`output` as the runner has it, and the scheduler's side of it.

    requests: in the order of the step, ended ones too. `sampling`, `sampling_ids`: those of them that sample.
    constrained: those that sample and have a constraint.
    registered_blocks: by KV group, those that are in the prefix cache only because this step, or one before it, fills
    them.
    lane: whose step it is. bounds: see StepDraft.
    """

    output: SchedulerOutput
    requests: list[Request]
    sampling: list[Request]
    sampling_ids: list[str]
    constrained: list[Request]
    registered_blocks: list[list[int]]
    lane: int
    bounds: dict[Request, int]

    @classmethod
    def of(
        cls,
        number: int,
        draft: StepDraft,
        removed: tuple[str, ...],
        registered_blocks: list[list[int]],
        *,
        constraints: bool,
    ) -> StepInFlight:
        """constraints: whether any request has one."""
        shares = draft.shares()
        request_ids = [request.request_id for request in shares.requests]
        sampling, sampling_ids = shares.requests, request_ids
        if not all(shares.samples):
            sampling = list(compress(sampling, shares.samples))
            sampling_ids = list(compress(sampling_ids, shares.samples))
        constrained = [request for request in sampling if request.constraint is not None] if constraints else []
        output = SchedulerOutput(
            step=number,
            removed=removed,
            new=tuple(draft.new),
            request_ids=request_ids,
            starts=shares.starts,
            counts=shares.counts,
            samples=shares.samples,
            new_block_ids=draft.new_block_ids,
            awaits_masks=bool(constrained),
        )
        requests, lane, bounds = shares.requests, draft.lane, draft.bounds
        return cls(output, requests, sampling, sampling_ids, constrained, registered_blocks, lane, bounds)


class StepsInFlight(deque[StepInFlight]):
    """The oldest first, at most `most` of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def require_room(self) -> None:
        """Raise RuntimeError if there are as many as may be."""
        if len(self) == self._most:
            raise RuntimeError(f"step {self[0].output.step} is in flight: its result must be passed to update() first")

    def find(self, step: SchedulerOutput) -> StepInFlight:
        """RuntimeError if `step` is not in flight."""
        for found in self:
            if found.output is step:
                return found
        raise RuntimeError(f"step {step.step} is not in flight")

    def oldest(self, step: SchedulerOutput) -> StepInFlight:
        """The oldest one; RuntimeError if that is not `step`."""
        if not self or self[0].output is not step:
            raise RuntimeError(f"step {step.step} is not the oldest one in flight")
        return self[0]
