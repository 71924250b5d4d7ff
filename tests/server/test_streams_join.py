"""Events of a stream join to the whole answer, field by field; `prompt_logprobs` alone are in none."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import httpx
import pytest
from running_server import RunningServer

ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def add(a, b):\n", "logprobs": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "import os"}],
        **{"logprobs": True, "top_logprobs": 2},
    },
}
# No answer finds the prompt of another in the cache: usage would differ.
salts = map(str, count())


def answered(server: RunningServer, path: str, **more: Any) -> httpx.Response:
    body = {**ASKED[path], "temperature": 0, "max_tokens": 12, "return_token_ids": True, "cache_salt": next(salts)}
    response = httpx.post(server.url + path, json={**body, **more}, timeout=60)
    assert response.status_code == 200, response.text
    return response


def events(server: RunningServer, path: str, **more: Any) -> list[dict[str, Any]]:
    text = answered(server, path, stream=True, stream_options={"include_usage": True}, **more).text
    *lines, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def joined(parts: list[Any]) -> Any:
    """Texts and lists one after the other, objects field by field; of anything else the last that there is."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    if isinstance(there[0], dict):
        names = dict.fromkeys(name for part in there for name in part)
        return {name: joined([part.get(name) for part in there]) for name in names}
    if isinstance(there[0], list):
        return [item for part in there for item in part]
    return there[-1]


def joined_choice(choices: list[dict[str, Any]]) -> dict[str, Any]:
    choice = joined(choices)
    if "text" in choice:
        return choice | {"text": "".join(part["text"] for part in choices)}
    delta = choice.pop("delta") | {"content": "".join(part["delta"].get("content", "") for part in choices)}
    return choice | {"message": {"reasoning": None, "reasoning_content": None, **delta}}


@pytest.mark.parametrize("end", ["length", "stop token", "stop string"])
@pytest.mark.parametrize("path", ASKED)
def test_a_stream_has_every_field_of_the_whole_answer(server: RunningServer, path: str, end: str) -> None:
    (choice,) = answered(server, path, ignore_eos=True).json()["choices"]
    text = choice["text"] if path == "/v1/completions" else choice["message"]["content"]
    stops = {
        "length": {},
        "stop token": {"stop_token_ids": choice["token_ids"][5:6]},
        "stop string": {"stop": text[4:8]},
    }
    whole = answered(server, path, ignore_eos=True, **stops[end]).json()
    *parts, last = events(server, path, ignore_eos=True, **stops[end])
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    (expected,) = whole["choices"]
    found = joined_choice([choice for part in parts for choice in part["choices"]])
    assert expected.pop("prompt_logprobs", None) is None
    assert found == expected
    assert (found["finish_reason"], found["stop_reason"] is None) == (end.split(maxsplit=1)[0], end == "length")
    assert joined([part.get("prompt_token_ids") for part in parts]) == whole.get("prompt_token_ids")


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_has_every_completion_of_the_whole_answer(server: RunningServer, path: str) -> None:
    more = {"n": 3, "temperature": 1.0, "seed": 7, "logprobs": None, "top_logprobs": None}
    whole = answered(server, path, **more).json()["choices"]
    parts = [choice for part in events(server, path, **more) for choice in part["choices"]]
    assert [each["index"] for each in whole] == [0, 1, 2]
    for expected in whole:
        assert expected.pop("prompt_logprobs", None) is None
        assert joined_choice([part for part in parts if part["index"] == expected["index"]]) == expected
