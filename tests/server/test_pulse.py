"""A server whose engine core stands still says so, and says so no longer once it goes on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
from running_server import RunningServer, ScriptedEngine, error_of, running

from compiled_engine.server.options import Limits
from compiled_engine.server.pulse import Pulse


class StandsStill(ScriptedEngine):
    """An engine whose core answers nothing while `stands_still` is True."""

    stands_still = False

    async def metrics(self) -> dict[str, Any]:
        while self.stands_still:
            await asyncio.sleep(0.01)
        return {}


def test_health_is_lost_while_the_core_answers_nothing(server: RunningServer) -> None:
    engine = StandsStill(server.engine, ["a"])
    with running(engine, limits=Limits(health_timeout=0.3)) as own:

        def wait_for(status: int) -> httpx.Response:
            deadline = time.monotonic() + 30
            while (response := httpx.get(f"{own.url}/health", timeout=30)).status_code != status:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return response

        assert httpx.get(f"{own.url}/health", timeout=30).status_code == 200
        engine.stands_still = True
        error = error_of(wait_for(503))
        assert "its core has not answered for" in error["message"]
        assert httpx.get(f"{own.url}/ready", timeout=30).status_code == 503
        engine.stands_still = False
        wait_for(200)


def test_the_core_is_asked_once_at_a_time_and_not_by_everybody() -> None:
    asked, may_answer = [], asyncio.Event()

    async def ask() -> None:
        asked.append(1)
        await may_answer.wait()
        raise RuntimeError("a failure is an answer")

    async def run() -> None:
        pulse = Pulse(ask)
        assert pulse.silent_s() == 0
        for _ in range(100):
            await asyncio.sleep(0)
            silent_s = pulse.silent_s()
        assert (len(asked), silent_s > 0) == (1, True)
        may_answer.set()
        await asyncio.sleep(0.01)
        assert {pulse.silent_s() for _ in range(100)} == {0}
        assert len(asked) == 1

    asyncio.run(run())
