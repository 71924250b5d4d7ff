"""Chat templates come from the server, run within bounds, and tell nothing of it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from running_server import RunningServer, ScriptedEngine, running

from compiled_engine.frontend.prompts import has_long_text
from compiled_engine.server.options import Limits

USER = {"role": "user", "content": "x"}
# Its time grows with the cube of the number of messages.
SLOW = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}x"
EFFORT = "{{ reasoning_effort }}{{ messages[0].content }}"
TELLING = "{{ raise_exception('in /home/someone/template.jinja at 0x7f0012345678') }}"


def chat(server: RunningServer, messages: list[dict[str, Any]], **asked: Any) -> dict[str, Any]:
    """The error of the answer."""
    body = {"messages": messages, "max_tokens": 1, **asked}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    "given",
    [{"anything": 1}, {"messages": []}, {"enable_thinking": "x" * 300}, {"enable_thinking": ["x"]}, {"thinking": {}}],
)
def test_variables_come_from_a_list_and_are_short(server: RunningServer, given: dict[str, Any]) -> None:
    assert chat(server, [USER], chat_template_kwargs=given)["param"] == "chat_template_kwargs"
    for asked in ({"messages": [USER]}, {"prompt": "x"}):
        for settings, status in ((given, 400), ({"enable_thinking": False}, 200)):
            body = {**asked, "chat_template_kwargs": settings}
            assert httpx.post(f"{server.url}/tokenize", json=body).status_code == status


def test_the_effort_is_short(server: RunningServer) -> None:
    with running(ScriptedEngine(server.engine, ["a"]), chat_template=EFFORT) as own:
        assert chat(own, [USER], reasoning_effort="x" * 300)["param"] == "reasoning_effort"
        asked = {"input": "x", "reasoning": {"effort": "x" * 300}}
        assert httpx.post(f"{own.url}/v1/responses", json=asked).status_code == 400
        body = {"messages": [USER], "reasoning_effort": "high"}
        assert httpx.post(f"{own.url}/v1/chat/completions", json=body).status_code == 200
        schemas = httpx.get(f"{own.url}/openapi.json").json()["components"]["schemas"]
        assert "256" in str(schemas["ChatRequest"]["properties"]["reasoning_effort"])


def test_a_request_brings_no_template(server: RunningServer) -> None:
    assert chat(server, [USER], chat_template="{{ 1 }}")["param"] == "chat_template"


def test_a_conversation_that_takes_too_long_is_refused(server: RunningServer) -> None:
    """Though each of its messages is short; others are answered meanwhile."""
    scripted = ScriptedEngine(server.engine, ["a"])
    with running(scripted, chat_template=SLOW, limits=Limits(render_timeout=0.05)) as slow:
        error = chat(slow, [{**USER, "content": "x" * 50}] * 250)
        assert "messages took more than 0.05 s" in error["message"]
        assert httpx.get(f"{slow.url}/health", timeout=30).status_code == 200


def test_what_a_template_says_loses_paths_and_addresses(server: RunningServer) -> None:
    with running(ScriptedEngine(server.engine, ["a"]), chat_template=TELLING) as telling:
        message = chat(telling, [USER])["message"]
    assert "template.jinja" not in message
    assert "0x7f" not in message


def test_many_short_texts_are_a_long_one() -> None:
    assert not has_long_text([{"content": "x" * 8000}])
    assert has_long_text([{"content": "x" * 100}] * 100)
    assert has_long_text("x" * 9000)
    assert not has_long_text([1] * 10_000)
