"""Has every rank call a function of the user, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.features.weight_updates.plan import WeightUpdates

NAME = "rank_calls"


class RankCalls(PlanFeature):
    """Has every rank call a function, and returns the results.

    call_ranks: makes all ranks serve a control call. updates: the weight updates, to which functions may add tensors.
    """

    calls = ("call_on_ranks",)

    def __init__(self, call_ranks: Callable[[ControlCall], list[Any]], updates: WeightUpdates) -> None:
        self._call_ranks, self._updates = call_ranks, updates

    def call_on_ranks(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return what the function returns on each rank, in the order of ranks.

        function, args, kwargs: see StepRankCalls.call. Raises ControlError if the function raises any exception; an
        update that is under way is then dropped.
        """
        loads = self._updates.is_under_way
        arguments = {"function": function, "args": list(args), "kwargs": dict(kwargs), "loads": loads}
        try:
            answers = self._call_ranks(ControlCall(f"{NAME}.call", arguments, slow=True))
        except ControlError:
            if loads:  # some ranks may have more tensors than others
                self._updates.cancel_weight_update()
            raise
        if loads:
            self._updates.note_received(answers[0]["received"])
        return [answer["value"] for answer in answers]
