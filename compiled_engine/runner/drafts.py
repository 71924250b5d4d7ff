"""Drafts: guesses of a request's next tokens, which one step verifies together.

A step computes a request's newest token and the drafts behind it, and samples a token behind each of them. The noise of
sampling is a function of seed, position and token id, so the token that comes next does not depend on the step that
computes it: a draft is right exactly if it is that token. A step yields the drafts up to the first wrong one, and the
token sampled in its place. So drafts change no token, greedy or sampled, whatever they are.

In a batch each of these tokens has a row of its own, with the request's blocks and with a context that ends at the
token. K and V of the whole batch are written before any row attends. So attention and sampling serve drafts as they
serve decodes. A wrong draft leaves K and V behind the newest token, where the next step writes before anything reads.

On a CPU steps end when they are launched: the host knows the drafts when it makes the batch, and a draft that there is
not has no row. On a GPU the host knows the most that there may be, and a row whose draft does not exist is one of
padding. If no request of a step computes a prompt, each has as many rows as any other, one behind the other, so that
attention reads the keys of a request once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from compiled_engine.graphs.cuda_graphs.key import GraphKey, GraphKind
from compiled_engine.kernels.launch_arguments import dependent_launch, next_power_of_2
from compiled_engine.messages import RunnerOutput, SchedulerOutput
from compiled_engine.runner.input_batch import (
    LAST_NUMBER,
    NO_DRAFT,
    NOT_TAKEN,
    RING,
    InputBatch,
    InputBuffers,
    host_of,
)
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.sampling.gumbel import splitmix64
from compiled_engine.sampling.logprobs import BatchLogprobs
from compiled_engine.sampling.sampled_tokens import VERIFIED_DRAFTS, LogprobRows

# The index of a hash that is no token's.
NO_TOKEN = 1 << 62


@dataclass(frozen=True)
class StepRows:
    """The rows of a step with drafts. Suffix A: rows.

    request_A: int, the index of a row's request in the step; those of a request follow one another in the order of its
    tokens, rows of one token come first. number_A: see InputBuffers.draft_numbers_R. lens_A: tokens. exists_A: False
    for padding. query_len: rows of each request if all have as many, of a token each; else None. lasting: whether later
    steps with the same StepShares have these rows.
    """

    request_A: np.ndarray
    number_A: np.ndarray
    lens_A: np.ndarray
    exists_A: np.ndarray
    query_len: int | None
    lasting: bool

    @property
    def num_tokens(self) -> int:
        return int(self.lens_A.sum())

    @classmethod
    def of(cls, step: SchedulerOutput, states: RequestStates, *, known: bool, query_lens: Sequence[int]) -> StepRows:
        """known: whether the host knows the drafts. Otherwise a request has a row for each that it may have.
        query_lens: the numbers of rows that each may have in a step of decodes then, ascending."""
        assert states.drafts_SK is not None
        rows_R, counts_R = states.rows(step.request_ids), np.array(step.counts, np.int32)
        step_starts_R = np.array(step.starts, np.int32)
        behind_R = step_starts_R - states.prefill_len[rows_R]  # a row has drafts once it has sampled
        num_drafts_R = np.where(behind_R >= 0, counts_R - 1, 0)
        if known:
            num_drafts_R = np.minimum(num_drafts_R, (states.drafts_SK.numpy()[rows_R] >= 0).sum(1))
        single_R = (behind_R >= -1) | (counts_R == 1)
        num_rows_R = num_drafts_R + 1
        of_each, order_R = None, np.argsort(~single_R, kind="stable")
        if not known and single_R.all():
            most = int(num_rows_R.max())
            of_each = next(number for number in query_lens if number >= most)
            num_rows_R = np.full_like(num_rows_R, of_each)
            order_R = np.argsort(-step_starts_R, kind="stable")  # see make_batch
        num_rows_R = num_rows_R[order_R]
        request_A = np.repeat(order_R, num_rows_R)
        number_A = np.arange(len(request_A)) - np.repeat(np.cumsum(num_rows_R) - num_rows_R, num_rows_R)
        lens_A = np.where(single_R, 1, counts_R)[request_A]
        lasting = of_each is not None and bool((behind_R >= 0).all())
        return cls(request_A, number_A, lens_A, number_A <= num_drafts_R[request_A], of_each, lasting)


class DraftedSteps:
    """Makes the batches of steps with drafts.

    While the same requests decode, a step has the rows of the one before: these are made and staged once, in the order
    of the contexts at that time.
    """

    def __init__(self, states: RequestStates, buffers: InputBuffers, query_lens: Sequence[int], *, known: bool) -> None:
        """query_lens, known: see StepRows.of."""
        self._states, self._buffers, self._query_lens, self._known = states, buffers, query_lens, known
        self._shares: StepShares | None = None
        self._rows: StepRows | None = None
        self._batch: InputBatch | None = None  # of these rows, the newest one
        self._staged = buffers.drafted

    def rows(self, step: SchedulerOutput) -> StepRows:
        """Return the rows of a step. The requests have theirs in the states."""
        shares = StepShares.of(step, self._states)
        if self._rows is None or shares != self._shares:
            self._rows = StepRows.of(step, self._states, known=self._known, query_lens=self._query_lens)
            self._shares, self._batch = shares if self._rows.lasting else None, None
        return self._rows

    def make_batch(self, step: SchedulerOutput, rows: StepRows, key: GraphKey | None) -> InputBatch:
        """Make the batch of these rows, padded to `key`, and stage it, as make_batch does."""
        batch = self._batch
        if batch is None or batch.key != key or rows is not self._rows:
            self._batch = batch = make_drafted_batch(step, self._states, self._buffers, rows, key)
            self._staged = self._buffers.drafted
            return batch
        if self._buffers.drafted is not self._staged:
            assert self._staged is not None
            self._buffers.stage_batch(*self._staged)
            self._staged = self._buffers.drafted
        starts_A = np.array(step.starts, np.int32)[rows.request_A] + rows.number_A
        host = host_of(key, *batch.host[:2], int((starts_A + rows.lens_A).max()))
        return replace(batch, step_starts=starts_A.tolist(), host=host)


@dataclass(frozen=True)
class DraftedRows:
    """Implements RowsOfRequests: a request has a row for its newest token and one for each draft behind it.

    places: int [rows], the rows of the batch in the order of the step's requests. starts: int [requests], where each
    request begins among these; samples: bool [requests]. All in the step's order.
    """

    places: np.ndarray
    starts: np.ndarray
    samples: np.ndarray

    def result(
        self,
        request_ids: Sequence[str],
        tokens_R: np.ndarray,
        logprobs: BatchLogprobs | None,
        extras: dict[str, dict[str, Any]],
    ) -> RunnerOutput:
        """See RowsOfRequests. tokens_R: NOT_TAKEN where there is none, as behind a draft that was wrong, or
        NO_DRAFT."""
        tokens_R = tokens_R[self.places]
        taken_R = (tokens_R != NOT_TAKEN) & (tokens_R != NO_DRAFT)
        num_real = np.add.reduceat(tokens_R != NO_DRAFT, self.starts, dtype=np.int64)[self.samples]
        counts = np.add.reduceat(taken_R, self.starts, dtype=np.int64)[self.samples]
        few, many = None, dict[str, list[np.ndarray]]()
        if logprobs is not None:
            places = self.places[taken_R]
            if logprobs.few_SW is not None:
                few = LogprobRows.of_array(logprobs.few_SW.numpy()[places])
            for place in filter(logprobs.many.__contains__, places.tolist()):
                many.setdefault(request_ids[place], []).append(logprobs.many[place].numpy())
        drafts = zip((num_real - 1).tolist(), np.maximum(counts - 1, 0).tolist(), strict=True)
        return RunnerOutput(
            tokens_R[taken_R].tolist(),
            few,
            {request_id: LogprobRows.of_array(np.concatenate(rows)) for request_id, rows in many.items()},
            lengths=counts.tolist(),
            columns={VERIFIED_DRAFTS: list(drafts)},
            extras=extras,
        )


@dataclass(frozen=True)
class StepShares:
    """The tokens that each request of a step computes, except where they start. generation: of the states' rows."""

    request_ids: list[str]
    counts: list[int]
    samples: list[bool]
    generation: int

    @classmethod
    def of(cls, step: SchedulerOutput, states: RequestStates) -> StepShares:
        """The step's. Its requests have their rows."""
        return cls(step.request_ids, step.counts, step.samples, states.generation)


def make_drafted_batch(
    step: SchedulerOutput, states: RequestStates, buffers: InputBuffers, rows: StepRows, key: GraphKey | None = None
) -> InputBatch:
    """Make the batch of a step, padded to `key`, and stage it, as make_batch does."""
    request_A, number_A = rows.request_A, rows.number_A
    places = np.argsort(request_A, kind="stable")
    starts = np.flatnonzero(number_A[places] == 0)
    samples_R = np.array(step.samples)
    request_ids = [step.request_ids[request] for request in request_A.tolist()]
    rows_A = np.where(rows.exists_A, states.rows(step.request_ids)[request_A], -1)
    return stage_numbered(
        buffers,
        request_ids,
        rows_A,
        number_A,
        rows.lens_A,
        np.array(step.starts, np.int32)[request_A],
        samples_R[request_A] & rows.exists_A,
        DraftedRows(places, starts, samples_R),
        key,
        rows.query_len,
    )


def stage_numbered(
    buffers: InputBuffers,
    request_ids: list[str],
    rows_A: np.ndarray,
    number_A: np.ndarray,
    lens_A: np.ndarray,
    starts_A: np.ndarray,
    samples_A: np.ndarray,
    rows_of_requests: DraftedRows | None = None,
    key: GraphKey | None = None,
    query_len: int | None = None,
) -> InputBatch:
    """Make a batch and stage it: rows that begin `number_A` tokens behind the newest ones of their requests.

    Rows of one token come first. lens_A: tokens of each row. starts_A: at least the position of the newest token. key,
    query_len: see make_batch and StepRows.
    """
    query_starts = np.concatenate(([0], np.cumsum(lens_A))).astype(np.int32)
    rows_A, number_A = rows_A.astype(np.int32), number_A.astype(np.int32)
    count, num_tokens, ends_A = len(rows_A), int(query_starts[-1]), starts_A + number_A + lens_A
    num_single = count if num_tokens == count else int(np.argmax(lens_A > 1))
    num_rows, padded_tokens = count, num_tokens if key is None else key.num_tokens
    # The longest of rows with a token each is one; more is how many of them share a request.
    host = host_of(key, num_single, int(lens_A.max()) if query_len is None else query_len, int(ends_A.max()))
    if key is not None and key.kind is GraphKind.FULL:
        num_rows = key.num_requests
    padding = num_rows - count
    buffers.stage_batch(
        np.concatenate((rows_A, np.full(padding, -1, np.int32))),
        np.concatenate((query_starts, np.full(padding, padded_tokens, np.int32))),
        np.concatenate((number_A, np.zeros(padding, np.int32))),
    )
    return InputBatch(
        request_ids=request_ids,
        rows=rows_A,
        query_starts=query_starts,
        step_starts=(starts_A + number_A).tolist(),
        samples=samples_A,
        num_tokens=num_tokens,
        key=key,
        decodes_only=num_single == count and (key is None or key.is_decode),
        num_rows=num_rows,
        padded_tokens=padded_tokens,
        host=host,
        rows_of_requests=rows_of_requests,
    )


class Acceptance:
    """The rule that accepts drafts: by comparison, or at random at these rates, see SpeculationConfig."""

    def __init__(self, rates: tuple[float, ...], device: torch.device):
        self.rates = rates
        self.thresholds_K: torch.Tensor | None = None
        if rates:
            most = (1 << 63) - 1
            thresholds = [min(int(rate * 2.0**63), most) for rate in rates]
            self.thresholds_K = torch.tensor(thresholds, dtype=torch.int64, device=device)


def verify(
    states: RequestStates,
    buffers: InputBuffers,
    token_ids_R: torch.Tensor,
    num_rows: int,
    acceptance: Acceptance,
) -> None:
    """Store a step's tokens as `advance` does: of each request those up to the first draft that is wrong.

    token_ids_R: int64. The ring has NOT_TAKEN for rows without a token, and NO_DRAFT for rows without a draft. May be
    called again with other tokens, which replace the first ones.
    """
    if buffers.rows_R.device.type == "cpu":
        verify_reference(states, buffers, token_ids_R, num_rows, acceptance)
    else:
        launch_verify(states, buffers, token_ids_R, num_rows, acceptance)


def launch_verify(
    states: RequestStates, buffers: InputBuffers, token_ids_R: torch.Tensor, num_rows: int, acceptance: Acceptance
) -> None:
    """Launch the kernel of verify."""
    from compiled_engine.runner.draft_kernels import verify_kernel  # Triton is not installed everywhere

    assert states.drafts_SK is not None
    assert states.history_SL is not None
    verify_kernel[(1,)](
        buffers.rows_R,
        buffers.draft_numbers_R,
        buffers.sample_positions_R,
        token_ids_R,
        states.drafts_SK,
        states.fields["seed"] if acceptance.rates else None,
        acceptance.thresholds_K,
        states.num_computed_S,
        states.prefill_len_S,
        states.last_token_S,
        states.history_SL,
        buffers.num_steps_1,
        buffers.taken_R,
        buffers.tokens_KR1,
        num_rows,
        states.history_SL.stride(0),
        buffers.tokens_KR1.stride(0),
        NUM_DRAFTS=states.drafts_SK.shape[1],
        RING=RING,
        LAST_NUMBER=LAST_NUMBER,
        NO_DRAFT=NO_DRAFT,
        NO_TOKEN=NO_TOKEN,
        TILE_R=next_power_of_2(buffers.rows_R.shape[0]),
        num_warps=4,
        **dependent_launch(buffers.rows_R.device),
    )


def verify_reference(
    states: RequestStates, buffers: InputBuffers, token_ids_R: torch.Tensor, num_rows: int, acceptance: Acceptance
) -> None:
    """Do what the kernel does, for tensors on the CPU."""
    assert states.drafts_SK is not None
    assert buffers.draft_numbers_R is not None
    rows_R, numbers_R = buffers.rows_R.numpy()[:num_rows], buffers.draft_numbers_R.numpy()[:num_rows]
    ends_R, tokens_R = buffers.sample_positions_R.numpy()[:num_rows], np.zeros(num_rows, np.int32)
    tokens_R[: len(token_ids_R)] = token_ids_R.numpy()[:num_rows]  # rows of padding may have none
    computed_S = states.num_computed_S.numpy()
    token_row_S, all_token_ids_KL = states.token_row_S.numpy(), states.all_token_ids_KL.numpy()
    if states.history_SL is not None:
        token_row_S, all_token_ids_KL = np.arange(len(computed_S)), states.history_SL.numpy()
    real_R = (rows_R >= 0) & (ends_R > 0)
    taken_R = real_R & (ends_R >= states.prefill_len_S.numpy()[rows_R])
    first_R = real_R & (numbers_R == 0)
    computed_S[rows_R[first_R]] = ends_R[first_R]
    drafted = np.flatnonzero(real_R & (numbers_R > 0))
    drafts = states.drafts_SK.numpy()[rows_R[drafted], numbers_R[drafted] - 1]
    right_R = real_R.copy()
    if acceptance.rates:
        seeds, begins = states.fields["seed"].numpy()[rows_R[drafted]], (ends_R - numbers_R)[drafted]
        right_R[drafted] = numbers_R[drafted] <= accepted_at_random(seeds, begins, acceptance.rates)
        accepted = right_R[drafted]
        tokens_R[drafted[accepted] - 1] = drafts[accepted]
    else:  # the row before has the token that the draft is a guess of
        right_R[drafted] = drafts == tokens_R[drafted - 1]
    for number in range(int(numbers_R[real_R].max(initial=0)) + 1):
        at = np.flatnonzero(taken_R & (numbers_R == number))
        if number:
            right = taken_R[at - 1] & right_R[at]
            taken_R[at[~right]] = False
            at = at[right]
        rows = rows_R[at]
        # An error code ends its request, but a step with it may be under way.
        new = np.maximum(tokens_R[at], 0)
        computed_S[rows] = ends_R[at]
        states.last_token_S.numpy()[rows] = new
        all_token_ids_KL[token_row_S[rows], ends_R[at]] = new
    buffers.num_steps_1[0] = step = (int(buffers.num_steps_1[0]) + 1) & LAST_NUMBER
    ring_row = buffers.tokens_KR1.numpy()[step % RING]
    ring_row[0] = step
    ring_row[1 : num_rows + 1] = np.where(taken_R, tokens_R, np.where(real_R, NOT_TAKEN, NO_DRAFT))
    buffers.taken_R.numpy()[:num_rows] = np.where(taken_R, np.maximum(tokens_R, 0), 0)


def accepted_at_random(seeds_R: np.ndarray, positions_R: np.ndarray, rates: tuple[float, ...]) -> np.ndarray:
    """Draw how many drafts are accepted, int [R], from the rates of SpeculationConfig.acceptance_rates.

    A draw is a function of the request's seed and the position of its first draft, and independent of the noise of
    sampling: no token has its id.
    """
    keys_R = splitmix64(seeds_R.view(np.uint64), positions_R.astype(np.uint64))
    uniform_R = splitmix64(keys_R, np.array([NO_TOKEN], np.uint64)).astype(np.float64) * 2.0**-64
    return (uniform_R[:, None] < np.array(rates)).sum(1)


@dataclass(frozen=True)
class HeadInputs:
    """The input of a pass of a head from the previous draft, int64 [rows]: its token, and the position of the next
    one."""

    token_ids_T: torch.Tensor
    positions_R: torch.Tensor


def keep_drafts(
    states: RequestStates,
    buffers: InputBuffers,
    room_R: torch.Tensor,
    token_ids_R: torch.Tensor,
    draft: int,
    head: HeadInputs | None = None,
) -> None:
    """Store the tokens that a pass of a draft model sampled, int64 [R], as draft `draft` of the first R rows of the
    batch in `buffers`; where a row has room for no more drafts than that (room_R, int32) there is no such draft.

    The rows' numbers are then those of these drafts, for the next pass; of a head, whose entry of a position comes of
    the token behind, those before, and `head` has its inputs. May be captured.
    """
    assert states.drafts_SK is not None
    assert buffers.draft_numbers_R is not None
    if buffers.rows_R.device.type != "cpu":
        launch_keep_drafts(states, buffers, room_R, token_ids_R, draft, head)
        return
    count = len(token_ids_R)
    rows_R, kept_R = buffers.rows_R.numpy()[:count], token_ids_R.clamp(min=0).numpy()
    real_R = rows_R >= 0
    kept_R = np.where(draft < room_R.numpy()[:count], kept_R, -1)
    states.drafts_SK.numpy()[rows_R[real_R], draft] = kept_R[real_R]
    buffers.draft_numbers_R[:count] = draft + (head is None)
    if head is not None:
        head.token_ids_T[:count] = token_ids_R.clamp(min=0)
        head.positions_R[:count] += 1


def launch_keep_drafts(
    states: RequestStates,
    buffers: InputBuffers,
    room_R: torch.Tensor,
    token_ids_R: torch.Tensor,
    draft: int,
    head: HeadInputs | None = None,
) -> None:
    """Launch the kernel of keep_drafts."""
    from compiled_engine.runner.draft_kernels import KEPT, keep_drafts_kernel  # Triton is not installed everywhere

    assert states.drafts_SK is not None
    count = len(token_ids_R)
    keep_drafts_kernel[(-(-count // KEPT),)](
        buffers.rows_R,
        room_R,
        token_ids_R,
        states.drafts_SK,
        buffers.draft_numbers_R,
        None if head is None else head.token_ids_T,
        None if head is None else head.positions_R,
        count,
        draft,
        NUM_DRAFTS=states.drafts_SK.shape[1],
        TILE=KEPT,
        num_warps=1,
        **dependent_launch(buffers.rows_R.device),
    )
