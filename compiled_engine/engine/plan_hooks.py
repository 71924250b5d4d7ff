"""Hooks of features in planning: they run when requests come and go and when steps are scheduled.

A feature overrides the methods of `PlanFeature` that it needs. The scheduler collects the overrides once
(`PlanHooks`), so a hook that no feature overrides costs nothing. A feature with resources that requests hold while they
run describes them as CacheResources. Data for its part on the device (StepFeature) goes into the `extras` of messages,
under the StepFeature's name. The features of an engine are listed in features/registry.py.

The order of the hooks of a request, with the state in which each is called:

    check, holds_back            it arrives
    take_ready, check            only if it was held back; `withdrawn` if it will not be added
    added                        it joins the waiting ones
    outgrown                     it waits, and has more tokens than its `outgrown_at`
    may_start                    it is the first in order that is not skipped; then its resources are taken
    admitted                     it has its resources, and joins a step
    reached_end                  a step reaches one of its `step_ends`
    nothing_allowed              a step has sampled no token for it, as none is allowed
    output_extras                a step with results of features is processed
    first_extras                 a step with its first token is processed
    ended                        it has ended, at any time after `added`

Between `admitted` and `ended` a request may be preempted, and is once it has more tokens than its `outgrown_at`. A
feature sees its resources freed (CacheResource.free), and later `may_start` and `admitted` again.

The order of the hooks of a step, with the state in which each is called:

    divide, decode_tokens        nothing is scheduled yet
    limit_share                  a running request's share is chosen; its blocks and the next request's share follow
    reconsiders                  running requests are scheduled; `may_start`, `limit_share` and `admitted` of waiting
                                 ones follow
    built                        the step's requests are chosen; `divide` may have another part if there are none
    planned                      the step is sent next
    begin_late, finish_late      only for a step whose sampling awaits inputs from the host, while it runs
    updated                      its result was processed, request by request

`holds_steps` and `takes_stale` follow each control call that the core has served.

`failed` takes the place of `updated` for all steps in flight, after `ended` of their requests.

Fields of Request that a feature may set:

    samples_late, returns_tokens                  in `added`
    extras                                        in `added`
    max_step_tokens                               in `added`; only lowered, as other features limit it too
    computes_every_token                          at any time; read at each admission
    outgrown_at                                   in `added` and `outgrown`
    prefix_root                                   in `added`, and in `outgrown` if `block_hashes` are cleared
    step_ends                                     when its resources are taken; cleared when they are freed
    limit_to_single_tokens(), a method            in `built`
    failure                                       at any time; `set_steady_limits()` must follow
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Any, Literal

from compiled_engine.process.overriding import by_name, overriding, sole_overriding

if TYPE_CHECKING:
    from compiled_engine.engine.block_pool import BlockGroup
    from compiled_engine.engine.cache_resource import CacheResource
    from compiled_engine.engine.messages import EngineOutput, EngineRequest, RunnerOutput
    from compiled_engine.engine.request import Finish, Request
    from compiled_engine.engine.steps import StepBuilder, StepInFlight

Stale = Literal["", "cached", "all", "lost"]
"""Keys and values that must not be used again: none, those of the prefix cache, or those of running requests too.

Running requests that are paused may use stale ones further if the pause says so, but not lost ones.
"""


class PlanFeature:
    """The planning part of a feature. Its methods are hooks, which do nothing unless overridden."""

    calls: tuple[str, ...] = ()  # names of the methods that serve control calls
    num_parts = 1  # number of parts into which `divide` divides the running requests

    def resources(self, groups: Sequence[BlockGroup]) -> Sequence[CacheResource]:
        """Return the resources that each running request holds; they are taken in this order, before any blocks."""
        return ()

    def check(self, request: EngineRequest) -> None:
        """Raise ValueError if the engine does not support a request; otherwise prepare for it.

        Called at least once before the request is added.
        """

    def holds_back(self, request: EngineRequest, given: Any) -> bool:
        """Return whether to hold a request back until `take_ready` returns it.

        At most one feature overrides `holds_back` and `take_ready`.

        given: see EngineCore.add; None if nothing came with the request. Raises ValueError if `given` does not match
        the request.
        """
        return False

    def take_ready(self, patience_s: float) -> tuple[list[EngineRequest], list[EngineOutput]]:
        """Return the held-back requests that are ready, and the final outputs of failed ones.

        patience_s: longest time to wait if there are none.
        """
        return [], []

    def withdrawn(self, request_id: str) -> None:
        """Forget a request that was held back and will not be added."""

    def added(self, request: Request) -> None:
        """Handle a new waiting request. Called once per request; its `extras` go to the ranks at each admission."""

    def outgrown(self, request: Request) -> None:
        """Handle a waiting request that has more tokens than its `outgrown_at`, and raise this limit.

        All tokens of the request are computed again, so the feature may change anything that its keys and values depend
        on; then its `prefix_root` must change too.
        """

    def may_start(self, request: Request) -> bool:
        """Return whether the first waiting request may be admitted.

        If not, it is skipped until a feature's `reconsiders` returns True.
        """
        return True

    def reconsiders(self) -> bool:
        """Return whether `may_start` might answer differently now, so that skipped requests are tried again."""
        return False

    def holds_steps(self) -> str:
        """Return why no step may be planned from now on; "" if steps may be planned. Called after each control call.

        Requests wait meanwhile, and steps in flight are processed.
        """
        return ""

    def takes_stale(self) -> Stale:
        """Return which keys and values have become stale since the previous `takes_stale`, as the model has changed.

        Called after each control call.
        """
        return ""

    def divide(
        self, running: Sequence[Request], waiting: Sized, num_in_flight: int
    ) -> Iterable[tuple[Sequence[Request], int]]:
        """Yield (part of the running requests, number of waiting requests that may join it), in the order to try.

        The next step takes the first part with something to compute. num_in_flight: number of steps in flight. At most
        one feature overrides this; if none does, a step may have all requests.
        """
        return ()

    def decode_tokens(self, running: Sequence[Request], num_waiting: int) -> int:
        """Return the number of tokens per decode in the next step, at most max_new_tokens_per_step.

        running: the requests that the step may have. At most one feature overrides this; if none does, the number is
        max_new_tokens_per_step.
        """
        raise NotImplementedError

    def limit_share(self, request: Request, num_tokens: int) -> int:
        """Return how many of the request's next `num_tokens` tokens the step computes; later steps compute the rest.

        Not called for ordinary decodes, see Request.set_steady_limits. The request holds its resources; it may still
        be preempted. A waiting request that gets 0 is skipped until a feature's `reconsiders` returns True.
        """
        return num_tokens

    def built(self, builder: StepBuilder) -> None:
        """Adjust the settings of the next step, in its builder. The step's requests are already chosen.

        `planned` follows unless the step has no requests.
        """

    def admitted(self, request: Request, extras: dict[str, Any]) -> None:
        """Add data of an admitted request for the ranks to `extras`, which its NewRequest message carries.

        The request already holds its resources. Data that is equal at each admission belongs in the request's own
        extras, see `added`.
        """

    def reached_end(self, request: Request, num_tokens: int) -> None:
        """Handle a request whose tokens the step being planned computes up to one of the request's `step_ends`.

        `step_ends` are numbers of tokens at which a step must end. num_tokens: the one that the step reaches.
        """

    def planned(self, step: StepInFlight) -> None:
        """Handle a step that is sent to the ranks next. May add data for the ranks to `step.output.extras`."""

    def take_asks(self) -> list[EngineOutput]:
        """Return new outputs that ask for data of requests, see EngineOutput.asks. Called after each step."""
        return []

    def begin_late(self, requests: Sequence[Request]) -> None:
        """Start computing the feature's late inputs for a step: data that its sampling awaits while the forward runs.

        requests: all requests of the step that sample late, whichever feature they wait for. Their tokens before the
        step are known. Some of the requests may have ended.
        """

    def finish_late(self) -> dict[str, Any]:
        """Wait for the late inputs of the last `begin_late`, and return them as entries of LateInputs.extras."""
        return {}

    def output_extras(self, request: Request, extras: dict[str, Any]) -> dict[str, Any]:
        """Return the feature's new data for a request's output, as entries of EngineOutput.extras.

        extras: RunnerOutput.extras, features' data in the step's result. Called only if there are any. A value that
        each request of a step has goes into RunnerOutput.columns instead, which need no hook.
        """
        return {}

    def first_extras(self, request: Request) -> dict[str, Any]:
        """Return the feature's data for the output with a request's first token, as entries of EngineOutput.extras.

        Not called for requests that return no tokens, such as pooling requests.
        """
        return {}

    def updated(self, step: StepInFlight, result: RunnerOutput) -> None:
        """Handle a step whose result was processed. Called in the order of planning."""

    def nothing_allowed(self, request: Request) -> Finish | None:
        """Return how a request ends if its mask allows no token; None if that is an error."""
        return None

    def ended(self, request: Request) -> None:
        """Forget a request that has ended."""

    def failed(self) -> None:
        """Forget the steps in flight and the step being planned, which have failed."""

    def metrics(self) -> dict[str, Any]:
        """Return metrics of the engine, under names that no other part uses."""
        return {}

    def close(self) -> None:
        """Stop background work."""


class PlanHooks:
    """The overridden hooks of an engine's features, each a list in the order of features.

    A hook that at most one feature may override is a method or None. `answering` maps the name of each control call to
    the feature that serves it. Raises ValueError if several features override such a hook, or serve the same call.
    """

    def __init__(self, features: Sequence[PlanFeature]) -> None:
        self.check = overriding(features, PlanFeature.check)
        self.holds_back = sole_overriding(features, PlanFeature.holds_back)
        self.take_ready = sole_overriding(features, PlanFeature.take_ready)
        self.withdrawn = overriding(features, PlanFeature.withdrawn)
        self.added = overriding(features, PlanFeature.added)
        self.outgrown = overriding(features, PlanFeature.outgrown)
        self.may_start = overriding(features, PlanFeature.may_start)
        self.reconsiders = overriding(features, PlanFeature.reconsiders)
        self.holds_steps = overriding(features, PlanFeature.holds_steps)
        self.takes_stale = overriding(features, PlanFeature.takes_stale)
        self.divide = sole_overriding(features, PlanFeature.divide)
        self.decode_tokens = sole_overriding(features, PlanFeature.decode_tokens)
        self.limit_share = overriding(features, PlanFeature.limit_share)
        self.built = overriding(features, PlanFeature.built)
        self.admitted = overriding(features, PlanFeature.admitted)
        self.reached_end = overriding(features, PlanFeature.reached_end)
        self.planned = overriding(features, PlanFeature.planned)
        self.take_asks = overriding(features, PlanFeature.take_asks)
        self.begin_late = overriding(features, PlanFeature.begin_late)
        self.finish_late = overriding(features, PlanFeature.finish_late)
        self.output_extras = overriding(features, PlanFeature.output_extras)
        self.first_extras = overriding(features, PlanFeature.first_extras)
        self.updated = overriding(features, PlanFeature.updated)
        self.nothing_allowed = overriding(features, PlanFeature.nothing_allowed)
        self.ended = overriding(features, PlanFeature.ended)
        self.failed = overriding(features, PlanFeature.failed)
        self.metrics = overriding(features, PlanFeature.metrics)
        self.close = overriding(features, PlanFeature.close)
        self.answering = by_name((name, feature) for feature in features for name in feature.calls)
