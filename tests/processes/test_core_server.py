"""The server loop around a core: messages of several processes, failures and slow readers. The core is scripted."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from left_over import SOON_S, wait_until
from scripted_core import ScriptedCore
from test_core_protocol import ServedCore, receive
from token_masks import OneOf

from compiled_engine.engine.control import ControlError, Failed
from compiled_engine.engine.messages import ControlCall, EngineOutput, EngineRequest
from compiled_engine.processes import core_server
from compiled_engine.processes.channel import Connection, frame
from compiled_engine.processes.core_server import CoreServer
from compiled_engine.processes.wire import (
    Abort,
    Add,
    Answered,
    Control,
    FrontendOptions,
    Start,
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
from compiled_engine.sampling.token_mask import TokenMask

FRONTEND = FrontendOptions(True, "auto")


class HeldCore(ServedCore):
    """Steps only as often as it is allowed to. Every request generates two tokens per step; some are refused."""

    def __init__(self) -> None:
        super().__init__(2)
        self.allowed = 0
        self.masks: dict[str, TokenMask | None] = {}
        self.failure: Exception | None = None
        self.allowed_when_told = 0
        self.told: list[tuple[ControlCall, list[str]]] = []  # with the requests that were there

    def add(self, request: EngineRequest, token_mask: TokenMask | None = None) -> None:
        if request.request_id in self.live:
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        super().add(request, token_mask)
        self.masks[request.request_id] = token_mask

    def call(self, call: ControlCall) -> Any:
        if call.name == "fail":
            raise ControlError("no")
        if call.name == "allow":
            self.allowed += call.arguments["steps"]
            return None
        return {"running": len(self.live)}

    def tell(self, call: ControlCall, request_ids: Sequence[str] = ()) -> None:
        self.told.append((call, sorted(self.live)))
        self.allowed_when_told = self.allowed
        self.allowed = 0

    def can_step(self) -> bool:
        return super().can_step() and (self.allowed > 0 or self.failure is not None)

    def step(self) -> Any:
        if self.failure is not None:
            raise self.failure
        self.allowed -= 1
        return ScriptedCore.step(self)


class Served:
    """A server in a thread, and its starter's connection. The sockets of other connections have small buffers."""

    def __init__(self, core: HeldCore, masks: dict[str, TokenMask]) -> None:
        own, other = socket.socketpair()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of its connections
        given: Any = core
        self.starter: Connection[ToApi] = Connection(own, decode_to_api)
        starter: Connection[ToCore] = Connection(other, decode_to_core)
        self.server = CoreServer(given, FRONTEND, starter, self.listener, masks)
        self.raised: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        (started,) = receive(self.starter)
        assert isinstance(started, Started)
        self.started = started

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self.raised.append(error)

    def join(self) -> tuple[Connection[ToApi], Started]:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(self.listener.getsockname())
        connection = Connection(sock, decode_to_api)
        (started,) = until(connection, lambda message: True)
        assert isinstance(started, Started)
        return connection, started


@pytest.fixture
def core() -> HeldCore:
    return HeldCore()


@pytest.fixture
def masks() -> dict[str, TokenMask]:
    return {}


@pytest.fixture
def served(core: HeldCore, masks: dict[str, TokenMask]) -> Iterator[Served]:
    found = Served(core, masks)
    yield found
    found.starter.close()
    found.thread.join(SOON_S)
    assert not found.thread.is_alive()
    found.listener.close()


def say(connection: Connection[ToApi], *messages: ToCore) -> None:
    connection.send(b"".join(frame(encode(message)) for message in messages))


def add(request_id: str, most: int = 6, **more: Any) -> Add:
    return Add(EngineRequest(request_id, (5, 6, 7), SamplingParams(max_tokens=most, ignore_eos=True, **more)))


def step(connection: Connection[ToApi], number: int, steps: int = 1) -> list[ToApi]:
    """Let the core step, and return the messages until the call's answer, which precedes those of the steps."""
    return ask(connection, number, ControlCall("allow", {"steps": steps}))


def ask(connection: Connection[ToApi], number: int, call: ControlCall) -> list[ToApi]:
    say(connection, Control(number, call))
    return until(connection, lambda message: isinstance(message, Answered) and message.number == number)


def until(connection: Connection[ToApi], is_last: Callable[[ToApi], bool], count: int = 1) -> list[ToApi]:
    """Receive messages until `count` of them meet the condition; later ones may have come with the last."""
    found: list[ToApi] = []
    while sum(map(is_last, found)) < count:
        found += receive(connection)
    return found


def stepped(connection: Connection[ToApi], count: int) -> list[ToApi]:
    """Receive the messages of `count` steps."""
    return until(connection, lambda message: isinstance(message, Stepped), count)


def said(messages: list[ToApi]) -> dict[str, list[int]]:
    """Return the tokens of each request."""
    found: dict[str, list[int]] = {}
    for message in messages:
        for output in message.outputs if isinstance(message, Stepped) else ():
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    return found


def test_each_process_hears_of_its_own_requests(core: HeldCore, served: Served) -> None:
    """Outputs are in columns, or carry more; a process without outputs gets no message."""
    first, second, third = served.starter, *(served.join()[0] for _ in range(2))
    say(first, add("0:a"), add("0:b", logprobs=1), add("0:c", 4))
    say(second, add("1:a", logprobs=1), add("1:b", 4))
    wait_until(lambda: len(core.live) == 5)
    step(third, 1, steps=2)
    heard = [said(stepped(each, 2)) for each in (first, second)]
    assert [sorted(names) for names in heard] == [["0:a", "0:b", "0:c"], ["1:a", "1:b"]]
    assert [len(tokens) for names in heard for tokens in names.values()] == [4, 4, 4, 4, 4]
    wait_until(lambda: len(core.live) == 3)  # two have ended
    assert ask(third, 2, ControlCall("metrics")) == [Answered(2, {"running": 3, "api_processes": 3})]


def test_processes_have_numbers_and_are_told_what_the_first_one_was(core: HeldCore, served: Served) -> None:
    assert not served.listener.getblocking()  # who has connected may have gone again
    others = [served.join()[1] for _ in range(2)]
    assert [each.client for each in (served.started, *others)] == [0, 1, 2]
    for each in others:
        assert replace_client(each) == replace_client(served.started)
    assert served.started.frontend == FRONTEND
    assert served.started.config == core.config


def replace_client(started: Started) -> tuple[Any, ...]:
    return started.config, started.frontend, started.limits


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_process_is_told_whether_priorities_count(core: HeldCore, policy: Any) -> None:
    core.config = replace(core.config, scheduler=replace(core.config.scheduler, policy=policy))
    own, other = socket.socketpair()
    given: Any = core
    CoreServer(given, FRONTEND, Connection(other, decode_to_core))
    (started,) = receive(Connection(own, decode_to_api))
    assert isinstance(started, Started)
    assert started.limits.has_priorities == (policy == "priority")
    assert started.limits.vocab_size == core.config.model.vocab_size
    other.close()
    own.close()


def test_a_mask_is_its_requests_alone(core: HeldCore, served: Served, masks: dict[str, TokenMask]) -> None:
    """It is removed once, whether or not the request is refused."""
    mine, late = OneOf([[5]], 100), OneOf([[6]], 100)
    masks |= {"0:a": mine, "0:b": late}
    say(served.starter, add("0:a"), add("0:c"), add("0:b"))
    wait_until(lambda: len(core.live) == 3)
    assert core.masks == {"0:a": mine, "0:b": late, "0:c": None}
    masks["0:a"] = late
    say(served.starter, add("0:a"))
    (message,) = receive(served.starter)
    assert isinstance(message, Stepped)
    (output,) = message.outputs
    refused = EngineOutput("0:a", (), finish_reason="error", stop_reason="request_id '0:a' is already in use")
    assert output == refused
    assert not masks
    assert "0:a" in core.live


def test_calls_are_answered_to_their_callers(core: HeldCore, served: Served) -> None:
    other, _ = served.join()
    say(served.starter, add("0:a"))
    assert ask(served.starter, 7, ControlCall("metrics")) == [Answered(7, {"running": 1, "api_processes": 2})]
    assert ask(other, 7, ControlCall("fail")) == [Answered(7, error="no")]
    assert ask(other, 8, ControlCall("check_integrity")) == [Answered(8, {"running": 1})]
    other.close()
    wait_until(
        lambda: ask(served.starter, 9, ControlCall("metrics"))[-1] == Answered(9, {"running": 1, "api_processes": 1})
    )


def test_an_abort_tells_the_core_whether_the_output_is_complete(core: HeldCore, served: Served) -> None:
    say(served.starter, *(add(f"0:{name}") for name in "abcd"))
    say(served.starter, Abort(("0:a", "0:nobody", "0:b")), Abort(("0:c",), stopped=True), Abort(("0:a",)))
    ask(served.starter, 1, ControlCall("metrics"))
    assert (core.aborted, core.stopped, list(core.live)) == (["0:a", "0:b", "0:c"], ["0:c"], ["0:d"])


def test_what_has_ended_is_not_ended_again(core: HeldCore, served: Served) -> None:
    """Neither a late abort nor the end of its process does so; its id is free again."""
    other, _ = served.join()
    say(other, add("1:a", 2), add("1:b", 2), add("1:c", 60))
    wait_until(lambda: len(core.live) == 3)
    step(other, 1)
    wait_until(lambda: len(core.live) == 1)
    say(other, Abort(("1:a",)), add("1:b", 60))
    wait_until(lambda: len(core.live) == 2)
    other.close()
    wait_until(lambda: not core.live, SOON_S)
    assert sorted(core.aborted) == ["1:b", "1:c"]
    assert served.thread.is_alive()


def test_a_core_is_started_once(core: HeldCore, served: Served) -> None:
    other, _ = served.join()
    say(other, add("1:a"))
    wait_until(lambda: len(core.live) == 1)
    say(other, Start(core.config, FRONTEND, (), 1, False, 0.0, ()))
    with pytest.raises(EOFError):
        until(other, lambda message: False)
    assert ask(served.starter, 1, ControlCall("metrics"))[-1] == Answered(1, {"running": 0, "api_processes": 1})
    assert core.aborted == ["1:a"]


def test_an_order_without_an_answer_is_served_in_its_turn(core: HeldCore, served: Served) -> None:
    order = ControlCall("set_vocabulary", {"vocab_size": 9})
    say(served.starter, add("0:a"), Tell(order), add("0:b"))
    answers = [each for each in ask(served.starter, 1, ControlCall("metrics")) if isinstance(each, Answered)]
    assert answers == [Answered(1, {"running": 2, "api_processes": 1})]
    assert core.told == [(order, ["0:a"])]


def test_a_long_message_takes_few_steps_to_arrive(core: HeldCore, served: Served) -> None:
    """Of many megabytes, while a request runs."""
    say(served.starter, add("0:a"))
    wait_until(lambda: len(core.live) == 1)
    order = ControlCall("give_inputs", {"data": bytes(32 << 20)})
    core.allowed = most = 1_000_000
    say_slowly(served.starter, Tell(order))
    wait_until(lambda: bool(core.told))
    assert core.told[0][0] == order
    assert most - core.allowed_when_told < 100  # a step for each filling of the socket's buffer would be more


def test_a_step_that_fails_is_told_to_all_and_ends_the_server(core: HeldCore, served: Served) -> None:
    """Also to who has more to read first."""
    other, _ = served.join()
    say(other, add("1:a"))
    wait_until(lambda: len(core.live) == 1)
    core.failure = KeyError("injected")
    say(served.starter, Control(1, ControlCall("metrics")))
    for connection in (served.starter, other):
        failed = until(connection, lambda message: isinstance(message, Failed))[-1]
        assert isinstance(failed, Failed)
        assert (failed.kind, failed.text) == ("KeyError", "'injected'")
        assert "in step" in failed.where
        with pytest.raises(EOFError):
            until(connection, lambda message: False)
    served.thread.join(SOON_S)
    assert served.raised == [core.failure]


def test_last_words_wait_for_a_slow_reader_within_bounds(
    core: HeldCore, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_server, "_LAST_WORDS_S", 1.0)
    reader, silent, quick = (served.join()[0] for _ in range(3))
    for connection, number in ((reader, 1), (silent, 2)):
        params = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=1)
        say_slowly(connection, Add(EngineRequest(f"{number}:a", tuple(range(4000)), params)))
    wait_until(lambda: len(core.live) == 2)
    step(served.starter, 1)
    wait_until(lambda: [each.has_unsent for each in served.server._api_processes] == [False, True, True, False])
    core.failure = KeyError("injected")
    say(served.starter, Control(2, ControlCall("metrics")))
    for connection in (served.starter, quick):
        assert isinstance(until(connection, lambda message: isinstance(message, Failed))[-1], Failed)
    assert served.thread.is_alive()  # it waits for the others
    assert isinstance(until(reader, lambda message: isinstance(message, Failed))[-1], Failed)
    served.thread.join(SOON_S)
    assert not served.thread.is_alive()
    silent.close()


def say_slowly(connection: Connection[ToApi], message: ToCore) -> None:
    say(connection, message)
    while connection.has_unsent:
        connection.wait_writable(1)
        connection.flush()


def test_the_starter_ends_the_server_while_others_are_connected(core: HeldCore, served: Served) -> None:
    other, _ = served.join()
    served.starter.close()
    with pytest.raises(EOFError):
        until(other, lambda message: False)
    served.thread.join(SOON_S)
    assert not served.raised
    with suppress(OSError):
        other.close()
