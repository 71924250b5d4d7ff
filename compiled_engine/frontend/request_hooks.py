"""Defines the hooks by which features take part in the frontend, before the engine core gets a request.

A feature overrides the methods of `RequestFeature` that it needs. It can add fields to the user's output, and values to
a request, which it reads in the engine core (PlanFeature in engine/plan_hooks.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from compiled_engine.engine.messages import Content, ControlCall, EngineRequest
from compiled_engine.frontend.prepared_request import Give
from compiled_engine.frontend.prompts import Prompt
from compiled_engine.process.smallest_first import Stopped, never
from compiled_engine.sampling.params import SamplingParams


class RequestPart(NamedTuple):
    """The values that a feature adds to one request, for the core and for the user's output."""

    extras: Mapping[str, Any] = {}  # added to the extras of its EngineRequests
    root: Mapping[str, str] = {}  # parts of its prefix root, see engine/messages.prefix_root
    given: Any = None  # the argument `given` of EngineCore.add; at most one feature sets it
    output: Mapping[str, Any] = {}  # fields of the request's RequestOutput
    contents: tuple[Content, ...] = ()  # contents of its EngineRequests; at most one feature sets them
    give: Give | None = None  # see PreparedRequest; at most one feature sets it


NO_PART = RequestPart()


class Attachment(Protocol):
    """Prepares the data that comes with a prompt, such as images. `RequestFeature.attach` makes it."""

    @property
    def is_ready(self) -> bool:
        """Whether `wait` returns at once."""

    @property
    def is_remote(self) -> bool:
        """Whether `wait` waits for other machines, which may take long to answer."""

    def wait(self, is_stopped: Stopped = never) -> None:
        """Wait until the data is ready. May be called in any thread, and repeatedly. Polls `is_stopped` meanwhile.

        Raises WorkStopped once `is_stopped` returns True. Raises TypeError, ValueError or OSError for data that cannot
        be used.
        """

    def expand(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the prompt's tokens, including those that stand for the data.

        token_ids: the tokenised prompt, in which each item of data may have a placeholder. Raises ValueError if the
        prompt does not fit the data.
        """

    def part(self, token_ids: tuple[int, ...], params: SamplingParams) -> RequestPart:
        """Return the values that the feature adds to the request.

        token_ids: the result of `expand`, or the last of its tokens if the prompt was truncated. Raises ValueError if
        truncation removed tokens of the data, or if `params` has a parameter that is not supported with the data.
        """


class Core(Protocol):
    """The methods of the engine core that call a function in the core by its name (a control call); see EngineCore."""

    def call(self, call: ControlCall) -> Any: ...

    def tell(self, call: ControlCall) -> None: ...


class AsyncCore(Protocol):
    """The methods of the engine core's client that make control calls on an event loop; see CoreClient."""

    def call(self, name: str, **arguments: Any) -> Awaitable[Any]: ...

    def tell(self, call: ControlCall) -> None: ...


class RequestFeature:
    """Base class of a feature's hooks in the frontend. Its methods do nothing unless overridden."""

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters that the engine cannot serve. The message begins with the field's name."""

    def attach(self, prompts: Sequence[Prompt]) -> Sequence[Attachment | None]:
        """Return an Attachment for each prompt with data and None for the others; () if no prompt has data.

        Called on event loops, so the slow work is left to `Attachment.wait`. At most one feature of an engine may
        override this method.

        Raises TypeError or ValueError for data that the feature does not take. The error begins with the name of the
        data.
        """
        return ()

    def parts(self, params: Sequence[SamplingParams], given: Mapping[str, Any]) -> Sequence[RequestPart]:
        """Return this feature's part of each request of a call, or () if no request has one.

        The part of a request to which the feature adds nothing is NO_PART. params: the parameters of each request.
        given: the call's arguments that only features read, by name. Raises TypeError or ValueError for an invalid
        argument. The message has the argument's name, its value and what is allowed.
        """
        return ()

    def is_slow(self, params: object) -> bool:
        """Return whether the method `parts` takes long for these parameters, which have not been checked."""
        return False

    def reads(self, given: Mapping[str, Any]) -> Iterator[Callable[[], object]]:
        """Yield functions which read files that the arguments name, and keep what they read for `parts`.

        An event loop can run each function in a thread before it calls `parts`. given: as for `parts`.
        """
        return iter(())

    def before(self, requests: Sequence[EngineRequest], core: Core) -> None:
        """Make the control calls, such as those that load adapters, that the core must execute before these requests.

        Raises ValueError if a call is refused.
        """

    async def before_async(self, requests: Sequence[EngineRequest], core: AsyncCore) -> None:
        """Make the control calls of `before` on an event loop. Raises the same errors."""

    def metrics(self) -> dict[str, float]:
        """Return the feature's metrics in this process, by name."""
        return {}

    def close(self) -> None:
        """Free what the feature has started, such as processes. May be called again."""


def attach_all(features: Sequence[RequestFeature], prompts: Sequence[Prompt]) -> Sequence[Attachment | None]:
    """Return an Attachment for each prompt that has images or audio, and None for each other one; () if none has any.

    Raises the errors of RequestFeature.attach, and ValueError if a prompt has such data and no feature reads it.
    """
    given = next((prompt for prompt in prompts if prompt.data), None)
    if given is None:
        return ()
    for feature in features:
        if found := feature.attach(prompts):
            return found
    raise ValueError(f"{given.part_name(next(iter(given.data)))} must be absent: the engine takes only text")


def parts_of_all(
    features: Sequence[RequestFeature], params: Sequence[SamplingParams], given: Mapping[str, Any]
) -> list[RequestPart]:
    """Return one part for each request, merged from the parts of all features.

    Raises the errors of RequestFeature.parts.
    """
    of_each = [parts for feature in features if (parts := feature.parts(params, given))]
    if len(of_each) < 2:
        return list(of_each[0]) if of_each else [NO_PART] * len(params)
    return [joined(parts) for parts in zip(*of_each, strict=True)]


def joined(parts: Sequence[RequestPart]) -> RequestPart:
    """Return one part, merged from the parts that several features add to the same request.

    Dicts are merged. Each other field has the value of the first part that sets it.
    """
    return RequestPart(
        extras={name: value for part in parts for name, value in part.extras.items()},
        root={name: value for part in parts for name, value in part.root.items()},
        contents=next((part.contents for part in parts if part.contents), ()),
        given=next((part.given for part in parts if part.given is not None), None),
        output={name: value for part in parts for name, value in part.output.items()},
        give=next((part.give for part in parts if part.give is not None), None),
    )
