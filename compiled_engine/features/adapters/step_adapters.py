"""The device part of LoRA adapters: places them in slots, and chooses the forward of steps that use one."""

from __future__ import annotations

from compiled_engine.engine.messages import NewRequest, SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_hooks import RunnerParts, StepFeature
from compiled_engine.features.adapters.extras import NAME
from compiled_engine.features.adapters.slots import AdapterSlots
from compiled_engine.passes.linear.adapters import ADAPTED, ADAPTER_SLOT
from compiled_engine.rows.row_fields import RowField


class StepAdapters(StepFeature):
    """Places adapters in slots before a step, and runs steps whose requests have adapters with the adapted forward.

    The control calls are methods of AdapterSlots.
    """

    name = NAME
    calls = ("begin_load", "has_read", "load", "drop")

    def __init__(self, slots: AdapterSlots, states: RequestStates) -> None:
        self._slots, self._states = slots, states
        self.rows: set[int] = set()  # of requests with an adapter
        states.fields.declare(RowField(ADAPTER_SLOT, initial=-1))
        self.begin_load, self.has_read, self.load, self.drop = slots.begin_load, slots.has_read, slots.load, slots.drop

    @classmethod
    def of(cls, parts: RunnerParts) -> StepAdapters:
        """Return the feature for a runner whose requests may have adapters."""
        return cls(AdapterSlots.of(parts), parts.states)

    def added(self, row: int, request: NewRequest) -> None:
        if (slot := request.extras.get(self.name)) is not None:
            self._states.fields.set(row, **{ADAPTER_SLOT: slot})
            self.rows.add(row)

    def removed(self, row: int) -> None:
        self.rows.discard(row)

    def begin(self, step: SchedulerOutput) -> None:
        """Copy newly placed adapters into their slots."""
        for slot, digest in step.extras.get(self.name, {}).items():
            self._slots.place(slot, digest)

    def variant(self, step: SchedulerOutput) -> str:
        """Return ADAPTED if any request of the step has an adapter, else ""."""
        return "" if self.rows.isdisjoint(map(self._states.row, step.request_ids)) else ADAPTED
