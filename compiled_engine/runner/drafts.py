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

from compiled_engine.messages import SchedulerOutput
from compiled_engine.runner.input_batch import LAST_NUMBER, RING, DraftedRows, InputBatch, InputBuffers
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.sampling.gumbel import splitmix64

# The index of a hash that is no token's.
NO_TOKEN = np.array([1 << 62], np.uint64)


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
    number_A = np.arange(len(request_A)) - np.repeat(np.cumsum(num_rows_R) - num_rows_R, num_rows_R)
    lens_A = np.where(single_R, 1, counts_R)[request_A]
    drafted = DraftedRows(
        np.argsort(request_A, kind="stable"),
        np.cumsum(num_drafts_R + 1) - num_drafts_R - 1,
        num_drafts_R,
        samples_R,
    )
    request_ids, starts_A = [step.request_ids[request] for request in request_A.tolist()], step_starts_R[request_A]
    return stage_numbered(
        buffers, request_ids, rows_R[request_A], number_A, lens_A, starts_A, samples_R[request_A], drafted
    )


def stage_numbered(
    buffers: InputBuffers,
    request_ids: list[str],
    rows_A: np.ndarray,
    number_A: np.ndarray,
    lens_A: np.ndarray,
    starts_A: np.ndarray,
    samples_A: np.ndarray,
    drafted: DraftedRows | None = None,
) -> InputBatch:
    """Make a batch and stage it: rows that begin `number_A` tokens behind the newest ones of their requests.

    Rows of one token come first. lens_A: tokens of each row. starts_A: at least the position of the newest token.
    """
    query_starts = np.concatenate(([0], np.cumsum(lens_A))).astype(np.int32)
    number_A = number_A.astype(np.int32)
    buffers.stage_batch(rows_A, query_starts, number_A)
    num_rows, num_tokens, ends_A = len(rows_A), int(query_starts[-1]), starts_A + number_A + lens_A
    num_single = num_rows if num_tokens == num_rows else int(np.argmax(lens_A > 1))
    return InputBatch(
        request_ids=request_ids,
        rows=rows_A,
        query_starts=query_starts,
        step_starts=(starts_A + number_A).tolist(),
        samples=samples_A,
        num_tokens=num_tokens,
        key=None,
        decodes_only=num_single == num_rows,
        num_rows=num_rows,
        padded_tokens=num_tokens,
        host=(num_single, int(lens_A.max()), int(ends_A.max())),
        drafted=drafted,
    )


def verify(
    states: RequestStates,
    buffers: InputBuffers,
    token_ids_R: torch.Tensor,
    num_rows: int,
    acceptance_rates: tuple[float, ...] = (),
) -> None:
    """Store a step's tokens as `advance` does: of each request those up to the first draft that is wrong.

    acceptance_rates: see SpeculationConfig. May be called again with other tokens, which replace the first ones.
    """
    assert states.drafts_SK is not None
    assert buffers.draft_numbers_R is not None
    rows_R, numbers_R = buffers.rows_R.numpy()[:num_rows], buffers.draft_numbers_R.numpy()[:num_rows]
    ends_R, tokens_R = buffers.sample_positions_R.numpy()[:num_rows], token_ids_R.numpy()[:num_rows].astype(np.int32)
    computed_S = states.num_computed_S.numpy()
    known_row_S, known_ids_KL = states.known_row_S.numpy(), states.known_ids_KL.numpy()
    real_R = rows_R >= 0
    taken_R = real_R & (ends_R >= states.num_known_S.numpy()[rows_R])
    first_R = real_R & (numbers_R == 0)
    computed_S[rows_R[first_R]] = ends_R[first_R]
    drafted = np.flatnonzero(real_R & (numbers_R > 0))
    drafts = states.drafts_SK.numpy()[rows_R[drafted], numbers_R[drafted] - 1]
    right_R = real_R.copy()
    if acceptance_rates:
        seeds, begins = states.fields["seed"].numpy()[rows_R[drafted]], (ends_R - numbers_R)[drafted]
        right_R[drafted] = numbers_R[drafted] <= accepted_at_random(seeds, begins, acceptance_rates)
        accepted = right_R[drafted]
        tokens_R[drafted[accepted] - 1] = drafts[accepted]
    else:  # the row before has the token that the draft is a guess of
        right_R[drafted] = drafts == tokens_R[drafted - 1]
    for number in range(int(numbers_R.max(initial=0)) + 1):
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
        known_ids_KL[known_row_S[rows], ends_R[at]] = new
    buffers.num_steps_1[0] = step = (int(buffers.num_steps_1[0]) + 1) & LAST_NUMBER
    ring_row = buffers.tokens_KR1.numpy()[step % RING]
    ring_row[0] = step
    ring_row[1 : num_rows + 1] = np.where(taken_R, tokens_R, -1)


def accepted_at_random(seeds_R: np.ndarray, positions_R: np.ndarray, rates: tuple[float, ...]) -> np.ndarray:
    """Draw how many drafts are accepted, int [R], from the rates of SpeculationConfig.acceptance_rates.

    A draw is a function of the request's seed and the position of its first draft, and independent of the noise of
    sampling: no token has its id.
    """
    keys_R = splitmix64(seeds_R.view(np.uint64), positions_R.astype(np.uint64))
    uniform_R = splitmix64(keys_R, NO_TOKEN).astype(np.float64) * 2.0**-64
    return (uniform_R[:, None] < np.array(rates)).sum(1)


def newest_tokens(buffers: InputBuffers, num_rows: int) -> torch.Tensor:
    """Return the tokens that `verify` has stored last, int32 by row; 0 where a row has none."""
    step = int(buffers.num_steps_1[0])
    return buffers.tokens_KR1[step % RING, 1 : num_rows + 1].clamp(min=0)
