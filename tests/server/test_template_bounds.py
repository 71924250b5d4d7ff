"""Chat templates come from the server, run within bounds, and tell nothing of it."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from running_server import RunningServer, ScriptedEngine, running

from compiled_engine.frontend.prompts import rendering_size
from compiled_engine.frontend.tokenizer_backend import HUGE_TEXT, LONG_TEXT
from compiled_engine.server.json_size import MOST_CONTAINERS, MOST_KEYS
from compiled_engine.server.options import Limits, ServerOptions

USER = {"role": "user", "content": "x"}
# Its time grows with the cube of the number of messages.
SLOW = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}x"
# Takes longer than a test may.
LOOPING = """{% if messages[0].content == "loop" %}
{%- for a in range(99999) %}{% for b in range(3000) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"""
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
    [
        {"message": 1},
        {"messages": []},
        {"tokenize": True},
        {"enable_thinking": "x" * 300},
        {"enable_thinking": ["x"]},
        {"thinking": {}},
    ],
)
def test_variables_come_from_a_list_and_are_short(server: RunningServer, given: dict[str, Any]) -> None:
    assert chat(server, [USER], chat_template_kwargs=given)["param"] == "chat_template_kwargs"
    for asked in ({"messages": [USER]}, {"prompt": "x"}):
        for settings, status in ((given, 400), ({"enable_thinking": False}, 200)):
            body = {**asked, "chat_template_kwargs": settings}
            assert httpx.post(f"{server.url}/tokenize", json=body, timeout=60).status_code == status


def test_what_the_template_does_not_read_is_ignored(server: RunningServer) -> None:
    """Clients send it to every model. The answer says so, and is the same."""
    url, body = f"{server.url}/v1/chat/completions", {"messages": [USER], "max_tokens": 4, "temperature": 0}
    plain = httpx.post(url, json=body, timeout=60).json()["choices"]
    more = {"reasoning_effort": "low", "chat_template_kwargs": {"anything": [1], "enable_thinking": False, "x y": 1}}
    for given in ({"reasoning_effort": "low" * 200}, more):
        answer = httpx.post(url, json=body | given, timeout=60)
        assert answer.json()["choices"] == plain
        said = answer.headers["x-compiled-engine-warning"]
        assert all(
            name in said for name in ("reasoning_effort", *given.get("chat_template_kwargs", {})) if "en" not in name
        )
    response = httpx.post(f"{server.url}/v1/responses", json={"input": "x", "reasoning": {"effort": "low"}}, timeout=60)
    assert (response.status_code, "reasoning_effort" in response.headers["x-compiled-engine-warning"]) == (200, True)
    many = {"chat_template_kwargs": {f"name{number}": 1 for number in range(5000)}}
    assert len(httpx.post(url, json=body | many, timeout=60).headers["x-compiled-engine-warning"]) < 400


def test_a_strict_server_ignores_nothing(server: RunningServer) -> None:
    with running(ScriptedEngine(server.engine, ["a"]), strict=True) as strict:
        assert chat(strict, [USER], reasoning_effort="low")["param"] == "reasoning_effort"
        assert chat(strict, [USER], chat_template_kwargs={"anything": 1})["param"] == "chat_template_kwargs"


def test_variables_may_have_defaults(server: RunningServer) -> None:
    """A request's come before them; those that requests may not set remain."""
    template = "{{ thinking }}{{ secret }}{{ messages[0].content }}"
    defaults = '{"thinking": "yes", "secret": ["s"]}'
    with running(
        ScriptedEngine(server.engine, ["a"]), chat_template=template, default_chat_template_kwargs=defaults
    ) as own:
        for given, text in (({}, "yes['s']x"), ({"thinking": "no"}, "no['s']x")):
            body = {"messages": [USER], "chat_template_kwargs": given}
            tokens = httpx.post(f"{own.url}/tokenize", json=body, timeout=60).json()["tokens"]
            assert httpx.post(f"{own.url}/detokenize", json={"tokens": tokens}, timeout=60).json()["prompt"] == text
        assert chat(own, [USER], chat_template_kwargs={"secret": "x"})["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("value", "said"),
    [("{", "allowed: a dict as JSON"), ("[1]", "allowed: a dict, or one as JSON"), ({"tools": []}, "has tools")],
)
def test_defaults_that_are_no_variables(value: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"default_chat_template_kwargs .*{said}"):
        ServerOptions(default_chat_template_kwargs=value)


def test_the_effort_is_short(server: RunningServer) -> None:
    with running(ScriptedEngine(server.engine, ["a"]), chat_template=EFFORT) as own:
        assert chat(own, [USER], reasoning_effort="x" * 300)["param"] == "reasoning_effort"
        asked = {"input": "x", "reasoning": {"effort": "x" * 300}}
        assert httpx.post(f"{own.url}/v1/responses", json=asked, timeout=60).status_code == 400
        body = {"messages": [USER], "reasoning_effort": "high"}
        assert httpx.post(f"{own.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        schemas = httpx.get(f"{own.url}/openapi.json", timeout=60).json()["components"]["schemas"]
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


def test_a_small_conversation_whose_template_loops_holds_up_nobody(server: RunningServer) -> None:
    """Others are answered while it loops; and it ends with its time, so that two of them leave threads for others."""
    limits = Limits(render_timeout=2.0)
    with (
        running(ScriptedEngine(server.engine, ["a"]), chat_template=LOOPING, limits=limits) as looping,
        ThreadPoolExecutor(2) as clients,
    ):
        url, body = f"{looping.url}/v1/chat/completions", {"messages": [USER], "max_tokens": 1}
        assert httpx.post(url, json=body, timeout=30).status_code == 200  # what the template reads is known now
        loop = {**USER, "content": "loop"}
        first = clients.submit(chat, looping, [loop])
        while not (working := _num_working(looping)):
            time.sleep(0.01)
        assert httpx.get(f"{looping.url}/health", timeout=30).status_code == 200
        assert httpx.post(url, json=body, timeout=30).status_code == 200
        assert (working, first.done()) == (1, False)
        second = clients.submit(chat, looping, [loop])
        for each in (first, second):
            assert "messages took more than 2 s" in each.result()["message"]
        assert httpx.post(url, json=body, timeout=30).status_code == 200


def _num_working(server: RunningServer) -> int:
    """Texts that are rendered, or wait for that."""
    return sum(map(len, server.serving.texts._under_way.values()))


def test_what_a_template_says_loses_paths_and_addresses(server: RunningServer) -> None:
    with running(ScriptedEngine(server.engine, ["a"]), chat_template=TELLING) as telling:
        message = chat(telling, [USER])["message"]
    assert "template.jinja" not in message
    assert "0x7f" not in message


# Its time grows with the square of the number of arguments.
SLOW_ARGUMENTS = """{% for message in messages if message.tool_calls %}
{%- set given = message.tool_calls[0].function.arguments %}
{%- for a in given %}{% for b in given %}{% endfor %}{% endfor %}{% endfor %}x"""


def calls(*arguments: Any) -> dict[str, Any]:
    functions = [{"name": "f", "arguments": each} for each in arguments]
    return {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": function} for function in functions],
    }


ARGUMENTS = {
    "arrays and objects": ('{"a":[%s]}', "[]", MOST_CONTAINERS // 2 - 2),
    "keys": ("{%s}", '"a":1', MOST_KEYS // 2),
    "values": ('{"a":[%s]}', "1", Limits().max_json_values // 2),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_of_calls_have_the_bounds_of_a_body(server: RunningServer, kind: str) -> None:
    """All of a conversation together, also where no text by itself is beyond them."""
    frame, each, count = ARGUMENTS[kind]
    for n in (count, count + 1):
        text = frame % ",".join([each] * n)
        body = {"messages": [USER, calls(text), calls(text), USER], "max_tokens": 1}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == (200 if n == count else 400)
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert error["message"].startswith("arguments of messages must have at most ")
    assert error["message"].endswith(kind)


def test_brackets_in_strings_of_arguments_are_none(server: RunningServer) -> None:
    text = json.dumps({"a": "[{,:" * MOST_CONTAINERS})
    body = {"messages": [USER, calls(text), USER], "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200


def test_what_is_large_without_text_is_rendered_within_the_timeout(server: RunningServer) -> None:
    given = {str(number): number for number in range(3000)}
    with running(
        ScriptedEngine(server.engine, ["a"]), chat_template=SLOW_ARGUMENTS, limits=Limits(render_timeout=0.05)
    ) as slow:
        assert "more than 0.05 s" in chat(slow, [USER, calls(given), USER])["message"]


@pytest.mark.parametrize(
    "value",
    [
        dict.fromkeys(map(str, range(1000))),
        {"a" * LONG_TEXT: None},
        [1] * LONG_TEXT,
        [0.5] * LONG_TEXT,
        1 << 4 * LONG_TEXT,
        [[]] * LONG_TEXT,
        [{}] * LONG_TEXT,
        [None, True] * LONG_TEXT,
    ],
    ids=["keys", "a key", "integers", "numbers", "a large integer", "arrays", "objects", "constants"],
)
def test_whatever_has_a_size_is_counted(value: Any) -> None:
    assert rendering_size([{"content": value}]) >= LONG_TEXT
    assert rendering_size([{"content": "x" * 4000}]) < LONG_TEXT


def test_counting_ends_where_it_is_enough() -> None:
    """Each of these objects is the same, so that one that is looked at more often is counted more often."""
    value: Any = [1]
    for _ in range(60):
        value = [value, value]
    assert HUGE_TEXT < rendering_size(value) < 2 * HUGE_TEXT
