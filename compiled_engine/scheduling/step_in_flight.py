"""A step from its scheduling until its result is taken in: who has which share of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress

from compiled_engine.messages import NewRequest, SchedulerOutput
from compiled_engine.sampling.token_mask import ask
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
    """A step that is being put together.

    one_token: requests with a share of one token, which starts at `one_token_starts` and samples, but for those whose
    index is in `unsampled`. longer: shares of more tokens. masked: requests that sample and have a token mask.
    """

    one_token: list[Request] = field(default_factory=list)
    one_token_starts: list[int] = field(default_factory=list)
    unsampled: list[int] = field(default_factory=list)
    longer: Shares = field(default_factory=Shares)
    new: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    masked: list[Request] = field(default_factory=list)

    def add(self, request: Request, start: int, count: int, samples: bool) -> None:
        if count == 1:
            if not samples:
                self.unsampled.append(len(self.one_token))
            self.one_token.append(request)
            self.one_token_starts.append(start)
            return
        longer = self.longer
        longer.requests.append(request)
        longer.starts.append(start)
        longer.counts.append(count)
        longer.samples.append(samples)

    def shares(self) -> Shares:
        """All of them, those of one token first."""
        count, longer = len(self.one_token), self.longer
        samples = all_but(self.unsampled, count)
        return Shares(
            self.one_token + longer.requests,
            self.one_token_starts + longer.starts,
            [1] * count + longer.counts,
            samples + longer.samples,
        )

    def ask_for_masks(self, vocab_size: int) -> tuple[dict[str, bytes], dict[str, str]]:
        """By request id the masks of requests that are about to sample, and of those that failed what went wrong."""
        masks: dict[str, bytes] = {}
        errors: dict[str, str] = {}
        for request in self.masked:
            assert request.token_mask is not None
            output_token_ids = request.token_ids[request.num_prompt_tokens :]
            try:
                masks[request.request_id] = ask(request.token_mask, output_token_ids, vocab_size).tobytes()
            except ValueError as error:
                errors[request.request_id] = str(error)
        return masks, errors


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
