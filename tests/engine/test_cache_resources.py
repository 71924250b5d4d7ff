"""Resources of requests: what is given and taken back once, and what a check says if it was not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from compiled_engine.config import AdapterConfig
from compiled_engine.engine.block_pool import BlockGroup
from compiled_engine.engine.cache_resource import CacheResource, RequestRows, check_holders
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.engine.request import Request
from compiled_engine.features.adapters.extras import AdapterRef, adapter_of, extras_of
from compiled_engine.features.adapters.table import AdapterTable
from compiled_engine.features.recurrence.snapshots import StateSnapshots
from compiled_engine.sampling.params import SamplingParams


def request(name: str, adapter: str = "x") -> Request:
    asked = EngineRequest(name, (1, 2, 3), SamplingParams(), extras=extras_of(AdapterRef(adapter, f"/{adapter}")))
    return Request.of(asked, (0, 0), 100)


def adapters() -> AdapterTable:
    table = AdapterTable(AdapterConfig(2, 4, 4))
    for digest in "abcx":
        table.loaded(digest)
    return table


# A resource for two requests, and what it says where it is asked for too much or too little.
RESOURCES: dict[str, tuple[Callable[[], CacheResource], str, str, str]] = {
    "rows": (lambda: RequestRows(2), "'a' has a row already", "'a' gives back a row, but has none", "a row"),
    "blocks": (
        lambda: BlockGroup(2, 4),
        "'a' has a block table already",
        "'a' gives back its blocks, but has none",
        "blocks",
    ),
    "slots": (adapters, "'a' has a slot already", "'a' gives back a slot, but has none", "a slot of an adapter"),
}


@pytest.mark.parametrize("kind", RESOURCES)
def test_it_is_given_and_taken_back_once(kind: str) -> None:
    make, twice, none, what = RESOURCES[kind]
    resource = make()
    first, second, third = request("a", "a"), request("b", "b"), request("c", "c")
    for each in (first, second, third):
        if isinstance(resource, AdapterTable):
            resource.add(adapter_of(each.asked))
    with pytest.raises(RuntimeError, match=none):
        resource.free(first)
    for each in (first, second):
        assert resource.has_room(each, 3, 0, 0)
        resource.take(each, 3, 0)
        with pytest.raises(RuntimeError, match="no request is left, but"):
            resource.check_all_free()
    with pytest.raises(RuntimeError, match=twice):
        resource.take(first, 3, 0)
    assert not resource.has_room(third, 3, 0, 0)
    with pytest.raises(RuntimeError, match=r"asks for a|asked for"):
        resource.take(third, 3, 0)
    resource.check_integrity([second, first])
    with pytest.raises(RuntimeError, match=rf"requests \['b'\] hold {what}"):
        resource.check_integrity([first])
    with pytest.raises(RuntimeError, match=rf"requests \['c'\] do not hold {what}"):
        resource.check_integrity([first, second, third])
    for each in (first, second):
        resource.free(each)
        with pytest.raises(RuntimeError, match="but has none"):
            resource.free(each)
    if isinstance(resource, AdapterTable):
        for each in (first, second, third):
            resource.end(adapter_of(each.asked))
    resource.check_all_free()
    resource.check_integrity([])


def test_who_holds_what_is_told_by_name() -> None:
    a, b, c = request("a"), request("b"), request("c")
    check_holders("it", {b, a}, [a, b])
    with pytest.raises(RuntimeError, match=r"requests \['a', 'c'\] hold it"):
        check_holders("it", [c, a, b], [b])
    with pytest.raises(RuntimeError, match=r"requests \['a', 'c'\] do not hold it"):
        check_holders("it", [b], [c, b, a])


@pytest.mark.parametrize("make", [RequestRows, lambda count: StateSnapshots(count, 4)], ids=["rows", "snapshots"])
def test_there_is_one_at_least(make: Callable[[int], Any]) -> None:
    make(1)
    with pytest.raises(ValueError, match=r"num_(rows|slots) must be at least 1, got 0"):
        make(0)


def test_blocks_are_at_least_as_long_as_a_token() -> None:
    BlockGroup(1, 1)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        BlockGroup(1, 0)


def test_a_request_whose_adapter_was_dropped_is_found() -> None:
    table = adapters()
    first, second = request("a", "a"), request("b", "a")
    for each in (first, second):
        table.add(adapter_of(each.asked))
        table.take(each, 3, 0)
    table.check_integrity([first, second])
    table.end(adapter_of(first.asked))
    with pytest.raises(RuntimeError, match="adapter a is in use, but not loaded"):
        table.check_integrity([first, second])
    table.free(first)
    table.check_integrity([second])
    table.free(second)
    with pytest.raises(RuntimeError, match="no request is left, but 0 hold slots of adapters"):
        table.check_all_free()


def test_snapshots_are_free_or_used() -> None:
    snapshots = StateSnapshots(2, 4)
    snapshots.check_integrity([])
    snapshots._free.append(0)
    with pytest.raises(RuntimeError, match=r"of 2 slots of snapshots these are free, used or filled: \[0, 0, 1\]"):
        snapshots.check_integrity([])
