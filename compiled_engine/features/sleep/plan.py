"""Plans sleep: makes the ranks give memory back to the system, and holds all steps until the engine wakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall
from compiled_engine.engine.plan_hooks import PlanFeature, Stale
from compiled_engine.features.weight_updates.plan import WeightUpdates

NAME = "sleep"
WEIGHTS, KV_CACHE = TAGS = ("weights", "kv_cache")
# The parts that each level gives back. Level 1 keeps the weights in host memory.
LEVELS: dict[int, tuple[str, ...]] = {0: (), 1: TAGS, 2: TAGS}


class Sleep(PlanFeature):
    """Makes the ranks give memory back to the system, and take it again at the same addresses.

    call_ranks: a function that makes all ranks serve a control call. updates: the weight updates. Sleep makes them
    refuse an update while the weights are asleep, and stop all steps after the weights were dropped, until an update
    has brought new ones.
    """

    calls = ("sleep", "wake_up", "is_sleeping")

    def __init__(self, call_ranks: Callable[[ControlCall], list[Any]], updates: WeightUpdates) -> None:
        self._call_ranks, self._updates = call_ranks, updates
        self._asleep: set[str] = set()
        self._stale: Stale = ""

    def sleep(self, level: int = 1) -> None:
        """Stop steps until `wake_up`, and give memory back meanwhile. Requests wait, and are then computed again.

        level: 1 keeps the weights in host memory; 2 drops them, after which a whole update must follow; 0 gives nothing
        back, so requests are not computed again. Raises ControlError for another level, or if a rank cannot give its
        memory back; in the latter case all parts are awake again.
        """
        if level not in LEVELS:
            raise ControlError(f"level is {level!r}; allowed: 0, 1, 2")
        self._asleep = set(TAGS)
        if given_back := LEVELS[level]:
            self._stale = "lost"
            self._updates.hold("the weights sleep; wake them first, with tags=['weights']")
            if level == 2:
                self._updates.lose_weights("sleep(level=2) has dropped the weights; a whole update brings new ones")
            try:
                self._call("give_back", tags=given_back, keeps_weights=level == 1)
            except ControlError:
                self.wake_up()
                raise

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Wake the parts `tags`, or all parts if it is None. Return whether all parts are awake.

        Raises ControlError for an unknown tag, or if a rank lacks memory; these parts then stay asleep.
        """
        if unknown := [tag for tag in tags or () if tag not in TAGS]:
            raise ControlError(f"tags has {unknown[0]!r}; allowed: {', '.join(TAGS)}")
        woken = [tag for tag in TAGS if tag in self._asleep and (tags is None or tag in tags)]
        if woken:
            self._call("take_again", tags=woken)
        self._asleep -= set(woken)
        if WEIGHTS in woken:
            self._updates.hold("")
        return not self._asleep

    def _call(self, method: str, **arguments: Any) -> None:
        self._call_ranks(ControlCall(f"{NAME}.{method}", arguments))

    def is_sleeping(self) -> bool:
        """Return whether any part sleeps."""
        return bool(self._asleep)

    def holds_steps(self) -> str:
        return f"the engine sleeps: {', '.join(sorted(self._asleep))}" if self._asleep else ""

    def takes_stale(self) -> Stale:
        stale, self._stale = self._stale, ""
        return stale
