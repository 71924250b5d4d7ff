"""What the network does to a server: whoever fails, others get the tokens that they get alone, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from faulty_processor import NAME
from prometheus_client.parser import text_string_to_metric_families
from running_server import ENGINE, RunningServer, running

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.server.options import Limits

LIMITS = Limits(max_body_bytes=100_000, receive_timeout=1.0, keep_alive_timeout=1.0)
SMALL_BLOCKS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 40, "max_model_len": 512}
SLOW = {"max_tokens": 400, "ignore_eos": True, "extra_args": {"fault": "slow"}}
OTHER = {"prompt": "def add(a, b):\n", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
URL = "/v1/completions"

Fault = Callable[[httpx.AsyncClient], Awaitable[None]]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One of four rows, with blocks for little more than one long prompt, that takes 16 tokens a step."""
    engine = AsyncLLM(**ENGINE | SMALL_BLOCKS, logits_processors=[NAME], core="in_process")
    with running(engine, limits=LIMITS) as server:
        yield server


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.02)


async def figures(client: httpx.AsyncClient) -> dict[str, float]:
    """Figures without labels, but for the model's name."""
    text = (await client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name.partition(":")[2]: sample.value for sample in samples if set(sample.labels) <= {"model_name"}}


async def text_of(client: httpx.AsyncClient, **asked: Any) -> str:
    response = await client.post(URL, json={**OTHER, **asked})
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def check(server: RunningServer, fault: Fault) -> None:
    """Somebody else has a request under way while it happens; afterwards all blocks, rows and descriptors are free."""

    async def is_idle(client: httpx.AsyncClient) -> bool:
        now = await figures(client)
        held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "completions_in_flight")
        return not any(now[name] for name in held)

    async def run() -> None:
        def client() -> httpx.AsyncClient:
            return httpx.AsyncClient(base_url=server.url, timeout=60)

        async with client() as other, client() as monitor:
            alone = await text_of(other)
            await figures(monitor)
            gc.collect()  # descriptors of earlier tests would make room for new ones
            descriptors = psutil.Process().num_fds()

            async def as_before() -> bool:
                return psutil.Process().num_fds() <= descriptors

            under_way = asyncio.create_task(text_of(other))
            async with client() as failing:
                await fault(failing)
            assert await under_way == alone
            await wait_until(lambda: is_idle(monitor))
            await wait_until(as_before)

    asyncio.run(run())


async def leave_when(
    client: httpx.AsyncClient, asked: dict[str, Any], condition: Callable[[], Awaitable[bool]]
) -> None:
    """Send a request, and go once the condition holds."""
    request = client.build_request("POST", URL, json=asked)
    sending = asyncio.create_task(client.send(request, stream=True))
    await wait_until(condition)
    if sending.done():
        await sending.result().aclose()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


@pytest.mark.product(one_in=1000, each=("stage",))
@pytest.mark.parametrize(("n", "stream"), [(1, True), (3, False)])
@pytest.mark.parametrize("stage", ["queued", "prefilling", "decoding"])
def test_a_client_goes(server: RunningServer, stage: str, n: int, stream: bool) -> None:
    asked: dict[str, Any] = {**SLOW, "prompt": "x", "n": n, "stream": stream, "temperature": 1}
    if stage == "prefilling":
        asked["prompt"] = [7] * 300  # 19 steps

    async def fault(client: httpx.AsyncClient) -> None:
        async def there_are(name: str, count: int) -> bool:
            return (await figures(client))[name] >= count

        if stage == "queued":
            gone = asyncio.Event()
            rows = [
                asyncio.create_task(
                    leave_when(client, {**SLOW, "prompt": "y"}, lambda: asyncio.sleep(0, gone.is_set()))
                )
                for _ in range(4)
            ]
            await wait_until(lambda: there_are("num_requests_running", 4))
            await leave_when(client, asked, lambda: there_are("num_requests_waiting", 2))
            gone.set()
            await asyncio.gather(*rows)
        elif stage == "prefilling":
            before = (await figures(client))["prefix_cache_queries_total"]
            await leave_when(client, asked, lambda: there_are("prefix_cache_queries_total", int(before) + 300))
        else:
            before = (await figures(client))["num_steps_total"]
            await leave_when(client, asked, lambda: there_are("num_steps_total", int(before) + 8))

    check(server, fault)


def test_prompts_that_do_not_all_fit(server: RunningServer) -> None:
    """Long prompts where there are blocks for three: others wait, or are preempted, and all have their tokens."""
    prompts = [[5 + number] * (150 + 20 * number) for number in range(5)]

    async def fault(client: httpx.AsyncClient) -> None:
        alone = [await text_of(client, prompt=prompt) for prompt in prompts[::4]]
        found = await asyncio.gather(*(text_of(client, prompt=prompt) for prompt in prompts))
        assert found[::4] == alone

    check(server, fault)


def test_a_request_that_fails_while_it_is_sampled(server: RunningServer) -> None:
    async def fault(client: httpx.AsyncClient) -> None:
        for stream in (False, True):
            asked = {"prompt": "x", "extra_args": {"fault": "nan"}, "stream": stream}
            assert '"error"' in (await client.post(URL, json=asked)).text

    check(server, fault)


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BROKEN = {
    "nothing": b"",
    "half of its headers": HEAD,
    "half of its body": HEAD + b'content-length: 100\r\n\r\n{"prompt": ',
    "many headers": HEAD + b"a: b\r\n" * 20_000,
    "a long header": HEAD + b"a: " + b"b" * 200_000,
    "a long path": b"GET /" + b"x" * 200_000,
    "a long body": HEAD + b"content-length: 100000000\r\n\r\n" + b" " * 300_000,
    "a long body in chunks": HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"4000\r\n%s\r\n" % (b" " * 0x4000) * 20,
    "brackets": HEAD + b"content-length: 90000\r\n\r\n" + b"[" * 90_000,
    "a whole request": HEAD + b'content-length: 33\r\n\r\n{"prompt": "x", "max_tokens": 9 }',
}


@pytest.mark.parametrize("goes", [False, True])
def test_connections_that_break(server: RunningServer, goes: bool) -> None:
    """Of each kind two: they go at once, without a word, or stay until the server has had enough of them."""
    host, port = server.url.removeprefix("http://").split(":")

    def connect(sent: bytes) -> None:
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            if goes:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(ConnectionError):  # the server may close while more is sent
                connection.sendall(sent)
                while not goes and connection.recv(65536):
                    pass

    async def fault(client: httpx.AsyncClient) -> None:
        await asyncio.gather(*(asyncio.to_thread(connect, sent) for sent in BROKEN.values() for _ in range(2)))
        assert (await client.get("/health")).status_code == 200

    check(server, fault)
