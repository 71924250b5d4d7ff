"""Verifies drafts: a request gets a step's tokens up to the first wrong draft. See draft_rows.py for the method."""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.input_batch import LAST_NUMBER, RING, InputBatch, InputBuffers
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_sampling import advance
from compiled_engine.features.speculation.draft_rows import NO_ROW, NOT_TAKEN
from compiled_engine.kernels.launch_arguments import dependent_launch, next_power_of_2
from compiled_engine.sampling.gumbel import splitmix64

# A hash index that no token id has.
NO_TOKEN = 1 << 62


class Acceptance:
    """The rule that accepts drafts: by comparison, or for benchmarks at random with given rates.

    See SpeculationConfig.acceptance_rates for `rates`. If they are empty, drafts are accepted by comparison.
    """

    def __init__(self, rates: tuple[float, ...], device: torch.device):
        self.rates = rates
        self.thresholds_K: torch.Tensor | None = None
        if rates:
            most = (1 << 63) - 1
            thresholds = [min(int(rate * 2.0**63), most) for rate in rates]
            self.thresholds_K = torch.tensor(thresholds, dtype=torch.int64, device=device)


class DraftAdvance:
    """Updates the request states after a step in an engine with drafts. Implements step_sampling.Advance.

    If the step's batch has a row for each draft, a request's tokens up to the first wrong draft are stored. The ring
    buffer gets NOT_TAKEN for tokens after a wrong draft, and NO_ROW for rows whose draft does not exist.
    """

    def __init__(self, config: EngineConfig, states: RequestStates, buffers: InputBuffers) -> None:
        self._states, self._buffers = states, buffers
        self._acceptance = Acceptance(config.speculation.acceptance_rates, config.device)
        self._taken_R = torch.zeros_like(buffers.rows_R)

    def __call__(
        self, batch: InputBatch, token_ids_R: torch.Tensor | None, num_rows: int, *, again: bool = False
    ) -> None:
        if token_ids_R is None:
            token_ids_R = self._buffers.sample_positions_R  # no row gets a token, so any values will do
        if not batch.has_offsets:
            decodes_only = batch.decodes_only
            advance(self._states, self._buffers, token_ids_R, num_rows, decodes_only=decodes_only, again=again)
            return
        verify = verify_reference if self._taken_R.device.type == "cpu" else launch_verify
        verify(self._states, self._buffers, token_ids_R, num_rows, self._acceptance, self._taken_R)

    def tokens(self, batch: InputBatch, num_rows: int) -> torch.Tensor:
        if batch.has_offsets:
            return self._taken_R[:num_rows]
        return self._states.last_token_S.index_select(0, self._buffers.rows_R[:num_rows])


def launch_verify(
    states: RequestStates,
    buffers: InputBuffers,
    token_ids_R: torch.Tensor,
    num_rows: int,
    acceptance: Acceptance,
    taken_R: torch.Tensor,
) -> None:
    """Launch draft_kernels.verify_kernel, which stores the accepted drafts and sampled tokens of a batch.

    `token_ids_R` are the sampled tokens, int64. `taken_R`, int32, receives each row's token, 0 for none.
    """
    from compiled_engine.features.speculation.draft_kernels import verify_kernel  # Triton is not installed everywhere

    assert states.ahead_SK is not None
    assert states.history_SL is not None
    verify_kernel[(1,)](
        buffers.rows_R,
        buffers.offsets_R,
        buffers.sample_positions_R,
        token_ids_R,
        states.ahead_SK,
        states.fields["seed"] if acceptance.rates else None,
        acceptance.thresholds_K,
        states.num_computed_S,
        states.prefill_len_S,
        states.last_token_S,
        states.history_SL,
        buffers.num_steps_1,
        taken_R,
        buffers.tokens_KR1,
        num_rows,
        states.history_SL.stride(0),
        buffers.tokens_KR1.stride(0),
        NUM_DRAFTS=states.ahead_SK.shape[1],
        RING=RING,
        LAST_NUMBER=LAST_NUMBER,
        NO_ROW=NO_ROW,
        NO_TOKEN=NO_TOKEN,
        TILE_R=next_power_of_2(buffers.rows_R.shape[0]),
        num_warps=4,
        **dependent_launch(buffers.rows_R.device),
    )


def verify_reference(
    states: RequestStates,
    buffers: InputBuffers,
    token_ids_R: torch.Tensor,
    num_rows: int,
    acceptance: Acceptance,
    taken_R: torch.Tensor,
) -> None:
    """Do the work of draft_kernels.verify_kernel on a CPU. For arguments see `launch_verify`."""
    assert states.ahead_SK is not None
    assert buffers.offsets_R is not None
    rows_R, offsets_R = buffers.rows_R.numpy()[:num_rows], buffers.offsets_R.numpy()[:num_rows]
    ends_R, tokens_R = buffers.sample_positions_R.numpy()[:num_rows], np.zeros(num_rows, np.int32)
    tokens_R[: len(token_ids_R)] = token_ids_R.numpy()[:num_rows]  # rows of padding may have none
    computed_S = states.num_computed_S.numpy()
    token_row_S, all_token_ids_KL = states.token_row_S.numpy(), states.all_token_ids_KL.numpy()
    if states.history_SL is not None:
        token_row_S, all_token_ids_KL = np.arange(len(computed_S)), states.history_SL.numpy()
    real_R = (rows_R >= 0) & (ends_R > 0)
    is_taken_R = real_R & (ends_R >= states.prefill_len_S.numpy()[rows_R])
    first_R = real_R & (offsets_R == 0)
    computed_S[rows_R[first_R]] = ends_R[first_R]
    drafted = np.flatnonzero(real_R & (offsets_R > 0))
    drafts = states.ahead_SK.numpy()[rows_R[drafted], offsets_R[drafted] - 1]
    right_R = real_R.copy()
    if acceptance.rates:
        seeds, begins = states.fields["seed"].numpy()[rows_R[drafted]], (ends_R - offsets_R)[drafted]
        right_R[drafted] = offsets_R[drafted] <= accepted_at_random(seeds, begins, acceptance.rates)
        accepted = right_R[drafted]
        tokens_R[drafted[accepted] - 1] = drafts[accepted]
    else:  # the row before has the token that the draft is a guess of
        right_R[drafted] = drafts == tokens_R[drafted - 1]
    for number in range(int(offsets_R[real_R].max(initial=0)) + 1):
        at = np.flatnonzero(is_taken_R & (offsets_R == number))
        if number:
            right = is_taken_R[at - 1] & right_R[at]
            is_taken_R[at[~right]] = False
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
    ring_row[1 : num_rows + 1] = np.where(is_taken_R, tokens_R, np.where(real_R, NOT_TAKEN, NO_ROW))
    taken_R.numpy()[:num_rows] = np.where(is_taken_R, np.maximum(tokens_R, 0), 0)


def accepted_at_random(seeds_R: np.ndarray, positions_R: np.ndarray, rates: tuple[float, ...]) -> np.ndarray:
    """Return how many drafts of each request are accepted, int [R], drawn at random with the acceptance rates `rates`.

    A draw is a function of the request's seed and the position of its first draft. It is independent of the sampling
    noise, because it is hashed with an id that no token has.
    """
    keys_R = splitmix64(seeds_R.view(np.uint64), positions_R.astype(np.uint64))
    uniform_R = splitmix64(keys_R, np.array([NO_TOKEN], np.uint64)).astype(np.float64) * 2.0**-64
    return (uniform_R[:, None] < np.array(rates)).sum(1)
