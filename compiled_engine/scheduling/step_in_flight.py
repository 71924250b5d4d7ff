"""A step from its scheduling until its result is taken in: who has which share of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from compiled_engine.scheduling.request import Request
from compiled_engine.scheduling.step import NewRequest, SchedulerOutput


@dataclass(slots=True)
class Shares:
    """Requests, and what each computes: lists of the same length, as in SchedulerOutput."""

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)

    def __add__(self, other: Shares) -> Shares:
        return Shares(
            self.requests + other.requests,
            self.starts + other.starts,
            self.counts + other.counts,
            self.samples + other.samples,
        )


@dataclass(slots=True)
class StepDraft:
    """A step that is being put together.

    single: shares of one token; several: of more. masked: requests that sample and have a token mask.
    """

    single: Shares = field(default_factory=Shares)
    several: Shares = field(default_factory=Shares)
    new: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    masked: list[Request] = field(default_factory=list)

    def add(self, request: Request, start: int, count: int, samples: bool) -> None:
        shares = self.single if count == 1 else self.several
        shares.requests.append(request)
        shares.starts.append(start)
        shares.counts.append(count)
        shares.samples.append(samples)


@dataclass(slots=True)
class StepInFlight:
    """`output` as the runner has it, and the scheduler's side of it.

    requests: in the order of the step, ended ones too. `sampling`: those of them that sample.
    registered_blocks: those that are in the prefix cache only because this step, or one before it, fills them.
    mask_errors: by request id, why a token mask failed; what the step yields for these is not used.
    """

    output: SchedulerOutput
    requests: list[Request]
    sampling: list[Request]
    registered_blocks: list[int]
    mask_errors: dict[str, str]

    @classmethod
    def of(
        cls,
        number: int,
        draft: StepDraft,
        removed: list[str],
        registered_blocks: list[int],
        token_masks: dict[str, np.ndarray],
        mask_errors: dict[str, str],
    ) -> StepInFlight:
        shares = draft.single + draft.several if draft.several.requests else draft.single
        output = SchedulerOutput(
            step=number,
            removed=tuple(removed),
            new=tuple(draft.new),
            request_ids=[request.request_id for request in shares.requests],
            starts=shares.starts,
            counts=shares.counts,
            samples=shares.samples,
            new_block_ids=draft.new_block_ids,
            token_masks=token_masks,
        )
        sampling = list(compress(shares.requests, shares.samples))
        return cls(output, shares.requests, sampling, registered_blocks, mask_errors)
