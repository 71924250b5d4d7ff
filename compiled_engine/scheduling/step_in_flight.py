"""A step from its scheduling until its result is taken in: who has which share of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress

from compiled_engine.messages import NewRequest, SchedulerOutput
from compiled_engine.scheduling.request import Request


@dataclass(slots=True)
class Shares:
    """Requests, and what each computes: lists of the same length, as in SchedulerOutput."""

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class StepDraft:
    """A step that is being put together.

    singles: requests with a share of one token, which starts at `single_starts` and samples, but for those whose index
    is in `held`. several: shares of more tokens. masked: requests that sample and have a token mask.
    """

    singles: list[Request] = field(default_factory=list)
    single_starts: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    several: Shares = field(default_factory=Shares)
    new: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    masked: list[Request] = field(default_factory=list)

    def add(self, request: Request, start: int, count: int, samples: bool) -> None:
        if count == 1:
            if not samples:
                self.held.append(len(self.singles))
            self.singles.append(request)
            self.single_starts.append(start)
            return
        several = self.several
        several.requests.append(request)
        several.starts.append(start)
        several.counts.append(count)
        several.samples.append(samples)

    def shares(self) -> Shares:
        """All of them, those of one token first."""
        count, several = len(self.singles), self.several
        samples = [True] * count
        for index in self.held:
            samples[index] = False
        return Shares(
            self.singles + several.requests,
            self.single_starts + several.starts,
            [1] * count + several.counts,
            samples + several.samples,
        )


@dataclass(slots=True)
class StepInFlight:
    """`output` as the runner has it, and the scheduler's side of it.

    requests: in the order of the step, ended ones too. `sampling`, `sampling_ids`: those of them that sample.
    registered_blocks: those that are in the prefix cache only because this step, or one before it, fills them.
    mask_errors: by request id, why a token mask failed; what the step yields for these is not used.
    """

    output: SchedulerOutput
    requests: list[Request]
    sampling: list[Request]
    sampling_ids: list[str]
    registered_blocks: list[int]
    mask_errors: dict[str, str]

    @classmethod
    def of(
        cls,
        number: int,
        draft: StepDraft,
        removed: list[str],
        registered_blocks: list[int],
        token_masks: dict[str, bytes],
        mask_errors: dict[str, str],
    ) -> StepInFlight:
        shares = draft.shares()
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
        sampling, sampling_ids = shares.requests, output.request_ids
        if not all(shares.samples):
            sampling = list(compress(sampling, shares.samples))
            sampling_ids = list(compress(sampling_ids, shares.samples))
        return cls(output, shares.requests, sampling, sampling_ids, registered_blocks, mask_errors)
