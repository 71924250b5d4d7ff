"""Salts of the prefix cache: who may find out by the clock that somebody's prompt began like theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running_server import ENGINE, RunningServer, running

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.block_pool import hash_block
from compiled_engine.engine.messages import prefix_root
from compiled_engine.frontend.prompts import LONGEST_SALT
from compiled_engine.server.options import ServerOptions

PROMPT = list(range(40, 140))


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningServer]:
    engine = AsyncLLM(**ENGINE, core="in_process")
    with running(engine, api_key=("one", "two"), prefix_cache_salt_per_key=True) as server:
        yield server


def cached(server: RunningServer, path: str = "completions", key: str = "one", **asked: Any) -> int:
    """Tokens of the prompt that came from the cache."""
    headers = {"authorization": f"Bearer {key}"}
    response = httpx.post(f"{server.url}/v1/{path}", json={"max_tokens": 1, **asked}, headers=headers, timeout=30)
    assert response.status_code == 200, response.text
    found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_keys_share_nothing(keyed: RunningServer) -> None:
    assert cached(keyed, prompt=PROMPT) == 0
    shared = cached(keyed, prompt=PROMPT)
    assert shared > 50
    assert cached(keyed, key="two", prompt=PROMPT) == 0
    assert cached(keyed, key="two", prompt=PROMPT) == shared
    assert cached(keyed, prompt=PROMPT, cache_salt="x") == 0
    assert cached(keyed, key="two", prompt=PROMPT, cache_salt="x") == 0
    assert cached(keyed, prompt=PROMPT, cache_salt="x") == shared


def test_a_request_may_have_a_salt(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "x = 1\n" * 20}]
    for path, prompt in (("completions", {"prompt": "y = 2\n" * 20}), ("chat/completions", {"messages": messages})):
        found = [cached(server, path, **prompt, cache_salt=salt) for salt in ("a", "a", "b", None, None)]
        assert [tokens > 0 for tokens in found] == [False, True, False, False, True]


@pytest.mark.parametrize("salt", ["", "x" * (LONGEST_SALT + 1), 7, ["x"]])
def test_salts_have_bounds(server: RunningServer, salt: Any) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "cache_salt": salt}, timeout=60)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")


def test_a_salt_is_none_of_the_tokens() -> None:
    roots = [prefix_root(salt=salt) for salt in (None, "a", "b", "\0" * 32)]
    assert len({hash_block(root, b"\1\2") for root in roots}) == len(roots)


def test_a_salt_per_key_needs_keys() -> None:
    with pytest.raises(ValueError, match="prefix_cache_salt_per_key"):
        ServerOptions(prefix_cache_salt_per_key=True)
