"""The seams of the plan: what features do where requests come and go and steps are planned.

A feature overrides the methods of `PlanFeature` that it needs. Scheduler and engine core collect them once
(`PlanHooks`), and call those alone: a hook that no feature has costs a step no call. What
requests hold while they run, a feature counts as a CacheResource. What it tells its part on the device goes into the
`extras` of messages, under the name of its StepFeature.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Any

from compiled_engine.process.overriding import by_name, overriding, sole_overriding

if TYPE_CHECKING:
    from compiled_engine.core.block_pool import BlockGroup
    from compiled_engine.core.cache_resource import CacheResource
    from compiled_engine.core.request import Finish, Request
    from compiled_engine.core.steps import StepBuilder, StepInFlight
    from compiled_engine.messages import EngineOutput, EngineRequest, GrammarVocabulary, RunnerOutput, TokenMasks


class PlanFeature:
    """The part of a feature in planning steps. No method does anything unless it is overridden.

    calls: names of its methods that answer control calls. num_parts: of the running requests, see `divide`.
    """

    calls: tuple[str, ...] = ()
    num_parts = 1

    def resources(self, groups: Sequence[BlockGroup]) -> Sequence[CacheResource]:
        """Return what each running request holds. They are taken in this order, before the blocks of the groups."""
        return ()

    def check(self, request: EngineRequest) -> None:
        """Raise ValueError if the engine cannot take a request; make ready what it needs. Called once or more before it
        is added."""

    def holds(self, request: EngineRequest, given: Any) -> bool:
        """Return whether a request is held back, so that it is not added before it is `released`. given: what came with
        it that is no data, or None. Raises ValueError if the two do not go together."""
        return False

    def released(self, patience_s: float) -> tuple[list[EngineRequest], list[EngineOutput]]:
        """Return requests that were held back and are to be added, and the ends of those that cannot be.

        patience_s: how long to wait if there are none.
        """
        return [], []

    def withdrawn(self, request_id: str) -> None:
        """Forget a request that was held back and will not be added."""

    def set_vocabulary(self, vocabulary: GrammarVocabulary) -> None:
        """Take what the tokens mean, before the first request that needs it."""

    def added(self, request: Request) -> None:
        """Note a request, which waits; called once, however often it is admitted. Its `extras` reach the device each
        time."""

    def may_start(self, request: Request) -> bool:
        """Return whether the first waiting request may be admitted. If not, it is set aside for others until
        `reconsiders`."""
        return True

    def reconsiders(self) -> bool:
        """Return whether `may_start` may answer otherwise than before: then no request stays aside."""
        return False

    def divide(
        self, running: Sequence[Request], waiting: Sized, num_in_flight: int
    ) -> Iterable[tuple[Sequence[Request], int]]:
        """Yield parts of the running requests, in the order in which they are tried: the next step is of the first with
        something to compute. With each comes how many waiting requests the step may admit. num_in_flight: steps. Only
        one feature may override this; without it a step may have every request."""
        return ()

    def decode_tokens(self, running: Sequence[Request], num_waiting: int) -> int:
        """Return how many tokens a decode of the next step has, at most the engine's. running: those that it may have.
        Only one feature may override this; without it they have the most."""
        raise NotImplementedError

    def built(self, builder: StepBuilder) -> None:
        """Note the shares of a step that will be planned, unless it is empty, and change what the builder says of them
        all."""

    def admitted(self, request: Request, extras: dict[str, Any]) -> None:
        """Add to the extras of the NewRequest of a request, which holds its resources.

        What is the same at each admission belongs into the request's own extras, once it is `added`.
        """

    def reached_end(self, request: Request, num_tokens: int) -> None:
        """Note that the step being planned computes the request's tokens up to one of its `step_ends`."""

    def planned(self, step: StepInFlight) -> None:
        """Note a step that will be sent to the ranks, and add to the extras of its output."""

    def begin_late(self, requests: Sequence[Request]) -> None:
        """Begin to make what the sampling of a step awaits, for requests that sample late. All their tokens are known;
        some may have ended. Only one feature may override this, and `finish_late`."""

    def finish_late(self) -> TokenMasks:
        """Return what was begun last, once it is made."""
        raise NotImplementedError

    def output_extras(self, request: Request, extras: dict[str, Any]) -> dict[str, Any]:
        """Return extras of an EngineOutput, from what the extras of a RunnerOutput have for a request; none if that
        has nothing new for it."""
        return {}

    def updated(self, step: StepInFlight, result: RunnerOutput) -> None:
        """Note a step whose result is processed, in the order in which steps were planned."""

    def nothing_allowed(self, request: Request) -> Finish | None:
        """Return how a request ends that no token may follow; None if that is an error."""
        return None

    def ended(self, request: Request) -> None:
        """Forget a request, which may wait, run or have ended with a token in flight."""

    def failed(self) -> None:
        """Forget what the steps in flight, and one being planned, were to do: they have failed."""

    def metrics(self) -> dict[str, Any]:
        """Return figures for the engine's metrics, by names that no other part uses."""
        return {}

    def close(self) -> None:
        """End what works beside steps."""


class PlanHooks:
    """The hooks of an engine's features, each in the order of the features; of a hook that only one may have, its
    method or None. answering: the features by the names of their control calls.

    Raises ValueError if several features override such a hook, or answer the same call.
    """

    def __init__(self, features: Sequence[PlanFeature]) -> None:
        self.check = overriding(features, PlanFeature.check)
        self.holds = overriding(features, PlanFeature.holds)
        self.released = overriding(features, PlanFeature.released)
        self.withdrawn = overriding(features, PlanFeature.withdrawn)
        self.set_vocabulary = overriding(features, PlanFeature.set_vocabulary)
        self.added = overriding(features, PlanFeature.added)
        self.may_start = overriding(features, PlanFeature.may_start)
        self.reconsiders = overriding(features, PlanFeature.reconsiders)
        self.divide = sole_overriding(features, PlanFeature.divide)
        self.decode_tokens = sole_overriding(features, PlanFeature.decode_tokens)
        self.built = overriding(features, PlanFeature.built)
        self.admitted = overriding(features, PlanFeature.admitted)
        self.reached_end = overriding(features, PlanFeature.reached_end)
        self.planned = overriding(features, PlanFeature.planned)
        self.begin_late = sole_overriding(features, PlanFeature.begin_late)
        self.finish_late = sole_overriding(features, PlanFeature.finish_late)
        self.output_extras = overriding(features, PlanFeature.output_extras)
        self.updated = overriding(features, PlanFeature.updated)
        self.nothing_allowed = overriding(features, PlanFeature.nothing_allowed)
        self.ended = overriding(features, PlanFeature.ended)
        self.failed = overriding(features, PlanFeature.failed)
        self.metrics = overriding(features, PlanFeature.metrics)
        self.close = overriding(features, PlanFeature.close)
        self.answering = by_name((name, feature) for feature in features for name in feature.calls)
