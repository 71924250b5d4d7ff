"""Hooks of features in the frontend, which run before the engine core gets a request.

A feature overrides the methods of `RequestFeature` that it needs. It can add values to a request, for its part in the
core (PlanFeature), and fields to the user's output.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from compiled_engine.engine.messages import ControlCall, EngineRequest
from compiled_engine.sampling.params import SamplingParams


class RequestPart(NamedTuple):
    """The values that a feature adds to a request."""

    extras: Mapping[str, Any] = {}  # of its EngineRequests
    root: Mapping[str, str] = {}  # parts of its prefix root, see engine/messages.prefix_root
    given: Any = None  # the argument `given` of EngineCore.add; at most one feature sets it
    output: Mapping[str, Any] = {}  # fields of its RequestOutput


NO_PART = RequestPart()


class Core(Protocol):
    """The engine core's control calls; see EngineCore."""

    def call(self, call: ControlCall) -> Any: ...

    def tell(self, call: ControlCall) -> None: ...


class AsyncCore(Protocol):
    """The engine core's control calls on an event loop; see CoreClient."""

    def call(self, name: str, **arguments: Any) -> Awaitable[Any]: ...

    def tell(self, call: ControlCall) -> None: ...


class RequestFeature:
    """The part of a feature in the frontend. Its methods do nothing unless overridden."""

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError, beginning with a field's name, for parameters that the engine cannot serve."""

    def parts(self, params: Sequence[SamplingParams], given: Mapping[str, Any]) -> Sequence[RequestPart]:
        """Return this feature's part of each request of a call, or () if no request has one.

        A request without a part has NO_PART. `params` has the parameters of each request. `given` has the call's
        arguments that only features read, by name. Raises TypeError or ValueError with the argument, its value and what
        is allowed.
        """
        return ()

    def is_slow(self, params: object) -> bool:
        """Return whether `parts` takes long for these parameters, which have not been checked."""
        return False

    def reads(self, given: Mapping[str, Any]) -> Iterator[Callable[[], object]]:
        """Yield functions that read files for `parts`. An event loop can run each of them in a thread."""
        return iter(())

    def before(self, requests: Sequence[EngineRequest], core: Core) -> None:
        """Make the control calls that the core must serve before it gets these requests.

        Raises ValueError if a call is refused.
        """

    async def before_async(self, requests: Sequence[EngineRequest], core: AsyncCore) -> None:
        """Make the calls of `before` on an event loop."""


def parts_of_all(
    features: Sequence[RequestFeature], params: Sequence[SamplingParams], given: Mapping[str, Any]
) -> list[RequestPart]:
    """Return one part for each request, merged from the parts of all features.

    Raises the errors of RequestFeature.parts.
    """
    of_each = [parts for feature in features if (parts := feature.parts(params, given))]
    if len(of_each) < 2:
        return list(of_each[0]) if of_each else [NO_PART] * len(params)
    return [_joined(parts) for parts in zip(*of_each, strict=True)]


def _joined(parts: Sequence[RequestPart]) -> RequestPart:
    return RequestPart(
        extras={name: value for part in parts for name, value in part.extras.items()},
        root={name: value for part in parts for name, value in part.root.items()},
        given=next((part.given for part in parts if part.given is not None), None),
        output={name: value for part in parts for name, value in part.output.items()},
    )
