"""The adapters that requests can name as their model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.server.errors import bad_request, shown

MOST_NAMES = 1000


class AdapterNames:
    """Maps names to loaded adapters, in the order in which the names were added.

    requests: the adapters given at the start, which `load_given` loads.
    """

    def __init__(self, requests: Iterable[LoRARequest] = ()) -> None:
        self._requests = {request.lora_name: request for request in requests}
        self._digests: dict[str, str] = {}
        self._next_id = len(self._requests) + 1

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def get(self, name: str) -> LoRARequest | None:
        return self._requests.get(name)

    async def load_given(self, engine: AsyncLLM) -> None:
        """Load the adapters given at the start. Raises the errors of `AsyncLLM.load_adapter`."""
        for name, request in self._requests.items():
            self._digests[name] = await engine.load_adapter(request)

    async def load(
        self, engine: AsyncLLM, name: str, path: str | Path, *, in_place: bool = False, within: tuple[Path, ...] = ()
    ) -> None:
        """Load an adapter, so that requests can select it by `name`.

        With `in_place`, `name` may be in use: the new adapter replaces the old one. If `within` has folders, the
        adapter's files must lie in them. Raises ApiError 400 for a name in use or too many names; TypeError, ValueError
        or OSError for an invalid adapter.
        """
        request = LoRARequest(name, self._next_id, path, within)
        self._next_id += 1
        self._require_free(name, in_place)
        digest = await engine.load_adapter(request)
        self._require_free(name, in_place)  # another request may have loaded it meanwhile
        before = self._digests.get(name)
        self._digests[name], self._requests[name] = digest, request
        await self._drop(engine, before)

    async def unload(self, engine: AsyncLLM, name: str) -> None:
        """Remove `name`, which must exist. If its adapter has no other name, also unload the adapter.

        Running requests continue.
        """
        del self._requests[name]
        await self._drop(engine, self._digests.pop(name, None))

    def _require_free(self, name: str, in_place: bool) -> None:
        if name in self._requests and not in_place:
            raise bad_request("lora_name", f"lora_name {shown(name)} is loaded already; load_inplace replaces it")
        if name not in self._requests and len(self._requests) >= MOST_NAMES:
            raise bad_request("lora_name", f"at most {MOST_NAMES} adapters may have names; unload one first")

    async def _drop(self, engine: AsyncLLM, digest: str | None) -> None:
        """Unload the adapter with this digest unless it still has a name."""
        if digest is not None and digest not in self._digests.values():
            await engine.unload_adapter(digest)
