"""Has the ranks load the LoRA adapters that users name, and assigns slots to the adapters of running requests.

A slot is a place for one adapter in tensors on the device, see slots.py. NewRequest.extras have the slot of the
request's adapter. SchedulerOutput.extras map slots to the digests of the adapters that must be placed there before the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compiled_engine.config import AdapterConfig
from compiled_engine.engine.block_pool import BlockGroup
from compiled_engine.engine.cache_resource import CacheResource
from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall, EngineRequest
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request
from compiled_engine.engine.steps import StepInFlight
from compiled_engine.features.adapters.extras import NAME, adapter_of
from compiled_engine.features.adapters.overtaking import Overtaking
from compiled_engine.features.adapters.table import AdapterTable

CALLS = ("begin_load_adapter", "has_read_adapter", "load_adapter", "unload_adapter")
OFF = "enable_lora is False, so there are no adapters; allowed: True"


class Adapters(PlanFeature):
    """Loads adapters and gives them slots. `call_ranks` is Executor.call."""

    calls = CALLS

    def __init__(self, config: AdapterConfig, call_ranks: Callable[[ControlCall], list[Any]]) -> None:
        self._table = AdapterTable(config)
        self._call_ranks = call_ranks
        self._overtaking = Overtaking()

    def begin_load_adapter(self, path: str, digest: str) -> None:
        """Let the ranks read an adapter in the background, unless they have it.

        `load_adapter` should follow once `has_read_adapter` returns True.
        """
        if not self._table.is_loaded(digest):
            self._call_ranks(ControlCall(f"{NAME}.begin_load", {"path": path, "digest": digest}))

    def has_read_adapter(self, digest: str) -> bool:
        """Return False while a rank still reads an adapter after `begin_load_adapter`; otherwise True."""
        return self._table.is_loaded(digest) or all(
            self._call_ranks(ControlCall(f"{NAME}.has_read", {"digest": digest}))
        )

    def load_adapter(self, path: str, digest: str) -> list[str]:
        """Let the ranks load an adapter into host memory, unless they have it.

        Returns the digests of the adapters that were dropped to make room. path: the adapter's folder. digest: the
        digest of its files. Raises ControlError if the files have another digest, or if the adapter does not fit.
        """
        if self._table.is_loaded(digest):
            return []
        self._call_ranks(ControlCall(f"{NAME}.load", {"path": path, "digest": digest}))
        dropped = self._table.loaded(digest)
        for each in dropped:
            self._call_ranks(ControlCall(f"{NAME}.drop", {"digest": each}))
        return dropped

    def unload_adapter(self, digest: str) -> None:
        """Drop an adapter now if no request uses it, otherwise when other adapters need its memory."""
        if self._table.unload(digest):
            self._call_ranks(ControlCall(f"{NAME}.drop", {"digest": digest}))

    def resources(self, groups: Sequence[BlockGroup]) -> Sequence[CacheResource]:
        return (self._table,)

    def check(self, request: EngineRequest) -> None:
        """Load the request's adapter if it was dropped since the user named it. Raises ValueError if that fails."""
        if (adapter := adapter_of(request)) is None:
            return
        try:
            self.load_adapter(adapter.path, adapter.digest)
        except ControlError as error:
            raise ValueError(f"request {request.request_id!r}: {error}") from error

    def added(self, request: Request) -> None:
        self._table.add(adapter_of(request.asked))
        self._overtaking.added(request)

    def may_start(self, request: Request) -> bool:
        adapter = adapter_of(request.asked)
        if adapter is None or (self._overtaking.may_overtake(request) and self._table.has_slot(adapter)):
            return True
        self._overtaking.skip(request)
        return False

    def reconsiders(self) -> bool:
        if not (self._table.takes_changes() or self._overtaking.is_over):
            return False
        self._overtaking.restored()
        return True

    def admitted(self, request: Request, extras: dict[str, Any]) -> None:
        self._overtaking.forget(request)
        if (adapter := adapter_of(request.asked)) is not None:
            extras[NAME] = self._table.slot_of(adapter)

    def planned(self, step: StepInFlight) -> None:
        if placed := self._table.take_placed():
            step.output.extras[NAME] = placed

    def ended(self, request: Request) -> None:
        self._table.end(adapter_of(request.asked))
        self._overtaking.forget(request)

    def failed(self) -> None:
        self._table.forget_slots()

    def metrics(self) -> dict[str, Any]:
        return self._table.metrics()


class NoAdapters(PlanFeature):
    """Refuses adapters in an engine with enable_lora False."""

    calls = CALLS

    def begin_load_adapter(self, path: str, digest: str) -> None:
        """Do nothing, since `load_adapter` refuses the adapter."""

    def has_read_adapter(self, digest: str) -> bool:
        """Return True, since `load_adapter` refuses the adapter immediately."""
        return True

    def load_adapter(self, path: str, digest: str) -> list[str]:
        """Raise ControlError, since adapters are not enabled."""
        raise ControlError(OFF)

    def unload_adapter(self, digest: str) -> None:
        """Do nothing, since no adapter is loaded."""

    def check(self, request: EngineRequest) -> None:
        if NAME in request.extras:
            raise ValueError(f"request {request.request_id!r}: {OFF}")
