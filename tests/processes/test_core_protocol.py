"""What the core makes of other processes' messages, and messages as frames."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace

import pytest
from async_engines import ENGINE, LONG, collect, idle, run
from hypothesis import given
from hypothesis import strategies as st
from left_over import SOON_S, wait_until
from scripted_core import ScriptedCore
from small_engines import PROMPTS
from tiny_models import tiny_config

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.messages import EngineOutput, EngineRequest, StepOutputs
from compiled_engine.features.prompt_logprobs.extras import rows_in
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.pooling import Pooling
from compiled_engine.processes.channel import Connection, FrameReader, MessageTooLargeError, frame
from compiled_engine.processes.core_child import ForeignCore
from compiled_engine.processes.core_client import wait_started
from compiled_engine.processes.core_server import CoreServer, frames_of
from compiled_engine.processes.wire import (
    Abort,
    Add,
    Answered,
    FrontendOptions,
    Started,
    Stepped,
    ToApi,
    decode_to_api,
    decode_to_core,
    encode,
)
from compiled_engine.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llm(one_thread: None) -> Iterator[LLM]:
    with LLM(**ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**ENGINE)
    yield engine
    asyncio.run(engine.shutdown())


def other_end(engine: AsyncLLM) -> tuple[Connection[ToApi], Started]:
    """Return a connection to the core, as another process would have."""
    assert engine.address is not None
    return wait_started(ForeignCore(engine.address))


def receive(connection: Connection[ToApi]) -> list[ToApi]:
    assert connection.wait_readable(60)
    return connection.receive()


def receive_for_ever(connection: Connection[ToApi]) -> None:
    while True:
        receive(connection)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,
        frame(b"no message"),
        frame(encode(Add(EngineRequest("id", (5,), LONG))).replace(b"prompt_token_ids", b"prompt_token_idz")),
        frame(encode(Answered(1, {}))),
    ],
    ids=["too long", "no message", "field missing", "for the other end"],
)
def test_who_sends_what_is_no_message_is_dropped(engine: AsyncLLM, llm: LLM, data: bytes) -> None:
    """Requests of other processes continue."""

    async def main() -> list[RequestOutput]:
        connection, _ = other_end(engine)
        async with aclosing(engine.generate(PROMPTS[0], LONG)) as stream:
            await anext(stream)
            connection.send(data)
            with pytest.raises((EOFError, ConnectionResetError)):
                receive_for_ever(connection)
            connection.close()
            return await collect(stream)

    assert run(main())[-1].outputs == llm.generate(PROMPTS[0], LONG, use_tqdm=False)[0].outputs
    assert run(idle(engine))["api_processes"] == 1


def test_who_does_not_read_holds_up_nobody(engine: AsyncLLM, llm: LLM) -> None:
    """Megabytes of log-probabilities wait for one process, while another is served."""
    params = SamplingParams(temperature=0, prompt_logprobs=-1, max_tokens=2)
    connection, started = other_end(engine)

    async def main() -> RequestOutput:
        before = await idle(engine)
        for number in range(4):
            request = EngineRequest(f"{started.client}:{number}", tuple([7 + number] * 50), params)
            connection.send(frame(encode(Add(request))))
        while (await engine.metrics())["finished"] < before["finished"] + 4:
            await asyncio.sleep(0.01)
        (output,) = await collect(engine.generate(PROMPTS[0], LONG, output="final"))
        return output

    assert run(main()).outputs == llm.generate(PROMPTS[0], LONG, use_tqdm=False)[0].outputs
    entries, ended = 0, 0
    while ended < 4:
        for message in receive(connection):
            assert isinstance(message, Stepped)
            for output in message.outputs:
                entries += len(found[1]) if (found := rows_in(output.extras)) else 0
                ended += output.finish_reason == "length"
    assert entries == 4 * 49
    connection.close()


def test_a_request_that_the_core_refuses_ends(engine: AsyncLLM) -> None:
    """What the frontend would have refused, sent by another process."""
    connection, started = other_end(engine)
    for request_id, length in (("a", 64), ("b", 3), ("b", 3)):
        request = EngineRequest(f"{started.client}:{request_id}", (5,) * length, LONG)
        connection.send(frame(encode(Add(request))))
    ends: dict[str, list[EngineOutput]] = {"a": [], "b": []}
    while sum(map(len, ends.values())) < 3:
        for message in receive(connection):
            assert isinstance(message, Stepped)
            for output in message.outputs:
                if output.finish_reason is not None:
                    ends[output.request_id.partition(":")[2]].append(output)
    assert "must have at most 63 tokens" in str(ends["a"][0].stop_reason)
    assert "is already in use" in str(ends["b"][0].stop_reason)
    assert [end.finish_reason for end in (*ends["a"], *ends["b"])] == ["error", "error", "length"]
    connection.close()


def test_a_request_is_aborted_by_its_owner_alone(engine: AsyncLLM, llm: LLM) -> None:
    """Aborts from other processes are ignored."""
    (owner, started), (other, _) = other_end(engine), other_end(engine)
    request_id = f"{started.client}:mine"
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    owner.send(frame(encode(Add(EngineRequest(request_id, (5, 6, 7), params)))))
    taken: list[int] = []
    reason = None
    while reason is None:
        other.send(frame(encode(Abort((request_id,)))))
        for message in receive(owner):
            assert isinstance(message, Stepped)
            pairs = zip(message.outputs.request_ids, message.outputs.token_ids, strict=True)
            taken += [token_id for name, token_id in pairs if name == request_id]
            for output in message.outputs.others:
                taken += output.new_token_ids
                reason = reason or output.finish_reason
    assert (reason, len(taken)) == ("length", 40)
    owner.close()
    other.close()


class ServedCore(ScriptedCore):
    """Provides what a CoreServer needs of a core; every request generates its maximum of tokens, slowly."""

    bell = None
    num_slots = 1 << 20

    def __init__(self, tokens_a_step: int) -> None:
        super().__init__(
            lambda request: range(1 << 20), tokens_a_step=tokens_a_step, before_step=lambda step: time.sleep(1e-3)
        )
        self.config = tiny_config()

    def can_step(self) -> bool:
        return self.has_unfinished()


@contextmanager
def served(core: ServedCore) -> Iterator[tuple[Connection[ToApi], Started]]:
    """Serve the core, and connect a further process to it."""
    starter, own = socket.socketpair()
    with starter, socket.create_server(("127.0.0.1", 0)) as listener:
        starter_end = Connection(own, decode_to_core)
        server = CoreServer(core, FrontendOptions(True, "auto"), starter_end, listener)  # type: ignore[arg-type]
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        connection = Connection(socket.create_connection(listener.getsockname()), decode_to_api)
        (started,) = receive(connection)
        assert isinstance(started, Started)
        try:
            yield connection, started
        finally:
            starter.close()
            thread.join(SOON_S)
            connection.close()


def test_a_process_is_told_the_limits_of_the_model() -> None:
    """It can then refuse a request before sending it. An encoder computes a text in one step."""
    generates, pools = ServedCore(1), ServedCore(1)
    pooling = Pooling("embed", ("mean",), (), "normalise")
    pools.config = replace(pools.config, model=replace(pools.config.model, causal=False, pooling=pooling))
    for core, step_tokens in ((generates, None), (pools, pools.config.scheduler.max_num_batched_tokens)):
        with served(core) as (_, started):
            limits = started.limits
        assert (limits.yields_tokens, limits.max_whole_prompt) == (core is generates, step_tokens)
        assert (limits.max_model_len, limits.num_slots) == (core.config.model.max_model_len, core.num_slots)


def test_a_request_whose_output_is_too_large_for_a_message_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ServedCore(3000)
    with served(core) as (connection, started):
        monkeypatch.setattr("compiled_engine.processes.channel.LARGEST_MESSAGE", 2000)
        request_id = f"{started.client}:0"
        params = SamplingParams(max_tokens=1 << 19, ignore_eos=True)
        connection.send(frame(encode(Add(EngineRequest(request_id, (5, 6, 7), params)))))
        (message,) = receive(connection)
        assert isinstance(message, Stepped)
        (output,) = message.outputs
        assert (output.request_id, output.finish_reason) == (request_id, "error")
        wait_until(lambda: not core.live, SOON_S)
    assert core.aborted == [request_id]


@given(st.lists(st.binary(max_size=300)), st.randoms(use_true_random=False))
def test_frames_are_read_whatever_the_pieces(payloads: list[bytes], choose: random.Random) -> None:
    data = b"".join(map(frame, payloads))
    reader, found = FrameReader(), []
    while data:
        size = choose.randint(1, 400)
        found += reader.feed(data[:size])
        data = data[size:]
    assert found == payloads


def test_a_step_that_is_too_large_for_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is divided; what one request got and is too large by itself becomes an error of that request."""
    monkeypatch.setattr("compiled_engine.processes.channel.LARGEST_MESSAGE", 1000)
    small = [EngineOutput(f"0:{number}", (5,), num_cached_tokens=0) for number in range(40)]
    large = EngineOutput("0:40", tuple(range(1000)))
    step = StepOutputs([f"0:{number}" for number in range(50, 90)], list(range(40)), [*small, large])
    given_up: list[str] = []
    frames = frames_of(Stepped(step), given_up.append)
    messages = [decode_to_api(payload) for payload in FrameReader().feed(b"".join(frames))]
    outputs = [output for message in messages if isinstance(message, Stepped) for output in message.outputs]
    assert {len(frame) <= 1004 for frame in frames} == {True}
    by_id = {output.request_id: output for output in outputs[:-1]}
    assert by_id == {output.request_id: output for output in list(step)[:-1]}
    assert len(by_id) == len(outputs) - 1
    assert (outputs[-1].request_id, outputs[-1].new_token_ids, outputs[-1].finish_reason) == ("0:40", (), "error")
    assert "a message must have at most 1000 bytes" in str(outputs[-1].stop_reason)
    assert given_up == ["0:40"]
    with pytest.raises(MessageTooLargeError):
        frame(encode(Add(EngineRequest("0:0", tuple(range(1000)), LONG))))
