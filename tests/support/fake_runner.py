"""A runner without a model: it follows the scheduler's messages to the letter and knows what every slot holds.

The fake model's next token is a function of the hash of all tokens before it, and the KV cache holds that hash
for each position, so a block that is shared wrongly, overwritten or stale cannot go unnoticed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from lagging_copies import LaggingCopies

from compiled_engine.engine.messages import LateInputs, RunnerOutput, SchedulerOutput
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.structured.extras import NAME, masks_in
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs
from compiled_engine.sampling.token_mask import TokenMask, ask, num_words

VOCAB_SIZE = 11
GARBAGE = -1


def prefix_hashes(token_ids: Sequence[int], seed: int = 0) -> Iterator[int]:
    """Yield for each position a hash of the tokens up to this position, itself included."""
    value = seed
    for token_id in token_ids:
        value = hash((value, token_id))
        yield value


class Share(NamedTuple):
    """The tokens of one request that a step computes."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    new_block_ids: tuple[int, ...]
    samples: bool


def next_step(scheduler: Scheduler) -> SchedulerOutput:
    """Return the scheduler's next step, which it must have."""
    step = scheduler.schedule()
    assert step is not None
    return step


def shares_of(step: SchedulerOutput) -> list[Share]:
    """Return a step's columns as one Share per request."""
    blocks = [step.new_block_ids.get(request_id, ((),))[0] for request_id in step.request_ids]
    return [Share(*row) for row in zip(step.request_ids, step.starts, step.counts, blocks, step.samples, strict=True)]


def next_token(prefix_hash: int, token_mask: TokenMask | None, output_ids: Sequence[int]) -> int:
    """Return the fake model's next token, one that the request's mask allows; any token if the mask fails."""
    token_ids = range(VOCAB_SIZE)
    mask = mask_of(token_mask, output_ids)
    if mask is not None:
        token_ids = [i for i in token_ids if mask[i // 32] >> i % 32 & 1]
    return token_ids[hash((prefix_hash, VOCAB_SIZE)) % len(token_ids)]


def mask_of(token_mask: TokenMask | None, output_ids: Sequence[int]) -> np.ndarray | None:
    """Return the mask for the next token; None if the request has no mask, or if the mask fails."""
    with suppress(ValueError):
        return None if token_mask is None else ask(token_mask, output_ids, VOCAB_SIZE)
    return None


def logprobs_of(prefix_hash: int, token_id: int) -> TokenLogprobs:
    """Return the fake model's log-probability, a float32, of a token after a prefix."""
    return TokenLogprobs((token_id,), (-(hash((prefix_hash, token_id)) % 1000) / 64,), 1)


@dataclass
class Row:
    """The runner's state of a request."""

    token_ids: list[int]
    hashes: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: list[int]
    masked: bool
    num_computed_tokens: int
    is_limited_to_single_tokens: bool = False
    num_known: int = 0  # before its last step sampled
    longest: int = sys.maxsize  # most tokens that it may compute

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.hashes.append(hash((self.hashes[-1], token_id)))


class FakeRunner:
    """Executes a scheduler's steps without a model, and asserts that a real runner could, within the limits given.

    Wrong guesses leave garbage in their slots. A request in a step at which a draft head has rested has no guesses
    later.

    serves_all: each step has a share for every request that has a row. token_masks: by id of the requests that have
    one; the caller that adds such a request fills it in. max_new_tokens_per_step: if more than 1, `yields` returns how
    many tokens a request gets, at most its argument. num_snapshots: if not 0, a request also has a recurrent state, of
    its prefix or from a snapshot. adapts: a step may have fewer guesses than others. border: the slots of a request
    that is admitted with more tokens hold other values; a request with fewer does not get beyond it. copies: those of
    KV offload.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        serves_all: bool = True,
        max_new_tokens_per_step: int = 1,
        yields: Callable[[int], int] = lambda most: 1,
        num_snapshots: int = 0,
        *,
        adapts: bool = False,
        border: int | None = None,
        copies: LaggingCopies | None = None,
    ) -> None:
        self.border = border
        self.num_snapshots, self.adapts = num_snapshots, adapts
        self.snapshots: dict[int, int | None] = {}
        self.saved: dict[int, dict[int, int | None]] = {}  # by step the snapshots that it took, and what was there
        self.serves_all = serves_all
        self.max_new_tokens_per_step, self.yields = max_new_tokens_per_step, yields
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.token_masks: dict[str, TokenMask] = {}
        self.rows: dict[str, Row] = {}
        self.slots: dict[tuple[int, int], int | None] = {}
        self.last_step = 0
        self.wanted: dict[int, dict[str, bytes]] = {}  # the masks, by step and request
        # By step the slots that it wrote to, and what they held before.
        self.written: dict[int, dict[tuple[int, int], int | None]] = {}
        self.copies = copies
        if copies is not None:
            copies.runner = self
        self.failed = False  # whether steps failed since the last one was received

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        """Execute a step, and return its result as it is with the right masks. `check_masks` checks the masks later."""
        self.receive(step)
        self.wanted[step.step] = {}
        if all(count == self.max_new_tokens_per_step for count in step.counts):
            # A real layer may write and read in one kernel, in any order of the requests.
            for share in shares_of(step):
                row = self.rows[share.request_id]
                self._read(row, row.num_computed_tokens)
        # Else the whole step writes before anything reads.
        tokens_of: dict[str, list[int]] = {}
        token_ids: list[int] = []
        counts: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for share in shares_of(step):
            tokens_of[share.request_id] = []
            if share.samples:
                tokens, entries = self._sample(step, share)
                tokens_of[share.request_id] = tokens
                token_ids += tokens
                counts.append(len(tokens))
                logprobs += entries
        written: dict[tuple[int, int], int | None] = {}
        for share in shares_of(step):
            for slot, content in self._contents(share):
                assert slot not in written, "two requests write to one slot"
                written[slot] = self.slots.get(slot)
                self.slots[slot] = content
        self.written[step.step] = written
        prompt_logprobs = {}
        wanted = False
        for share in shares_of(step):
            row, num_sampled = self.rows[share.request_id], len(tokens_of[share.request_id])
            end = self._end(row, share, num_sampled)
            self._read(row, end)
            row.num_computed_tokens = end
            wanted |= share.samples and row.params.logprobs is not None
            if row.params.prompt_logprobs is not None and share.num_computed_tokens + 1 < row.num_prompt_tokens:
                positions = range(share.num_computed_tokens + 1, min(end + 1, row.num_prompt_tokens))
                prompt_logprobs[share.request_id] = (
                    positions.start,
                    LogprobRows.of(logprobs_of(row.hashes[p - 1], row.token_ids[p]) for p in positions),
                )
        self._save(step)
        extras = {"prompt_logprobs": prompt_logprobs} if prompt_logprobs else {}
        several = None if self.max_new_tokens_per_step == 1 or step.single else counts
        return RunnerOutput(token_ids, LogprobRows.of(logprobs) if wanted else None, {}, several, extras=extras)

    def _save(self, step: SchedulerOutput) -> None:
        """Take snapshots of the states after the step."""
        saved = step.extras.get("recurrence", {})
        slots = saved.values()
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(self.num_snapshots))
        self.saved[step.step] = {slot: self.snapshots.get(slot) for slot in slots}
        for request_id, slot in saved.items():
            row = self.rows[request_id]
            assert request_id in step.request_ids
            self.snapshots[slot] = row.hashes[row.num_computed_tokens - 1]

    def _sample(self, step: SchedulerOutput, share: Share) -> tuple[list[int], list[TokenLogprobs]]:
        """Append the row's next tokens, and return them with their log-probabilities."""
        row = self.rows[share.request_id]
        token_mask = self.token_masks.get(share.request_id)
        mask = mask_of(token_mask, row.token_ids[row.num_prompt_tokens :])
        assert row.masked == (token_mask is not None)
        assert step.samples_late or not row.masked
        if mask is not None:
            self.wanted[step.step][share.request_id] = mask.tobytes()
        row.num_known = len(row.token_ids)
        guesses = row.num_computed_tokens + share.num_tokens - row.num_known
        assert not (guesses and row.masked), "a mask is made for one token"
        assert not (guesses and row.is_limited_to_single_tokens), "a head has not read all of the request's tokens"
        tokens, entries = [], []
        for _ in range(1 if self.max_new_tokens_per_step == 1 or step.single else self.yields(1 + guesses)):
            token_id = next_token(row.hashes[-1], token_mask, row.token_ids[row.num_prompt_tokens :])
            tokens.append(token_id)
            entries.append(logprobs_of(row.hashes[-1], token_id))
            row.append(token_id)
        return tokens, entries

    def _end(self, row: Row, share: Share, num_sampled: int) -> int:
        """Return how many of a request's tokens are computed after the step: all known tokens, and the right guesses.

        If the step samples no token, the last known token will be computed again, as no other can be sampled.
        """
        return row.num_known - 1 + num_sampled if share.samples else row.num_computed_tokens + share.num_tokens

    def check_masks(self, step: SchedulerOutput, late: LateInputs, ended: Container[str]) -> None:
        """Assert that the masks fit the requests' tokens so far. ended: requests that need no mask any more."""
        masks = masks_in(late.extras[NAME])
        words = np.frombuffer(masks.words, np.int32).reshape(len(masks.request_ids), num_words(VOCAB_SIZE))
        sent = {request_id: mask.tobytes() for request_id, mask in zip(masks.request_ids, words, strict=True)}
        wanted = self.wanted.pop(step.step)
        assert sent == {request_id: mask for request_id, mask in wanted.items() if request_id not in ended}

    def receive(self, step: SchedulerOutput) -> None:
        """Process a step's messages without computing anything."""
        assert step.step > self.last_step
        self.last_step = step.step
        for request_id in step.removed:
            # Without a row is who never had one, or lost it already; that is right only after a failure.
            assert self.rows.pop(request_id, None) or self.failed
        self.failed = False
        if self.copies is not None:
            self.copies.before(step)
        for new in step.new:
            assert new.request_id not in self.rows
            self.rows[new.request_id] = Row(
                list(new.token_ids),
                list(prefix_hashes(new.token_ids, self._is_long(new.token_ids))),
                new.num_prompt_tokens,
                new.sampling_params,
                list(*new.block_ids),
                new.samples_late,
                step.starts[step.request_ids.index(new.request_id)],
                longest=self.border if self.border is not None and not self._is_long(new.token_ids) else sys.maxsize,
            )
            start = self.rows[new.request_id].num_computed_tokens
            slot = new.extras.get("recurrence")
            assert (slot is not None) == (self.num_snapshots > 0 and start > 0)
            if slot is not None:
                assert self.snapshots[slot] == self.rows[new.request_id].hashes[start - 1]
        ids = [share.request_id for share in shares_of(step)]
        for request_id in ids:
            self.rows[request_id].is_limited_to_single_tokens |= step.single
        assert len(set(ids)) == len(ids)
        assert set(ids) <= self.rows.keys()
        assert not self.serves_all or set(ids) == self.rows.keys(), "a request that has a row is not served"
        assert len(ids) <= self.max_num_seqs
        assert sum(share.num_tokens for share in shares_of(step)) <= self.budget
        of_decode = 1 if step.single else self.max_new_tokens_per_step
        others = [share.num_tokens != of_decode for share in shares_of(step)]
        assert (self.adapts and not step.single) or others == sorted(others), "decodes come first"
        new_ids = {new.request_id for new in step.new}
        for share in shares_of(step):
            self._check_share(share, is_new=share.request_id in new_ids)

    def fail(self, steps: Iterable[int]) -> None:
        """Undo all writes of these steps, given in order. The next step may then repeat their removals."""
        for step in reversed([*steps]):
            self.slots.update(self.written.pop(step))
            self.snapshots.update(self.saved.pop(step))
        self.failed = True

    def _is_long(self, token_ids: Sequence[int]) -> bool:
        return self.border is not None and len(token_ids) > self.border

    def _check_share(self, share: Share, *, is_new: bool) -> None:
        row = self.rows[share.request_id]
        if is_new:
            assert share.new_block_ids == ()
            assert share.num_computed_tokens % self.block_size == 0
        elif self.max_new_tokens_per_step == 1:
            assert share.num_computed_tokens == row.num_computed_tokens
        else:
            assert share.num_computed_tokens >= row.num_computed_tokens
        row.block_ids += share.new_block_ids
        end = row.num_computed_tokens + share.num_tokens
        assert share.num_tokens >= 1
        assert end <= row.longest
        assert share.samples == (end >= len(row.token_ids))
        most = 1 if is_new or row.num_computed_tokens + 1 < len(row.token_ids) else self.max_new_tokens_per_step
        assert end < len(row.token_ids) + most
        if self.max_new_tokens_per_step == 1:
            assert len(row.block_ids) == -(-len(row.token_ids) // self.block_size)
        assert len(row.block_ids) * self.block_size >= end
        assert len(set(row.block_ids)) == len(row.block_ids)
        assert set(row.block_ids) <= set(range(self.num_blocks))

    def _contents(self, share: Share) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield the slots of the share's tokens, with the contents after the step.

        Right guesses are the sampled tokens except the last.
        """
        row = self.rows[share.request_id]
        num_sampled = len(row.token_ids) - row.num_known if share.samples else 0
        right = self._end(row, share, num_sampled)
        for position in range(row.num_computed_tokens, row.num_computed_tokens + share.num_tokens):
            index, offset = divmod(position, self.block_size)
            slot = row.block_ids[index], offset
            is_known = position < row.num_known or not share.samples
            yield slot, row.hashes[position] if is_known or position < right else GARBAGE

    def _read(self, row: Row, end: int) -> None:
        for position in range(end):
            index, offset = divmod(position, self.block_size)
            assert self.slots.get((row.block_ids[index], offset)) == row.hashes[position], (
                f"position {position} of {row.token_ids} reads what is not its prefix"
            )
