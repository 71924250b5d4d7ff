"""Several processes at one port: one server to its clients, whatever becomes of one of them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from left_over import has_ended, running
from serve_process import SMALL, Served, served
from test_server_faults import figures, wait_until

from compiled_engine.server import api_servers
from compiled_engine.server.api_servers import ApiServers, Order, Place
from compiled_engine.server.options import Limits, ServerOptions
from compiled_engine.server.shared_figures import SharedFigures

COUNT = 3
ARGUMENTS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
ASKED: dict[str, Any] = {"prompt": "def add(a, b):\n", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
URL = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(*ARGUMENTS, "--api-server-count", str(COUNT), "--max-in-flight", "12", "--dtype", "float32") as server:
        yield server


def processes(server: Served) -> dict[int, psutil.Process]:
    """Those that serve beside the first one, by their numbers."""
    found = {}
    for each in running("api_server_main", psutil.Process(server.process.pid)):
        with suppress(psutil.NoSuchProcess):  # it may have ended since it was found
            found[int(each.cmdline()[-1])] = each
    return found


def connections(server: Served) -> list[int]:
    """How many clients each process has."""
    port = int(server.url.rpartition(":")[2])
    of = [psutil.Process(server.process.pid), *processes(server).values()]
    found = (each.net_connections("tcp") for each in of)
    return [sum(one.status == "ESTABLISHED" and one.laddr.port == port for one in each) for each in found]


async def text_of(url: str, **asked: Any) -> str | int:
    """What a stream said, by a connection of its own; its status if it was refused, "" if it broke."""
    body = {**ASKED, **asked, "stream": True}
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=60) as client,
            client.stream("POST", URL, json=body) as response,
        ):
            if response.status_code != 200:
                return response.status_code
            lines = [line async for line in response.aiter_lines() if line]
    except httpx.TransportError:
        return ""
    return "".join(lines) if lines[-1] == "data: [DONE]" else ""


def without_ids(text: str | int) -> str:
    """The texts of a stream alone."""
    events = [json.loads(part) for part in str(text).split("data: ")[1:-1]]
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def totals(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        return await figures(client)


def test_limits_and_figures_are_of_all_processes(server: Served) -> None:
    async def run() -> None:
        before = await totals(server.url)
        found = await asyncio.gather(*(text_of(server.url, prompt=[[5, 6, 7], [8, 9, 10]]) for _ in range(24)))
        taken = [each for each in found if each != 503]
        assert 3 <= len(taken) < 24
        assert {type(each) for each in taken} == {str}
        for _ in range(2 * COUNT):
            after = await totals(server.url)
            assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 6 * len(taken)
            assert after["busy_refusals_total"] - before["busy_refusals_total"] == 24 - len(taken)
            assert after["api_processes"] == COUNT
            assert after["completions_in_flight"] == 0

    asyncio.run(run())


def test_the_death_of_a_process_costs_its_own_requests_alone(server: Served) -> None:
    async def run() -> None:
        alone = without_ids(await text_of(server.url))
        streams = [asyncio.create_task(text_of(server.url, max_tokens=100)) for _ in range(12)]

        async def all_run() -> bool:
            return sum(connections(server)) >= 12

        await wait_until(all_run)
        held = connections(server)
        assert min(held) > 1  # nobody has taken them all
        dies = processes(server)[1]
        dies.kill()
        found = await asyncio.gather(*streams)
        assert 0 < found.count("") < 12
        assert all(without_ids(each).startswith(alone) for each in found if each)

        async def is_whole() -> bool:
            now = await totals(server.url)
            idle = not any(
                now[name] for name in ("num_requests_running", "kv_cache_usage_perc", "completions_in_flight")
            )
            return idle and now["api_processes"] == COUNT

        await wait_until(is_whole)
        assert dies.pid not in {each.pid for each in processes(server).values()}
        assert without_ids(await text_of(server.url)) == alone

    asyncio.run(run())


def test_a_signal_lets_the_requests_of_all_processes_end(server: Served) -> None:
    """Two more of them wait than run."""
    family = [*processes(server).values(), psutil.Process(server.process.pid)]

    async def run() -> None:
        streams = [asyncio.create_task(text_of(server.url, max_tokens=100)) for _ in range(10)]

        async def all_wait() -> bool:
            return (await totals(server.url))["num_requests_waiting"] >= 2

        await wait_until(all_wait)
        server.process.send_signal(signal.SIGTERM)
        assert all(await asyncio.gather(*streams))

    asyncio.run(run())
    assert server.process.wait(60) == 0
    assert all(map(has_ended, family))


def test_one_that_cannot_start_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_servers, "_MAIN", "no_such_module")
    with socket.socket() as bound:
        others = ApiServers(ServerOptions(api_server_count=2), bound)
        try:
            others.give(Order("", ServerOptions(), "x"))
            with pytest.raises(RuntimeError, match="API process 1 ended with status 1 before it could serve"):
                asyncio.run(others.wait_ready())
            assert "before it could serve" in asyncio.run(others.keep(lambda number: None))
        finally:
            others.kill()


class FakeProcess:
    def __init__(self, status: int | None = None) -> None:
        self.status, self.stdin = status, io.BytesIO()

    def poll(self) -> int | None:
        return self.status


def test_connections_of_a_process_that_died_are_not_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others would have fewer than it for good, and take all new ones."""
    started: list[FakeProcess] = []
    monkeypatch.setattr(
        api_servers, "start_process", lambda *arguments, **more: started.append(FakeProcess()) or started[-1]
    )
    monkeypatch.setattr(api_servers, "_LOOK_S", 0.01)
    with socket.socket() as bound:
        servers = ApiServers(ServerOptions(api_server_count=2), bound)

        def place_of_the_other() -> Place:
            return Place(SharedFigures(2, 1, os.dup(servers.figures.descriptor)))

        dying = place_of_the_other()
        dying.serve()
        dying.count(5)
        servers.place.serve()
        servers.place.count(1)
        started[0].status = -signal.SIGKILL
        forgotten: list[int] = []
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(servers.keep(forgotten.append), 0.2))
        assert (forgotten, len(started), servers.place.serves(1)) == ([1], 2, False)
        place_of_the_other().serve()
        assert servers.place.has_most()


def test_who_does_not_serve_yet_has_no_share_of_the_connections() -> None:
    figures = SharedFigures(2)
    own = Place(figures)
    other = Place(SharedFigures(2, 1, os.dup(figures.descriptor)))
    own.serve()
    own.count(3)
    assert not own.has_most()
    other.serve()
    assert own.has_most()
    other.count(3)
    assert not own.has_most()
    assert not other.has_most()
    own.forget(1)
    assert not own.has_most()


def test_all_processes_begin_with_the_first() -> None:
    """Which comes last. Else the others would share the clients that come at once."""

    async def run() -> None:
        figures = SharedFigures(3)
        first, *others = (
            Place(figures if i == 0 else SharedFigures(3, i, os.dup(figures.descriptor))) for i in range(3)
        )
        begun = [asyncio.create_task(other.begin()) for other in others]
        await asyncio.sleep(0.05)
        assert first.serves(1)
        assert first.serves(2)
        assert not any(task.done() for task in begun)
        await first.begin()
        await asyncio.wait_for(asyncio.gather(*begun), 20)
        replaced = Place(SharedFigures(3, 1, os.dup(figures.descriptor)))
        await asyncio.wait_for(replaced.begin(), 20)

    asyncio.run(run())


@pytest.mark.parametrize("count", [0, 65])
def test_the_number_of_processes_has_bounds(count: int) -> None:
    with pytest.raises(ValueError, match="api_server_count"):
        ServerOptions(api_server_count=count, limits=Limits())
