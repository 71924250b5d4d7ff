"""Drafts: guesses of a request's next tokens, which one step verifies together.

A step computes a request's newest token and the drafts behind it, and samples a token behind each of them. The noise of
sampling is a function of seed, position and token id, so the token that comes next does not depend on the step that
computes it: a draft is right exactly if it is that token. A step yields the drafts up to the first wrong one, and the
token sampled in its place. So drafts change no token, greedy or sampled, whatever they are.

In a batch each of these tokens has a row of its own, with the request's blocks and with a context that ends at the
token. K and V of the whole batch are written before any row attends, which holds on a CPU. So attention and sampling
serve drafts as they serve decodes. A wrong draft leaves K and V behind the newest token, where the next step writes
before anything reads.

The host knows the drafts when it makes the batch: on a CPU steps end when they are launched.
"""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.config import SpeculationConfig
from compiled_engine.messages import SchedulerOutput
from compiled_engine.runner.input_batch import LAST_NUMBER, RING, DraftedRows, InputBatch, InputBuffers
from compiled_engine.runner.request_states import RequestStates


def ngram_drafts(token_ids: np.ndarray, longest: int, shortest: int, count: int) -> np.ndarray:
    """Return what followed the last tokens where they came before, [count], or [0] if they never did.

    Compared are the last `longest` tokens, or as many as there is a match for, at least `shortest`. The newest match
    counts. It repeats itself where it reaches the end of the tokens.
    """
    last, matched = len(token_ids) - 1, 0
    ends = np.arange(last)  # of the matches so far
    while matched < longest:
        longer = ends[ends >= matched]
        longer = longer[token_ids[longer - matched] == token_ids[last - matched]]
        if len(longer) == 0:
            break
        ends, matched = longer, matched + 1
    if matched < shortest:
        return token_ids[:0]
    start = int(ends[-1]) + 1
    drafts: np.ndarray = token_ids[start + np.arange(count) % (last + 1 - start)]
    return drafts


class NgramProposer:
    """Drafts from the request's own tokens, prompt included (Saxena, "Prompt lookup decoding", 2023)."""

    def __init__(self, config: SpeculationConfig, states: RequestStates) -> None:
        self._config, self._states = config, states

    def propose(self, rows: np.ndarray) -> None:
        """Replace the drafts of rows, each of which has a new token."""
        config, states = self._config, self._states
        assert states.drafts_SK is not None
        drafts_SK, num_computed_S = states.drafts_SK.numpy(), states.num_computed_S.numpy()
        drafts_SK[rows] = -1
        for row in rows.tolist():
            token_ids = states.known_ids(row)[: num_computed_S[row] + 1]
            drafts = ngram_drafts(token_ids, config.lookup_max, config.lookup_min, config.num_tokens)
            drafts_SK[row, : len(drafts)] = drafts


def make_drafted_batch(step: SchedulerOutput, states: RequestStates, buffers: InputBuffers) -> InputBatch:
    """Make the batch of a step and stage it, as make_batch does.

    Rows of one token come first, those of a request in the order of its tokens. A request has fewer drafts in the step
    than it was scheduled for if it has no more.
    """
    assert states.drafts_SK is not None
    rows_R, counts_R = states.rows(step.request_ids), np.array(step.counts, np.int32)
    step_starts_R, samples_R = np.array(step.starts, np.int32), np.array(step.samples)
    behind_R = step_starts_R - states.num_known[rows_R]  # a row has drafts once it has sampled
    has_R = (states.drafts_SK.numpy()[rows_R] >= 0).sum(1)
    num_drafts_R = np.where(behind_R >= 0, np.minimum(counts_R - 1, has_R), 0)
    single_R = (behind_R >= -1) | (counts_R == 1)
    # From here on, suffix A: rows of the batch.
    order_R = np.argsort(~single_R, kind="stable")
    num_rows_R = num_drafts_R[order_R] + 1
    request_A = np.repeat(order_R, num_rows_R)
    number_A = (np.arange(len(request_A)) - np.repeat(np.cumsum(num_rows_R) - num_rows_R, num_rows_R)).astype(np.int32)
    lens_A = np.where(single_R, 1, counts_R)[request_A]
    rows_A, starts_A = rows_R[request_A], step_starts_R[request_A] + number_A
    query_starts = np.concatenate(([0], np.cumsum(lens_A))).astype(np.int32)
    buffers.stage_batch(rows_A, query_starts, number_A)
    num_tokens, num_single = int(query_starts[-1]), int(single_R[request_A].sum())
    return InputBatch(
        request_ids=[step.request_ids[request] for request in request_A.tolist()],
        rows=rows_A,
        query_starts=query_starts,
        step_starts=starts_A.tolist(),
        samples=samples_R[request_A],
        num_tokens=num_tokens,
        key=None,
        decodes_only=num_single == len(request_A),
        num_rows=len(request_A),
        padded_tokens=num_tokens,
        host=(num_single, int(lens_A.max()), int((starts_A + lens_A).max())),
        drafted=DraftedRows(
            np.argsort(request_A, kind="stable"),
            np.cumsum(num_drafts_R + 1) - num_drafts_R - 1,
            num_drafts_R,
            samples_R,
        ),
    )


def verify(states: RequestStates, buffers: InputBuffers, token_ids_R: torch.Tensor, num_rows: int) -> None:
    """Store a step's tokens as `advance` does: of each request those up to the first draft that is wrong.

    May be called again with other tokens, which replace the first ones.
    """
    assert states.drafts_SK is not None
    assert buffers.draft_numbers_R is not None
    rows_R, numbers_R = buffers.rows_R.numpy()[:num_rows], buffers.draft_numbers_R.numpy()[:num_rows]
    ends_R, tokens_R = buffers.sample_positions_R.numpy()[:num_rows], token_ids_R.numpy()[:num_rows].astype(np.int32)
    drafts_SK, computed_S = states.drafts_SK.numpy(), states.num_computed_S.numpy()
    known_row_S, known_ids_KL = states.known_row_S.numpy(), states.known_ids_KL.numpy()
    real_R = rows_R >= 0
    taken_R = real_R & (ends_R >= states.num_known_S.numpy()[rows_R])
    first_R = real_R & (numbers_R == 0)
    computed_S[rows_R[first_R]] = ends_R[first_R]
    for number in range(int(numbers_R.max(initial=0)) + 1):
        at = np.flatnonzero(taken_R & (numbers_R == number))
        if number:  # the row before has the token that the draft is a guess of
            right = taken_R[at - 1] & (drafts_SK[rows_R[at], number - 1] == tokens_R[at - 1])
            taken_R[at[~right]] = False
            at = at[right]
        rows = rows_R[at]
        # An error code ends its request, but a step with it may be under way.
        new = np.maximum(tokens_R[at], 0)
        computed_S[rows] = ends_R[at]
        states.last_token_S.numpy()[rows] = new
        known_ids_KL[known_row_S[rows], ends_R[at]] = new
    buffers.num_steps_1[0] = step = (int(buffers.num_steps_1[0]) + 1) & LAST_NUMBER
    ring_row = buffers.tokens_KR1.numpy()[step % RING]
    ring_row[0] = step
    ring_row[1 : num_rows + 1] = np.where(taken_R, tokens_R, -1)


def newest_tokens(buffers: InputBuffers, num_rows: int) -> torch.Tensor:
    """Return the tokens that `verify` has stored last, int32 by row; 0 where a row has none."""
    step = int(buffers.num_steps_1[0])
    return buffers.tokens_KR1[step % RING, 1 : num_rows + 1].clamp(min=0)
