"""Each bound of a server tried at its edge and beyond, beside a second client that asks all the while."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from running_server import RunningServer, error_of
from serve_process import SMALL, served

from compiled_engine.process.smallest_first import TakesLong
from compiled_engine.server.errors import ApiError
from compiled_engine.server.json_size import MOST_CONTAINERS
from compiled_engine.server.long_work import MOST_LARGE, LongWork
from compiled_engine.server.options import Limits
from compiled_engine.server.sampling_fields import MOST_ALLOWED, MOST_EXTRA_BYTES

LIMITS = Limits()
# Far above what a request may hold up the event loop, and far below what one without bounds does.
MOST_LATENCY_S = 2.0
HELD_UP_S = 20.0  # a busy machine may take seconds; an attack's own work takes minutes
LINE = "def f(x):\n    return x + 1  # words and more words\n"
VOCABULARY = list(range(4096))
PART = {"type": "text", "text": "x"}


def text(length: int) -> str:
    return (LINE * (length // len(LINE) + 1))[:length]


def completion(**fields: Any) -> tuple[str, Any]:
    return "/v1/completions", {"prompt": "x", "max_tokens": 1, **fields}


def chat(content: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def conversation(messages: int, **fields: Any) -> tuple[str, Any]:
    message = {"role": "user", "content": "x"}
    return "/v1/chat/completions", {"messages": [message] * messages, "max_tokens": 1, **fields}


# Path and body, then the status, and the field that an error names.
TRIED: dict[str, tuple[tuple[str, Any], int, str | None]] = {
    "a prompt as long as a body": (completion(prompt=text(LIMITS.max_body_bytes * 9 // 10)), 400, "prompt"),
    "a long prompt of which the end is taken": (completion(prompt=text(1 << 20), truncate_prompt_tokens=9), 200, None),
    "a long text to tokenise": (("/tokenize", {"prompt": text(1 << 20)}), 200, None),
    "as many token ids as values": (completion(prompt=[5] * (LIMITS.max_json_values - 3)), 400, "prompt"),
    "as many prompts as arrays": (completion(prompt=[[5]] * (MOST_CONTAINERS - 2)), 400, "prompt"),
    "more arrays": (completion(prompt=[[5]] * (LIMITS.max_json_values // 2)), 400, None),
    "as many parts as objects": (chat([PART] * (MOST_CONTAINERS - 4)), 400, "messages"),
    "more objects": (chat([PART] * (LIMITS.max_json_values // 2 - 9)), 400, None),
    "more values": (completion(prompt=[5] * (LIMITS.max_json_values + 1)), 400, None),
    "as many prompts as completions": (completion(prompt=["x"] * LIMITS.max_completions), 200, None),
    "many tokens to detokenise": (("/detokenize", {"tokens": [11] * (LIMITS.max_json_values - 1)}), 200, None),
    "many bad words": (completion(bad_words=["ab" * 512] * LIMITS.max_token_list), 200, None),
    "log-probabilities of a prompt": (completion(prompt=[5] * 250, n=128, prompt_logprobs=20), 200, None),
    "more of them": (
        completion(prompt=[[5] * 250] * 2, n=64, prompt_logprobs=20, echo=True, max_tokens=0, logprobs=20),
        200,
        None,
    ),
    "log-probabilities of answers": (completion(n=128, max_tokens=8, logprobs=20), 200, None),
    "allowed tokens": (completion(n=MOST_ALLOWED // 4096, allowed_token_ids=VOCABULARY * 50), 200, None),
    "as many messages": (conversation(LIMITS.max_messages), 400, "messages"),  # more than fit into the context length
    "extra arguments": (completion(n=128, extra_args={"a": "b" * (MOST_EXTRA_BYTES - 9)}), 200, None),
}


@pytest.fixture(scope="module")
def latencies(server: RunningServer) -> Iterator[list[float]]:
    """Seconds that each answer to a second client took so far."""
    found: list[float] = []
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            while not done.wait(0.02):
                begun = time.monotonic()
                assert client.get("/health").status_code == 200
                found.append(time.monotonic() - begun)

    asking = threading.Thread(target=ask)
    asking.start()
    yield found
    done.set()
    asking.join()


@pytest.mark.parametrize("name", TRIED)
def test_a_bound_holds_and_others_are_answered_meanwhile(
    name: str, server: RunningServer, latencies: list[float]
) -> None:
    (path, body), status, field = TRIED[name]
    content = json.dumps(body).encode()  # in this process, so it holds up the server: not counted
    before = len(latencies) + 1
    while len(latencies) < before:
        time.sleep(0.01)
    headers = {"content-type": "application/json"}
    response = httpx.post(server.url + path, content=content, headers=headers, timeout=120)
    assert response.status_code == status, response.text[:500]
    if status != 200:
        assert error_of(response)["param"] == field
    while len(latencies) <= before:
        time.sleep(0.01)
    assert max(latencies[before:]) < MOST_LATENCY_S


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (completion(prompt=text(300_000)), "prompt"),
        (completion(prompt=text(300_000), add_special_tokens=False), "prompt"),
        (chat(text(300_000)), "messages"),
        (chat(text(300_000) + "<|im_end|>"), "messages"),
    ],
    ids=["prompt", "prompt without special tokens", "chat", "chat with what looks like a special token"],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    asked: tuple[str, Any], field: str, server: RunningServer
) -> None:
    path, body = asked
    response = httpx.post(server.url + path, json=body, timeout=60)
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, field, "context_length_exceeded")
    assert "got at least" in error["message"]


def test_memory_comes_back(server: RunningServer) -> None:
    """Of long texts, which take a hundred bytes a character while they are tokenised."""

    def memory_after(length: int) -> int:
        asked = {"prompt": text(length), "max_tokens": 1, "truncate_prompt_tokens": 9}
        assert httpx.post(f"{server.url}/v1/completions", json=asked, timeout=120).status_code == 200
        return psutil.Process().memory_info().rss

    before = memory_after(20_000)
    assert max(memory_after(2 << 20) for _ in range(2)) - before < 100 << 20


def test_long_work_has_a_deadline_and_a_queue() -> None:
    """What a client that goes has not begun is never begun, and small work waits for no large one."""

    async def run() -> None:
        long_work, go_on, begun = LongWork("a test", 10, timeout=0.2), threading.Event(), []

        def work() -> str:
            begun.append(1)
            go_on.wait(20)
            return "done"

        late = asyncio.ensure_future(long_work.run("a form", 11, work))
        await asyncio.sleep(0.05)
        gone = [asyncio.ensure_future(long_work.run("a form", 11, work)) for _ in range(MOST_LARGE - 1)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="the server is busy: a form would wait for 64 other requests") as busy:
            await long_work.run("a form", 11, work)
        assert (busy.value.status, busy.value.headers["retry-after"]) == (503, "1")
        assert await long_work.run("a form", 10, lambda: "small") == "small"
        for each in gone:
            each.cancel()
        (error,) = await asyncio.gather(late, return_exceptions=True)
        assert isinstance(error, ApiError)
        assert (error.status, error.param) == (400, "a form")
        go_on.set()
        assert await long_work.run("a form", 11, work) == "done"
        assert len(begun) == 2

    asyncio.run(run())


def test_work_that_takes_long_is_done_again_as_large_work() -> None:
    async def run() -> None:
        long_work, go_on, tried = LongWork("a test", 10, timeout=20.0), threading.Event(), set()

        def work(number: int) -> int:
            if number not in tried:
                tried.add(number)
                raise TakesLong
            go_on.wait(20)
            return number

        large = [asyncio.ensure_future(long_work.run("a form", 1, lambda n=n: work(n))) for n in range(MOST_LARGE)]
        while len(tried) < MOST_LARGE:
            assert await long_work.run("a form", 1, lambda: "small") == "small"
        await asyncio.sleep(0.05)  # the last of them comes back
        with pytest.raises(ApiError, match="the server is busy: a form would wait for 64 other requests"):
            await long_work.run("a form", 11, lambda: None)
        go_on.set()
        assert await asyncio.gather(*large) == list(range(MOST_LARGE))

    asyncio.run(run())


ATTACK = """
import socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
body = sys.stdin.buffer.read()
connections = [socket.create_connection((host, port)) for _ in range(count)]
head = b"POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/json\\r\\ncontent-length: %d"
for each in connections:
    each.sendall(head % len(body) + b"\\r\\n\\r\\n" + body)
for each in connections:
    each.close()
"""


def test_clients_that_send_large_schemas_and_go_hold_up_nobody() -> None:
    """Though each of them asks for a check that takes a quarter of a second, of a form that has not been checked."""
    choice = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": ["a"]}}
    with served(**{f"COMPILED_ENGINE_{name.upper()}": str(value) for name, value in SMALL.items()}) as server:
        httpx.post(f"{server.url}/v1/completions", json=choice, timeout=60).raise_for_status()
        properties = {f"p{i}": {"type": "object", "properties": {"a": {"enum": ["x", f"y{i}"]}}} for i in range(1300)}
        schema = {"type": "object", "properties": properties}
        body = json.dumps({"prompt": "x", "structured_outputs": {"json": schema}}).encode()
        url = httpx.URL(server.url)
        command = [sys.executable, "-c", ATTACK, url.host, str(url.port), "700"]
        attack = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert attack.stdin is not None
        attack.stdin.write(body)
        attack.stdin.close()
        taken = []
        for _ in range(20):
            begun = time.monotonic()
            httpx.post(f"{server.url}/v1/completions", json=choice, timeout=60).raise_for_status()
            taken.append(time.monotonic() - begun)
        assert attack.wait(60) == 0
    assert max(taken) < HELD_UP_S


def test_long_texts_hold_up_nobody(server: RunningServer, latencies: list[float]) -> None:
    """More of them at once than there are threads: others' forms are checked, and their texts tokenised."""
    body = json.dumps({"prompt": text(1 << 19)}).encode()
    truncated = json.dumps(completion(prompt=text(1 << 19), truncate_prompt_tokens=9)[1]).encode()
    headers = {"content-type": "application/json"}
    statuses = []

    def ask(path: str, content: bytes) -> None:
        response = httpx.post(server.url + path, content=content, headers=headers, timeout=120)
        statuses.append(response.status_code)

    asked = [("/tokenize", body)] * 6 + [("/v1/completions", truncated)] * 8
    attack = [threading.Thread(target=ask, args=each) for each in asked]
    for thread in attack:
        thread.start()
    time.sleep(0.2)
    begun = time.monotonic()
    choice = completion(structured_outputs={"choice": ["a"]})[1]
    httpx.post(f"{server.url}/v1/completions", json=choice, timeout=60).raise_for_status()
    assert httpx.post(f"{server.url}/tokenize", json={"prompt": text(20_000)}, timeout=60).status_code == 200
    taken = time.monotonic() - begun
    assert len(statuses) < len(attack)
    for thread in attack:
        thread.join()
    assert taken < HELD_UP_S
    assert {*statuses} <= {200, 400}  # 400 where the time for texts was over
