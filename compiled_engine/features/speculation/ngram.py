"""Finds drafts by n-grams: the tokens that followed an earlier occurrence of the request's last tokens.

The method is prompt lookup decoding (Saxena, "Prompt lookup decoding", 2023). On a CPU, drafts are written before the
step's batch is made. On a GPU the host does not know the requests' newest tokens; a kernel writes the drafts, in the
CUDA graph of the step.
"""

from __future__ import annotations

import numpy as np

from compiled_engine.config import SpeculationConfig
from compiled_engine.engine.input_batch import InputBatch, InputBuffers
from compiled_engine.engine.messages import SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.kernels.launch_arguments import dependent_launch, next_power_of_2


def wanted_drafts(step: SchedulerOutput, states: RequestStates, rows_R: np.ndarray) -> np.ndarray:
    """Return how many drafts each request has room for, int [R]. Requests have drafts once they have sampled."""
    has_sampled_R = np.array(step.starts) >= states.prefill_len[rows_R]
    return np.where(has_sampled_R, np.array(step.counts) - 1, 0)


def ngram_drafts(token_ids: np.ndarray, longest: int, shortest: int, count: int) -> np.ndarray:
    """Return the `count` tokens after the newest earlier occurrence of the last tokens, empty if there is none.

    An occurrence is a match of `shortest` to `longest` of the last tokens; the longest match wins. If fewer than
    `count` tokens follow it, they are repeated.
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


class NgramsOnHost(StepFeature):
    """Finds n-gram drafts on a CPU, before a step's batch is made."""

    def __init__(self, config: SpeculationConfig, states: RequestStates, buffers: InputBuffers) -> None:
        self._config, self._states = config, states

    def begin(self, step: SchedulerOutput) -> None:
        """Write the drafts of the step's requests into the states."""
        config, states = self._config, self._states
        assert states.ahead_SK is not None
        drafts_SK, num_computed_S = states.ahead_SK.numpy(), states.num_computed_S.numpy()
        rows_R = states.rows(step.request_ids)
        rows = rows_R[wanted_drafts(step, states, rows_R) > 0]
        drafts_SK[rows] = -1
        for row in rows.tolist():
            token_ids = states.all_token_ids(row)[: num_computed_S[row] + 1]
            drafts = ngram_drafts(token_ids, config.lookup_max, config.lookup_min, config.num_tokens)
            drafts_SK[row, : len(drafts)] = drafts


class Ngrams(StepFeature):
    """Finds n-gram drafts with a kernel, before a step's inputs are made."""

    def __init__(self, config: SpeculationConfig, states: RequestStates, buffers: InputBuffers) -> None:
        self._config, self._states, self._buffers = config, states, buffers

    def before_inputs(self, batch: InputBatch) -> None:
        if not (batch.decodes_only and batch.host[1] == 1):  # host[1]: rows per request
            self.launch(batch)

    def launch(self, batch: InputBatch) -> None:
        """Launch the kernel that writes the drafts of a staged batch into the states."""
        from compiled_engine.features.speculation.draft_kernels import (  # Triton is not installed everywhere
            SEARCHED,
            ngram_kernel,
        )

        states, buffers = self._states, self._buffers
        assert states.ahead_SK is not None
        assert states.history_SL is not None
        num_drafts = states.ahead_SK.shape[1]
        ngram_kernel[(batch.num_rows,)](
            buffers.rows_R,
            buffers.offsets_R,
            states.num_computed_S,
            states.prefill_len_S,
            states.history_SL,
            states.ahead_SK,
            self._config.lookup_max,
            self._config.lookup_min,
            states.history_SL.stride(0),
            NUM_DRAFTS=num_drafts,
            TILE=SEARCHED,
            TILE_K=next_power_of_2(num_drafts),
            num_warps=8,
            **dependent_launch(buffers.rows_R.device),
        )
