"""LoRA adapters in the frontend: finds the adapters that requests name, and has the core load them in advance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall, EngineRequest
from compiled_engine.features.adapters.extras import AdapterRef, adapters_of, extras_of
from compiled_engine.features.adapters.frontend.finder import AdapterFinder
from compiled_engine.frontend.request_hooks import NO_PART, AsyncCore, Core, RequestFeature, RequestPart

if TYPE_CHECKING:
    from compiled_engine.config import AdapterConfig

ARGUMENT = "lora_request"
# Interval at which the core is asked whether an adapter has been read.
_POLL_S = 0.02


class AdapterRequests(RequestFeature):
    """Finds the adapters of requests and lets the core load them. `config` is None if adapters are not enabled."""

    def __init__(self, config: AdapterConfig | None) -> None:
        self.finder = AdapterFinder(config)
        self._loaded: set[str] = set()  # digests of adapters that the core probably has

    def parts(self, params: Sequence[Any], given: Mapping[str, Any]) -> Sequence[RequestPart]:
        if (asked := given.get(ARGUMENT)) is None:
            return ()
        found = self.finder.find_each(asked, len(params))
        named = asked if isinstance(asked, list | tuple) else [asked] * len(params)
        return [
            NO_PART if ref is None else RequestPart(extras_of(ref), {"adapter": ref.digest}, output={ARGUMENT: request})
            for ref, request in zip(found, named, strict=True)
        ]

    def reads(self, given: Mapping[str, Any]) -> Iterator[Callable[[], object]]:
        asked = given.get(ARGUMENT)
        for request in asked if isinstance(asked, list | tuple) else [asked]:
            if request is not None and not self.finder.has_read(request):
                yield partial(self.finder.find, request)

    def before(self, requests: Sequence[EngineRequest], core: Core) -> None:
        for adapter in adapters_of(requests):
            try:
                core.call(ControlCall("load_adapter", {"path": adapter.path, "digest": adapter.digest}))
            except ControlError as error:
                raise _refused(adapter, error) from error

    async def before_async(self, requests: Sequence[EngineRequest], core: AsyncCore) -> None:
        for adapter in adapters_of(requests):
            await self.load(adapter, core)

    async def load(self, adapter: AdapterRef, core: AsyncCore) -> None:
        """Have the core load an adapter, unless it is known to be loaded. The core serves other requests meanwhile.

        Raises ValueError if the core refuses the adapter.
        """
        if adapter.digest in self._loaded:
            return
        try:
            await core.call("begin_load_adapter", path=adapter.path, digest=adapter.digest)
            while not await core.call("has_read_adapter", digest=adapter.digest):
                await asyncio.sleep(_POLL_S)
            dropped = await core.call("load_adapter", path=adapter.path, digest=adapter.digest)
        except ControlError as error:
            raise _refused(adapter, error) from error
        self._loaded.difference_update(dropped)
        self._loaded.add(adapter.digest)

    async def unload(self, digest: str, core: AsyncCore) -> None:
        """Have the core drop an adapter from host memory.

        While a request uses the adapter, it stays; it is then dropped when other adapters need the memory.
        """
        self._loaded.discard(digest)
        await core.call("unload_adapter", digest=digest)


def _refused(adapter: AdapterRef, error: ControlError) -> ValueError:
    return ValueError(f"{ARGUMENT} {adapter.name!r}: {error}")
