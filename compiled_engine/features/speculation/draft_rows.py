"""Makes batches with drafts: guesses of a request's next tokens, which one step verifies together.

A step computes a request's newest token and the drafts after it, and samples a token after each. Sampling noise is a
function of seed, position and token id, so the next token does not depend on the step that computes it: a draft is
right exactly if it is that token. A step yields the drafts up to the first wrong one, and the token sampled in its
place. Drafts therefore change no token, greedy or sampled.

In a batch, the newest token and each draft have a row with the request's blocks and a context that ends at the token. K
and V of the whole batch are written before any row attends, so attention and sampling treat drafts like decodes. A
wrong draft leaves K and V after the newest token, which the next step overwrites before they are read.

The host only knows how many drafts a request may have. A row whose draft does not exist is treated as padding. Drafts
of n-grams on a CPU are the exception: they are known when the batch is made, so only existing drafts have rows. If no
request of a step computes a prompt, all requests have the same number of rows, and a request's rows are consecutive.
Attention then reads the request's keys once for all its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from compiled_engine.engine.input_batch import (
    CombineRows,
    InputBatch,
    InputBuffers,
    host_of,
)
from compiled_engine.engine.messages import RunnerOutput, SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.features.speculation.extras import VERIFIED_DRAFTS
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey, GraphKind
from compiled_engine.kernels.launch_arguments import dependent_launch
from compiled_engine.sampling.logprobs import BatchLogprobs
from compiled_engine.sampling.sampled_tokens import LogprobRows

# Entries of the ring buffer besides tokens and error codes: a row without a token, and a row that did not exist.
NOT_TAKEN, NO_ROW = -1, -1000


@dataclass(frozen=True)
class StepRows:
    """The rows of a step's batch in an engine with drafts. Dimension A: rows.

    A request has a row for its newest token and one for each draft, or a single row for a chunk of its prompt.
    """

    # Index of the row's request in the step. A request's rows are consecutive, in token order; rows of one token come
    # first.
    request_A: np.ndarray
    offset_A: np.ndarray  # offsets, see input_batch.py
    lens_A: np.ndarray  # number of tokens
    exists_A: np.ndarray  # False for padding
    query_len: int | None  # rows per request if it is uniform and each row has one token; otherwise None
    lasting: bool  # later steps with the same StepShares have these rows

    @property
    def num_tokens(self) -> int:
        return int(self.lens_A.sum())

    @classmethod
    def of(cls, step: SchedulerOutput, states: RequestStates, *, known: bool, query_lens: Sequence[int]) -> StepRows:
        """Return the rows of a step whose requests are in the states.

        `known`: the host knows the drafts; otherwise there is a row for each draft that a request may have, and
        `query_lens` are the allowed numbers of rows per request in a step of decodes, ascending.
        """
        assert states.ahead_SK is not None
        rows_R, counts_R = states.rows(step.request_ids), np.array(step.counts, np.int32)
        step_starts_R = np.array(step.starts, np.int32)
        behind_R = step_starts_R - states.prefill_len[rows_R]  # requests have drafts once they have sampled
        num_drafts_R = np.where(behind_R >= 0, counts_R - 1, 0)
        if known:
            num_drafts_R = np.minimum(num_drafts_R, (states.ahead_SK.numpy()[rows_R] >= 0).sum(1))
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
        offset_A = np.arange(len(request_A)) - np.repeat(np.cumsum(num_rows_R) - num_rows_R, num_rows_R)
        lens_A = np.where(single_R, 1, counts_R)[request_A]
        lasting = of_each is not None and bool((behind_R >= 0).all())
        return cls(request_A, offset_A, lens_A, offset_A <= num_drafts_R[request_A], of_each, lasting)


class DraftedSteps:
    """Makes the batches of steps with drafts.

    While the same requests decode, steps reuse the rows of the first of these steps. The rows are ordered by the
    contexts of that step and staged once.
    """

    def __init__(self, states: RequestStates, buffers: InputBuffers, query_lens: Sequence[int], *, known: bool) -> None:
        """`buffers` receive the batches. See StepRows.of for `query_lens` and `known`."""
        self._states, self._buffers, self._query_lens, self._known = states, buffers, query_lens, known
        self._shares: StepShares | None = None
        self._rows: StepRows | None = None
        self._batch: InputBatch | None = None  # the newest batch of these rows
        self._staged = buffers.staged_offsets

    def rows(self, step: SchedulerOutput) -> StepRows:
        """Return the rows of a step, those of the previous step if possible. The requests must be in the states."""
        shares = StepShares.of(step, self._states)
        if self._rows is None or shares != self._shares:
            self._rows = StepRows.of(step, self._states, known=self._known, query_lens=self._query_lens)
            self._shares, self._batch = shares if self._rows.lasting else None, None
        return self._rows

    def make_batch(self, step: SchedulerOutput, rows: StepRows, key: GraphKey | None) -> InputBatch:
        """Stage the batch of these rows, padded to `key`, and return it. See input_batch.make_batch."""
        batch = self._batch
        if batch is None or batch.key != key or rows is not self._rows:
            self._batch = batch = make_drafted_batch(step, self._states, self._buffers, rows, key)
            self._staged = self._buffers.staged_offsets
            return batch
        if self._buffers.staged_offsets is not self._staged:
            assert self._staged is not None
            self._buffers.stage_batch(*self._staged)
            self._staged = self._buffers.staged_offsets
        starts_A = np.array(step.starts, np.int32)[rows.request_A] + rows.offset_A
        host = host_of(key, *batch.host[:2], int((starts_A + rows.lens_A).max()))
        return replace(batch, step_starts=starts_A.tolist(), host=host)


@dataclass(frozen=True)
class DraftedRows:
    """Combines the results of a batch's rows into results of requests. Implements CombineRows.

    A request has a row for its newest token and one for each draft after it. Requests are in the step's order.
    """

    places: np.ndarray  # int [rows], batch rows in the order of the step's requests
    starts: np.ndarray  # int [requests], where each request begins in `places`
    samples: np.ndarray  # bool [requests]

    def __call__(
        self,
        request_of_row: Sequence[str],
        tokens_R: np.ndarray,
        logprobs: BatchLogprobs | None,
        extras: dict[str, dict[str, Any]],
    ) -> RunnerOutput:
        """Return the results of requests, combined from the results of their rows, see CombineRows.

        tokens_R: each row's token; NOT_TAKEN after a wrong draft, NO_ROW if the row's draft does not exist.
        """
        tokens_R = tokens_R[self.places]
        taken_R = (tokens_R != NOT_TAKEN) & (tokens_R != NO_ROW)
        num_real = np.add.reduceat(tokens_R != NO_ROW, self.starts, dtype=np.int64)[self.samples]
        counts = np.add.reduceat(taken_R, self.starts, dtype=np.int64)[self.samples]
        few, many = None, dict[str, list[np.ndarray]]()
        if logprobs is not None:
            places = self.places[taken_R]
            if logprobs.few_SW is not None:
                few = LogprobRows.of_array(logprobs.few_SW.numpy()[places])
            for place in filter(logprobs.many.__contains__, places.tolist()):
                many.setdefault(request_of_row[place], []).append(logprobs.many[place].numpy())
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
    """The requests of a step and how many tokens each computes. Steps with equal StepShares may use the same rows."""

    request_ids: list[str]
    counts: list[int]
    samples: list[bool]
    generation: int  # RequestStates.generation

    @classmethod
    def of(cls, step: SchedulerOutput, states: RequestStates) -> StepShares:
        """Return the StepShares of a step whose requests are in the states."""
        return cls(step.request_ids, step.counts, step.samples, states.generation)


def make_drafted_batch(
    step: SchedulerOutput, states: RequestStates, buffers: InputBuffers, rows: StepRows, key: GraphKey | None = None
) -> InputBatch:
    """Stage the batch of a step with drafts, padded to `key`, and return it. See input_batch.make_batch."""
    request_A, offset_A = rows.request_A, rows.offset_A
    places = np.argsort(request_A, kind="stable")
    starts = np.flatnonzero(offset_A[places] == 0)
    samples_R = np.array(step.samples)
    request_of_row = [step.request_ids[request] for request in request_A.tolist()]
    rows_A = np.where(rows.exists_A, states.rows(step.request_ids)[request_A], -1)
    return stage_with_offsets(
        buffers,
        request_of_row,
        rows_A,
        offset_A,
        rows.lens_A,
        np.array(step.starts, np.int32)[request_A],
        samples_R[request_A] & rows.exists_A,
        DraftedRows(places, starts, samples_R),
        key,
        rows.query_len,
    )


def stage_with_offsets(
    buffers: InputBuffers,
    request_of_row: list[str],
    rows_A: np.ndarray,
    offset_A: np.ndarray,
    lens_A: np.ndarray,
    starts_A: np.ndarray,
    samples_A: np.ndarray,
    combine: CombineRows | None = None,
    key: GraphKey | None = None,
    query_len: int | None = None,
) -> InputBatch:
    """Stage a batch of A rows, of which a request may have several, in `buffers`, and return it.

    Rows of one token must come first. rows_A: the row in the states of each row's request. offset_A: where a row
    begins, counted from its request's newest token: 0 there, 1 at the first draft, -1 at the token before, see
    input_batch.py. lens_A: the rows' numbers of tokens. starts_A: upper bounds of the position of the newest token of
    each row's request. See make_batch for `key` and StepRows for `query_len`.
    """
    query_starts = np.concatenate(([0], np.cumsum(lens_A))).astype(np.int32)
    rows_A, offset_A = rows_A.astype(np.int32), offset_A.astype(np.int32)
    count, num_tokens, ends_A = len(rows_A), int(query_starts[-1]), starts_A + offset_A + lens_A
    num_single = count if num_tokens == count else int(np.argmax(lens_A > 1))
    num_rows, padded_tokens = count, num_tokens if key is None else key.num_tokens
    # In batches of one-token rows, the longest query is the number of rows per request.
    host = host_of(key, num_single, int(lens_A.max()) if query_len is None else query_len, int(ends_A.max()))
    if key is not None and key.kind is GraphKind.FULL:
        num_rows = key.num_rows
    padding = num_rows - count
    buffers.stage_batch(
        np.concatenate((rows_A, np.full(padding, -1, np.int32))),
        np.concatenate((query_starts, np.full(padding, padded_tokens, np.int32))),
        np.concatenate((offset_A, np.zeros(padding, np.int32))),
    )
    return InputBatch(
        request_of_row=request_of_row,
        rows=rows_A,
        query_starts=query_starts,
        step_starts=(starts_A + offset_A).tolist(),
        samples=samples_A,
        num_tokens=num_tokens,
        key=key,
        decodes_only=num_single == count and (key is None or key.is_decode),
        num_rows=num_rows,
        padded_tokens=padded_tokens,
        host=host,
        combine=combine,
        has_offsets=True,
    )


@dataclass(frozen=True)
class HeadInputs:
    """A draft head's inputs that depend on the previous draft, int64 [rows]."""

    token_ids_T: torch.Tensor  # the previous draft
    positions_R: torch.Tensor  # position of the next draft


def keep_drafts(
    states: RequestStates,
    buffers: InputBuffers,
    room_R: torch.Tensor,
    token_ids_R: torch.Tensor,
    draft: int,
    head: HeadInputs | None = None,
) -> None:
    """Store the tokens of a drafting pass in `states`, as draft number `draft` (from 0) of each request.

    token_ids_R: the tokens, int64 [R], for the requests of the first R rows in `buffers`. room_R: the most drafts of
    each row, int32; a row without room for this draft gets -1. Also sets the rows' offsets for the next drafting pass:
    how far behind the newest token a row begins. The pass's input tokens are these drafts, so the offset is `draft` +
    1, or `draft` for a head, which computes the KV entry of a position from the token after it. head: receives the
    head's next inputs; None for a draft model. May be captured in a CUDA graph.
    """
    assert states.ahead_SK is not None
    assert buffers.offsets_R is not None
    if buffers.rows_R.device.type != "cpu":
        launch_keep_drafts(states, buffers, room_R, token_ids_R, draft, head)
        return
    count = len(token_ids_R)
    rows_R, kept_R = buffers.rows_R.numpy()[:count], token_ids_R.clamp(min=0).numpy()
    real_R = rows_R >= 0
    kept_R = np.where(draft < room_R.numpy()[:count], kept_R, -1)
    states.ahead_SK.numpy()[rows_R[real_R], draft] = kept_R[real_R]
    buffers.offsets_R[:count] = draft + (head is None)
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
    from compiled_engine.features.speculation.draft_kernels import (  # Triton is not installed everywhere
        KEPT,
        keep_drafts_kernel,
    )

    assert states.ahead_SK is not None
    count = len(token_ids_R)
    keep_drafts_kernel[(-(-count // KEPT),)](
        buffers.rows_R,
        room_R,
        token_ids_R,
        states.ahead_SK,
        buffers.offsets_R,
        None if head is None else head.token_ids_T,
        None if head is None else head.positions_R,
        count,
        draft,
        NUM_DRAFTS=states.ahead_SK.shape[1],
        TILE=KEPT,
        num_warps=1,
        **dependent_launch(buffers.rows_R.device),
    )
