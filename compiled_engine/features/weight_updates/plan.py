"""Plans weight updates: receives updates, puts them into place and keeps the version of the weights.

An update is received in any number of parts, which the ranks store beside the weights in use. When it is finished,
every rank checks all of it, then every rank copies it into place, between two steps. So an update that fails its check,
or whose sender has gone, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall
from compiled_engine.engine.plan_hooks import PlanFeature, Stale
from compiled_engine.engine.request import Request
from compiled_engine.features.weight_updates.extras import NAME


class WeightUpdates(PlanFeature):
    """Replaces the weights between two steps.

    call_ranks: a function that has all ranks serve a control call, and returns their results.
    """

    calls = (
        "start_weight_update",
        "receive_weights",
        "connect_weight_sender",
        "receive_weight_broadcast",
        "receive_shared_weights",
        "finish_weight_update",
        "cancel_weight_update",
        "weight_update_state",
    )

    def __init__(self, call_ranks: Callable[[ControlCall], list[Any]]) -> None:
        self._call_ranks = call_ranks
        self._version: str | None = None  # None before the first update
        self._num_updates = 0
        self._num_received: int | None = None  # tensors of the update under way; None if there is none
        self._torn = ""  # why some weights are new and others old; "" if they belong together
        self._stale: Stale = ""
        self._lost = ""  # why there are no weights; "" if there are
        self._held = ""  # why no update may be put into place; "" if it may

    def start_weight_update(self) -> None:
        """Begin an update. An unfinished earlier update is dropped, since its sender must have gone."""
        self._call(NAME, "drop")
        self._num_received = 0

    def receive_weights(self, **arguments: Any) -> int:
        """Add tensors to the update. Return how many tensors it has now. arguments: see StepWeightUpdates.take.

        Raises ControlError if no update is under way, or if a tensor cannot be read; none of these tensors is then
        added.
        """
        self._require_started()
        self._num_received = self._call(NAME, "take", **arguments)[0]
        return self._num_received

    def connect_weight_sender(self, **arguments: Any) -> None:
        """Have all ranks join a trainer's group. arguments, errors: see StepWeightUpdates.connect."""
        self._call(NAME, "connect", **arguments)

    def receive_weight_broadcast(self, **arguments: Any) -> int:
        """Add tensors that the trainer broadcasts. Return how many tensors the update has now. No step runs meanwhile.

        arguments, errors: see StepWeightUpdates.take_broadcast. Raises ControlError if no update is under way.
        """
        self._require_started()
        self._num_received = self._call(NAME, "take_broadcast", **arguments)[0]
        return self._num_received

    def receive_shared_weights(self, **arguments: Any) -> int:
        """Add tensors in memory that the trainer shares. Return how many tensors the update has now.

        arguments, errors: see StepWeightUpdates.take_shared. Raises ControlError if no update is under way.
        """
        self._require_started()
        self._num_received = self._call(NAME, "take_shared", **arguments)[0]
        return self._num_received

    def finish_weight_update(self, version: str | None = None, recompute: bool = True) -> str:
        """Check the update, put it into place and return its version.

        version: None for the number of finished updates, this one included. recompute: running requests are computed
        again from their tokens, with the new weights; otherwise they keep the keys and values of the old weights.
        Either way the prefix cache is emptied.

        Raises ControlError in three cases. The update does not match the model's weights: it is dropped, and the old
        weights stay. Updates are held back (`hold`): the update stays under way. Putting it into place fails: no step
        runs until another update is finished.
        """
        self._require_started()
        if self._held:
            raise ControlError(self._held)
        try:
            self._call(NAME, "check")
        except ControlError:
            self.cancel_weight_update()
            raise
        self._num_received = None
        try:
            self._call(NAME, "apply")
        except ControlError as error:
            self._torn = f"a weight update failed while it was put into place: {error}"
            raise ControlError(f"{self._torn}; no step is run until another update is finished") from error
        self._torn = self._lost = ""
        self._num_updates += 1
        self._version = str(self._num_updates) if version is None else version
        self._stale = "all" if recompute or self._stale == "all" else "cached"
        return self._version

    def cancel_weight_update(self) -> None:
        """Drop the update under way, if there is one."""
        self._call(NAME, "drop")
        self._num_received = None

    def weight_update_state(self) -> dict[str, Any]:
        """Return the version, the number of finished updates, and how many tensors the update under way has received.

        The last is None if no update is under way.
        """
        return {"version": self._version, "updates": self._num_updates, "received": self._num_received}

    @property
    def is_under_way(self) -> bool:
        """Whether an update has been started and is neither finished nor dropped."""
        return self._num_received is not None

    def note_received(self, num_tensors: int) -> None:
        """Note how many tensors the update under way has, after the ranks have taken some without this object."""
        self._require_started()
        self._num_received = num_tensors

    def _require_started(self) -> None:
        if self._num_received is None:
            raise ControlError("no weight update is under way; start one first")

    def _call(self, name: str, method: str, **arguments: Any) -> list[Any]:
        return self._call_ranks(ControlCall(f"{name}.{method}", arguments))

    def lose_weights(self, why: str) -> None:
        """Hold all steps until an update is finished, for the reason `why`."""
        self._lost = why

    def hold(self, why: str) -> None:
        """Forbid that updates are put into place, for the reason `why`; "" allows it again."""
        self._held = why

    def holds_steps(self) -> str:
        return self._torn or self._lost

    def takes_stale(self) -> Stale:
        stale, self._stale = self._stale, ""
        return stale

    def first_extras(self, request: Request) -> dict[str, Any]:
        return {} if self._version is None else {NAME: self._version}

    def metrics(self) -> dict[str, Any]:
        return {"weight_version": self._version, "weight_updates": self._num_updates}
