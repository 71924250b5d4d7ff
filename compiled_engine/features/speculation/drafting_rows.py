"""The requests of a step for which a draft model or head makes drafts, and how many drafts each has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add

import numpy as np

from compiled_engine.engine.messages import SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.features.speculation.draft_rows import StepShares


@dataclass(frozen=True, eq=False)
class DraftingRows:
    """The R requests of a step that have sampled, sorted by descending room for drafts, then by descending context."""

    indices_R: np.ndarray  # indices of the requests in the step
    rows_R: np.ndarray  # int32, rows of the states
    room_R: np.ndarray  # int32, most drafts of each request
    all_sampled: bool  # all requests of the step have sampled

    @classmethod
    def of(cls, step: SchedulerOutput, states: RequestStates) -> DraftingRows:
        """Return the rows of a step whose requests are in the states."""
        rows_R, starts_R = states.rows(step.request_ids), np.array(step.starts, np.int32)
        counts_R = np.array(step.counts, np.int32)
        indices_R = np.flatnonzero(starts_R >= states.prefill_len[rows_R])
        indices_R = indices_R[np.lexsort((-starts_R[indices_R], 1 - counts_R[indices_R]))]
        return cls(indices_R, rows_R[indices_R], counts_R[indices_R] - 1, len(indices_R) == len(rows_R))

    @cached_property
    def num_drafting(self) -> Sequence[int]:
        """The number of requests with room for a first draft, for a second draft, and so on."""
        most = int(self.room_R.max(initial=0))
        return [int((self.room_R > draft).sum()) for draft in range(most)]

    def longest(self, step: SchedulerOutput) -> int:
        """Return an upper bound of the context lengths of these requests in the step."""
        if self.all_sampled:
            return max(map(add, step.starts, step.counts), default=1)
        ends = np.array(step.starts, np.int32) + np.array(step.counts, np.int32)
        return int(ends[self.indices_R].max(initial=1))


class DraftingSteps:
    """Finds the drafting rows of steps, and reuses them while the same requests decode."""

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._shares: StepShares | None = None
        self._rows: DraftingRows | None = None

    def rows(self, step: SchedulerOutput) -> DraftingRows:
        """Return the drafting rows of a step, those of the previous step if possible.

        The step's requests must be in the states.
        """
        shares = StepShares.of(step, self._states)
        if self._rows is None or shares != self._shares:
            self._rows = DraftingRows.of(step, self._states)
            self._shares = shares if self._rows.all_sampled else None
        return self._rows
