"""Each bound of a server tried at its edge and beyond, beside a second client that asks all the while."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from running_server import RunningServer, error_of

from compiled_engine.server.errors import ApiError
from compiled_engine.server.form_checks import MOST_WAITING, THREADS, FormChecks
from compiled_engine.server.json_body import MOST_CONTAINERS
from compiled_engine.server.options import Limits
from compiled_engine.server.sampling_fields import MOST_ALLOWED, MOST_EXTRA_BYTES

LIMITS = Limits()
# Far above what a request may hold up the event loop, and far below what one without bounds does.
MOST_LATENCY_S = 2.0
LINE = "def f(x):\n    return x + 1  # words and more words\n"
VOCABULARY = list(range(4096))
PART = {"type": "text", "text": "x"}


def text(length: int) -> str:
    return (LINE * (length // len(LINE) + 1))[:length]


def completion(**fields: Any) -> tuple[str, Any]:
    return "/v1/completions", {"prompt": "x", "max_tokens": 1, **fields}


def chat(content: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


# Path and body, then the status, and the field that an error names.
TRIED: dict[str, tuple[tuple[str, Any], int, str | None]] = {
    "a prompt as long as a body": (completion(prompt=text(LIMITS.max_body_bytes * 9 // 10)), 400, "prompt"),
    "a long prompt of which the end is taken": (completion(prompt=text(2 << 20), truncate_prompt_tokens=9), 200, None),
    "a long text to tokenise": (("/tokenize", {"prompt": text(4 << 20)}), 200, None),
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
    "too many of them": (completion(prompt=text(500_000), n=1, prompt_logprobs=20), 400, "prompt_logprobs"),
    "log-probabilities of answers": (completion(n=128, max_tokens=8, logprobs=20), 200, None),
    "allowed tokens": (completion(n=MOST_ALLOWED // 4096, allowed_token_ids=VOCABULARY * 50), 200, None),
    "too many allowed tokens": (completion(n=128, allowed_token_ids=VOCABULARY), 400, "allowed_token_ids"),
    "extra arguments": (completion(n=128, extra_args={"a": "b" * (MOST_EXTRA_BYTES - 9)}), 200, None),
    "too long extra arguments": (completion(extra_args={"a": "b" * MOST_EXTRA_BYTES}), 400, "extra_args"),
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
    asked = {"prompt": text(4 << 20), "max_tokens": 1, "truncate_prompt_tokens": 9}
    httpx.post(f"{server.url}/v1/completions", json=asked, timeout=120)
    before = psutil.Process().memory_info().rss
    for _ in range(2):
        assert httpx.post(f"{server.url}/v1/completions", json=asked, timeout=120).status_code == 200
    assert psutil.Process().memory_info().rss - before < 150 << 20


def test_checks_of_forms_have_a_deadline_and_a_queue() -> None:
    """What a client that goes has not begun is never begun."""

    async def run() -> None:
        checks, go_on, begun = FormChecks(timeout=0.2), threading.Event(), []

        def check() -> str:
            begun.append(1)
            go_on.wait(20)
            return "checked"

        late = [asyncio.ensure_future(checks.run(check, "a form")) for _ in range(THREADS)]
        await asyncio.sleep(0.05)
        gone = [asyncio.ensure_future(checks.run(check, "a form")) for _ in range(MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="the server is busy: 66 requests wait for a check of a form") as busy:
            await checks.run(check, "a form")
        assert (busy.value.status, busy.value.headers["retry-after"]) == (503, "1")
        for each in gone:
            each.cancel()
        for error in await asyncio.gather(*late, return_exceptions=True):
            assert isinstance(error, ApiError)
            assert (error.status, error.param) == (400, "a form")
        go_on.set()
        assert await checks.run(check, "a form") == "checked"
        assert len(begun) == THREADS + 1

    asyncio.run(run())
