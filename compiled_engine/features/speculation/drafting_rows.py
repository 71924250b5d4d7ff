"""The requests of a step for which a draft model or a head makes drafts, and the number of drafts of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add

import numpy as np

from compiled_engine.features.speculation.draft_rows import StepShares
from compiled_engine.messages import SchedulerOutput
from compiled_engine.runner.request_states import RequestStates


@dataclass(frozen=True, eq=False)
class DraftingRows:
    """The requests of a step that have sampled, those with most room for drafts first, then those with the longest
    contexts. Suffix R: these requests.

    indices_R: in the step. rows_R: int32, in the states. room_R: int32, most drafts of each. all_sampled: every request
    of the step is one of them.
    """

    indices_R: np.ndarray
    rows_R: np.ndarray
    room_R: np.ndarray
    all_sampled: bool

    @classmethod
    def of(cls, step: SchedulerOutput, states: RequestStates) -> DraftingRows:
        """The step's. Its requests have their rows."""
        rows_R, starts_R = states.rows(step.request_ids), np.array(step.starts, np.int32)
        counts_R = np.array(step.counts, np.int32)
        indices_R = np.flatnonzero(starts_R >= states.prefill_len[rows_R])
        indices_R = indices_R[np.lexsort((-starts_R[indices_R], 1 - counts_R[indices_R]))]
        return cls(indices_R, rows_R[indices_R], counts_R[indices_R] - 1, len(indices_R) == len(rows_R))

    @cached_property
    def num_drafting(self) -> Sequence[int]:
        """Return the number of requests with room for each draft, up to the last draft for which any request has
        room."""
        most = int(self.room_R.max(initial=0))
        return [int((self.room_R > draft).sum()) for draft in range(most)]

    def longest(self, step: SchedulerOutput) -> int:
        """A bound of the contexts in a step that these are the rows of."""
        if self.all_sampled:
            return max(map(add, step.starts, step.counts), default=1)
        ends = np.array(step.starts, np.int32) + np.array(step.counts, np.int32)
        return int(ends[self.indices_R].max(initial=1))


class DraftingSteps:
    """Finds the rows of steps: the same object as for the step before as long as the same requests decode."""

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._shares: StepShares | None = None
        self._rows: DraftingRows | None = None

    def rows(self, step: SchedulerOutput) -> DraftingRows:
        """Return those of a step. Its requests have their rows."""
        shares = StepShares.of(step, self._states)
        if self._rows is None or shares != self._shares:
            self._rows = DraftingRows.of(step, self._states)
            self._shares = shares if self._rows.all_sampled else None
        return self._rows
