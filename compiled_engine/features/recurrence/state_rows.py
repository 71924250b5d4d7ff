"""Copies states of recurrences on the device between the rows of running requests and the rows of snapshots.

Both are rows of the same tensors: first a row for each running request, then one for each snapshot. So a snapshot is
taken or used by copying a row of each tensor. Tensors that only drafts need have no rows for snapshots. Copies are
launched in the steps' stream: to the rows of new requests before a step, to snapshots after it. See snapshots.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from compiled_engine.config import Recurrences
from compiled_engine.engine.messages import SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.features.recurrence.snapshots import NAME


class StateRows(StepFeature):
    """Copies states between the rows of requests and the snapshots, before and after a step."""

    name = NAME

    def __init__(self, recurrences: Recurrences, tensors: Mapping[str, torch.Tensor], states: RequestStates) -> None:
        """`tensors` has the model's tensors by name; for their rows see Recurrences.rows_of."""
        self._num_rows, self._states = recurrences.num_rows, states
        self._bytes = sum(tensors[state.name].nbytes for state in recurrences.states)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for state in (state for state in recurrences.states if state.in_snapshots):
            by_dtype.setdefault(tensors[state.name].dtype, []).append(tensors[state.name])
        self._groups = [*by_dtype.values()]  # a copy of several tensors in one launch needs equal dtypes
        self._views: dict[int, list[list[torch.Tensor]]] = {}

    def begin(self, step: SchedulerOutput) -> None:
        """Copy snapshots to the rows of the step's new requests that begin with a snapshot."""
        for request in step.new:
            if (slot := request.extras.get(NAME)) is not None:
                self._copy(self._num_rows + slot, self._states.row(request.request_id))

    def end(self, step: SchedulerOutput) -> None:
        """Copy to snapshots the states that are to be kept after the step."""
        for request_id, slot in step.extras.get(NAME, {}).items():
            self._copy(self._states.row(request_id), self._num_rows + slot)

    def metrics(self) -> dict[str, int]:
        """Return the bytes of all states, and the part that snapshots take."""
        snapshots = sum(tensor[self._num_rows :].nbytes for group in self._groups for tensor in group)
        return {"state_bytes": self._bytes, "snapshot_bytes": snapshots}

    def close(self) -> None:
        self._groups.clear()
        self._views.clear()

    def _copy(self, source: int, target: int) -> None:
        """Copy row `source` of every state to row `target`."""
        for targets, sources in zip(self._row(target), self._row(source), strict=True):
            torch._foreach_copy_(targets, sources)

    def _row(self, row: int) -> Sequence[list[torch.Tensor]]:
        """Return views of a row of each state, in groups of the same dtype."""
        if row not in self._views:
            self._views[row] = [[tensor[row] for tensor in group] for group in self._groups]
        return self._views[row]


def snapshot_rows(recurrences: Recurrences, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the snapshots' rows, [num_snapshots, ...], of each state that snapshots contain. tensors: by name."""
    return [tensors[state.name][recurrences.num_rows :] for state in recurrences.states if state.in_snapshots]
