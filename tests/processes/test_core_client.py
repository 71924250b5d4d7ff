"""The client of a core: its messages, calls, event loops, and the end of the core. A script replaces the core."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest
from async_engines import run
from small_engines import SMALL
from tiny_models import tiny_config

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.control import ControlError, Failed
from compiled_engine.engine.messages import ControlCall, EngineRequest, RequestLimits, StepOutputs
from compiled_engine.processes.channel import Connection, MessageTooLargeError, frame
from compiled_engine.processes.core_child import CoreChild
from compiled_engine.processes.core_client import CoreClient, EngineDeadError, wait_started
from compiled_engine.processes.wire import (
    Abort,
    Add,
    Answered,
    Control,
    FrontendOptions,
    Started,
    Stepped,
    Tell,
    ToApi,
    ToCore,
    decode_to_api,
    decode_to_core,
    encode,
)
from compiled_engine.sampling.params import SamplingParams


class ScriptedEnd:
    """The other end of a client's connection; see RunningCore. waited_s: timeout with which its end was awaited."""

    address = None

    def __init__(self) -> None:
        self.socket, other = socket.socketpair()
        self.connection: Connection[ToCore] = Connection(other, decode_to_core)
        self.waited_s: list[float] = []

    def how_it_ended(self, timeout_s: float) -> str:
        self.waited_s.append(timeout_s)
        return "it was killed"

    def close(self, timeout_s: float) -> None:
        self.socket.close()
        self.connection.close()

    def say(self, *messages: ToApi) -> None:
        self.connection.send(b"".join(frame(encode(message)) for message in messages))

    def heard(self) -> list[ToCore]:
        found: list[ToCore] = []
        while self.connection.wait_readable(0):
            found += self.connection.receive()
        return found


class Client:
    """A client that records what it passes on."""

    def __init__(self, core: ScriptedEnd) -> None:
        self.outputs: list[StepOutputs] = []
        self.deaths: list[str] = []
        connection: Connection[ToApi] = Connection(core.socket, decode_to_api)
        self.client = CoreClient(core, connection, self.outputs.append, self.deaths.append)


def started() -> Started:
    limits = RequestLimits(
        vocab_size=101, max_model_len=64, num_slots=256, has_priorities=False, yields_tokens=True, max_whole_prompt=None
    )
    return Started(3, tiny_config(), FrontendOptions(True, "auto"), limits)


def request(length: int = 3) -> EngineRequest:
    return EngineRequest("0:a", tuple(range(length)), SamplingParams(max_tokens=4))


def with_client(main: Callable[[CoreClient, ScriptedEnd, Client], Awaitable[None]]) -> None:
    """Run a coroutine with a client that is attached to its event loop."""
    core = ScriptedEnd()
    held = Client(core)

    async def attached() -> None:
        held.client.attach(asyncio.get_running_loop())
        await main(held.client, core, held)

    run(attached())
    held.client.close("the test has ended")
    core.close(0)


def test_a_start_is_waited_for() -> None:
    core = ScriptedEnd()
    core.say(started())
    connection, message = wait_started(core)
    assert message == started()
    core.say(Stepped(StepOutputs([], [], [])))
    assert connection.wait_readable(20)
    assert connection.receive() == [Stepped(StepOutputs([], [], []))]
    core.close(0)


@pytest.mark.parametrize(
    ("kind", "raised", "text"),
    [
        ("ValueError", ValueError, r"no such option\n"),
        ("FileNotFoundError", FileNotFoundError, r"no such option\n"),
        ("OutOfMemoryError", RuntimeError, r"OutOfMemoryError: no such option\n"),
    ],
)
def test_a_start_that_fails_raises_what_the_core_raised(kind: str, raised: type[Exception], text: str) -> None:
    core = ScriptedEnd()
    core.say(Failed(kind, "no such option", "line 7"))
    with pytest.raises(raised, match=rf"^{text}in the engine core:\nline 7"):
        wait_started(core)
    core.close(0)


def test_a_core_that_ends_before_it_starts() -> None:
    core = ScriptedEnd()
    core.connection.close()
    with pytest.raises(EngineDeadError, match="the engine core did not start: it was killed"):
        wait_started(core)
    assert core.waited_s[0] > 0  # its process may need a moment to end
    core.close(0)


def test_a_core_whose_process_ends_before_its_order() -> None:
    """Sending the order is no error of its own: the reason is found as that of every end."""
    core = CoreChild("cpu")
    psutil.Process(core.pid).kill()
    core.how_it_ended(20)
    with pytest.raises(EngineDeadError, match="the engine core did not start: its process was killed by SIGKILL"):
        AsyncLLM(**SMALL, core=core)


def test_what_is_sent() -> None:
    async def main(client: CoreClient, core: ScriptedEnd, held: Client) -> None:
        client.add(request())
        client.abort([])  # nothing to be said
        client.abort(["0:a", "0:b"])
        client.abort(["0:c"], stopped=True)
        assert core.heard() == [
            Add(request()),
            Abort(("0:a", "0:b"), False),
            Abort(("0:c",), True),
        ]

    with_client(main)


def test_a_request_that_is_too_large_is_refused_and_nothing_of_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_engine.processes.channel.LARGEST_MESSAGE", 1000)

    async def main(client: CoreClient, core: ScriptedEnd, held: Client) -> None:
        with pytest.raises(MessageTooLargeError):
            client.add(request(1000))
        client.add(request())
        assert core.heard() == [Add(request())]

    with_client(main)


def test_what_the_core_takes_slowly_arrives_whole() -> None:
    """More than the socket holds, while outputs come."""

    async def main(client: CoreClient, core: ScriptedEnd, held: Client) -> None:
        for _ in range(3):
            client.add(request(60_000))
        core.say(Stepped(StepOutputs(["0:b"], [5], [])))
        found: list[ToCore] = []
        while len(found) < 3 or not held.outputs:
            await asyncio.sleep(0.001)
            found += core.heard()
        assert found == [Add(request(60_000))] * 3
        assert held.outputs == [StepOutputs(["0:b"], [5], [])]

    with_client(main)


def test_calls_get_their_own_answers() -> None:
    """Answers may come in any order; an answer to an abandoned call is dropped."""

    async def main(client: CoreClient, core: ScriptedEnd, held: Client) -> None:
        names = ("first", "second", "third", "fourth")
        calls = [asyncio.create_task(client.call(name, number=index)) for index, name in enumerate(names)]
        await asyncio.sleep(0)
        asked = [message for message in core.heard() if isinstance(message, Control)]
        assert [message.call for message in asked] == [
            ControlCall(name, {"number": index}) for index, name in enumerate(names)
        ]
        calls[1].cancel()
        core.say(Answered(asked[3].number, error="busy"), Answered(asked[1].number, "of nobody"))
        core.say(Answered(asked[2].number, {"a": 3}), Answered(asked[0].number), Answered(asked[0].number, "again"))
        assert await calls[0] is None
        assert await calls[2] == {"a": 3}
        with pytest.raises(ControlError, match=r"^busy$"):
            await calls[3]
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        assert not held.deaths

    with_client(main)


ENDS: list[tuple[Callable[[ScriptedEnd], None], str]] = [
    (lambda core: core.connection.close(), "the engine core has ended: it was killed"),
    (lambda core: core.say(Failed("KeyError", "'a'", "")), "the engine core has ended: a step failed: KeyError: 'a'"),
    (lambda core: core.connection.send(b"\0\0\0\1\xc1"), "the engine core has ended: its messages cannot be read: "),
    (lambda core: core.connection.send(b"\xff" * 9), "its messages cannot be read: MessageTooLargeError: a message"),
    (lambda core: core.say(started()), "the engine core has ended: it said a second time that it has started"),
]


@pytest.mark.parametrize(("end", "reason"), ENDS, ids=["gone", "failed", "no message", "too large", "started twice"])
def test_the_end_of_the_core_is_told_once_to_everyone(end: Callable[[ScriptedEnd], None], reason: str) -> None:
    """Outputs before it are passed on, unless they came with what cannot be read, and none after it."""

    async def main(client: CoreClient, core: ScriptedEnd, held: Client) -> None:
        call, watcher, other = (
            asyncio.create_task(each) for each in (client.call("metrics"), client.wait_dead(), client.wait_dead())
        )
        await asyncio.sleep(0)
        other.cancel()
        core.say(Stepped(StepOutputs(["0:a"], [7], [])))
        end(core)
        with suppress(OSError):
            core.say(Stepped(StepOutputs(["0:a"], [8], [])))
        with pytest.raises(EngineDeadError, match=reason):
            await call
        assert reason in await watcher
        assert client.dead is not None
        assert reason in client.dead
        assert held.deaths == [client.dead]
        assert held.outputs == ([] if "cannot be read" in reason else [StepOutputs(["0:a"], [7], [])])
        assert await client.wait_dead() == client.dead
        with pytest.raises(EngineDeadError, match=reason):
            await client.call("metrics")
        client.add(request())  # ignored, as are all later ones
        client.abort(["0:a"])
        client.close("later")
        assert reason in client.dead
        client.attach(asyncio.get_running_loop())  # reads nothing
        await asyncio.sleep(0)
        assert len(held.deaths) == 1

    with_client(main)


def test_more_is_sent_when_the_core_has_taken_what_came_before() -> None:
    async def main(client: CoreClient, core: ScriptedEnd, held: Client) -> None:
        await client.drained()
        order = ControlCall("give_inputs", {"data": bytes(8 << 20)})
        client.tell(order, ["0:a"])
        waiting = asyncio.create_task(client.drained())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        heard: list[ToCore] = []
        while not heard:
            heard += core.heard()
            await asyncio.sleep(0)
        await waiting
        assert heard == [Tell(order, ("0:a",))]
        client.tell(order)
        waiting = asyncio.create_task(client.drained())
        core.connection.close()
        await waiting

    with_client(main)


def test_an_order_is_sent_in_its_turn_and_awaits_no_answer() -> None:
    async def main(client: CoreClient, core: ScriptedEnd, held: Client) -> None:
        order = ControlCall("set_vocabulary", {"vocab_size": 9})
        client.tell(order)
        client.add(request())
        assert core.heard() == [Tell(order), Add(request())]
        core.connection.close()
        await client.wait_dead()
        with pytest.raises(EngineDeadError, match=r"^the engine core has ended"):
            client.tell(order)

    with_client(main)


def test_a_closed_client_reports_no_death() -> None:
    """Pending calls fail with the given reason."""

    async def main(client: CoreClient, core: ScriptedEnd, held: Client) -> None:
        call, watcher = (asyncio.create_task(each) for each in (client.call("metrics"), client.wait_dead()))
        await asyncio.sleep(0)
        client.close("the engine was shut down")
        client.close("again")
        with pytest.raises(EngineDeadError, match=r"^the engine was shut down$"):
            await call
        assert await watcher == client.dead == "the engine was shut down"
        assert client.loop is None
        assert [type(message) for message in core.connection.receive()] == [Control]
        with pytest.raises(EOFError):
            core.connection.receive()
        assert held.deaths == []

    with_client(main)


def test_the_next_event_loop_goes_on() -> None:
    """It sends and reads what the previous loop has left; the previous loop's calls get no answer."""
    core = ScriptedEnd()
    held = Client(core)
    client = held.client

    async def first() -> None:
        client.attach(asyncio.get_running_loop())
        assert client.loop is asyncio.get_running_loop()
        with suppress(TimeoutError):
            await asyncio.wait_for(client.call("metrics"), 0.001)
        for _ in range(2):
            client.add(request(60_000))
        core.say(Stepped(StepOutputs(["0:a"], [1], [])))

    async def second() -> Any:
        client.attach(asyncio.get_running_loop())
        call = asyncio.create_task(client.call("metrics"))
        numbers: list[int] = []
        added = 0
        while len(numbers) < 2 or added < 2:
            await asyncio.sleep(0.001)
            for message in core.heard():
                if isinstance(message, Control):
                    numbers.append(message.number)
                added += isinstance(message, Add)
        core.say(*(Answered(number, number) for number in numbers))
        assert await call == numbers[1] != numbers[0]

    run(first())
    run(second())
    assert held.outputs == [StepOutputs(["0:a"], [1], [])]
    assert not held.deaths
    client.close("the end")
    core.close(0)
