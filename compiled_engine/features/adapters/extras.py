"""Stores the LoRA adapter of a request in `EngineRequest.extras`, and reads it from there.

The frontend stores it. The engine core reads it when it plans steps (plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from compiled_engine.engine.messages import EngineRequest

NAME = "adapters"


class AdapterRef(NamedTuple):
    """The LoRA adapter of a request, as messages to the engine core identify it."""

    digest: str  # of its files; identifies the adapter within the engine
    path: str  # its folder, from which it is read again if the engine has dropped it
    name: str = ""  # given by the user, for metrics


def extras_of(adapter: AdapterRef | None) -> dict[str, Any]:
    """Return the entries for EngineRequest.extras of a request with this adapter; {} for None."""
    return {} if adapter is None else {NAME: adapter}


def adapter_of(request: EngineRequest) -> AdapterRef | None:
    """Return the adapter of a request; None if it has none."""
    given = request.extras.get(NAME)
    return None if given is None else AdapterRef(*given)


def adapters_of(requests: Iterable[EngineRequest]) -> list[AdapterRef]:
    """Return the adapters of requests, each once."""
    return [AdapterRef(*given) for given in dict.fromkeys(each.extras.get(NAME) for each in requests) if given]
