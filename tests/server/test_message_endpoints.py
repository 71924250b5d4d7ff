"""/v1/messages in the shapes that Anthropic's API documents, of an engine whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running_server import MODEL, RunningServer, ScriptedEngine, running

from compiled_engine.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"
)
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello."}]
IMAGE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWER = f"<think>\nI can.\n</think>\n\nLet me add.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def own(server: RunningServer) -> Iterator[RunningServer]:
    with running(ScriptedEngine(server.engine), chat_template=TEMPLATE, tool_call_parser="hermes") as own:
        yield own


@pytest.fixture
def engine(own: RunningServer) -> ScriptedEngine:
    engine = own.engine
    assert isinstance(engine, ScriptedEngine)
    engine.chunks, engine.finish_reason, engine.outputs, engine.error = list(ANSWER), "stop", [], None
    engine.asked.clear()
    return engine


def ask(own: RunningServer, path: str = "", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 64, "messages": HELLO, **fields}
    return httpx.post(f"{own.url}/v1/messages{path}", json=body, timeout=60)


def answer(own: RunningServer, **fields: Any) -> dict[str, Any]:
    response = ask(own, **fields)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


def events(own: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; each has its type as its name."""
    response = ask(own, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for each in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = each.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of events."""
    first, *parts, last = found
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    opened: int | None = None
    for part in parts:
        blocks = message["content"]
        if part["type"] == "content_block_start":
            assert opened is None
            opened = part["index"]
            assert opened == len(blocks)
            blocks.append({**part["content_block"], "json": ""})
        elif part["type"] == "content_block_stop":
            assert part["index"] == opened
            opened, text = None, blocks[-1].pop("json")
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(text)
        elif part["type"] == "content_block_delta":
            delta, block = part["delta"], blocks[part["index"]]
            assert part["index"] == opened
            key = {"input_json_delta": "json"}.get(delta["type"], delta["type"].removesuffix("_delta"))
            block[key] += delta.get("partial_json", delta.get(key))
        else:
            assert (part["type"], opened) == ("message_delta", None)
            message |= {**part["delta"], "usage": part["usage"]}
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [
        {key: value for key, value in block.items() if key not in ("id", "signature")} for block in message["content"]
    ]
    return {**message, "id": "", "content": content}


def test_a_message_is_blocks(own: RunningServer, engine: ScriptedEngine) -> None:
    message = answer(own, tools=[TOOL])
    assert message["id"].startswith("msg_")
    assert len({block["id"] for block in message["content"][2:]}) == 2
    assert message["content"][0]["signature"]
    assert without_ids(message) == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [
            {"type": "thinking", "thinking": "I can."},
            {"type": "text", "text": "Let me add."},
            {"type": "tool_use", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "name": "add", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(ANSWER),
        },
    }


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_make_the_same_message(own: RunningServer, engine: ScriptedEngine, size: int) -> None:
    engine.chunks = [ANSWER[start : start + size] for start in range(0, len(ANSWER), size)]
    found = events(own, tools=[TOOL])
    assert found[0]["message"]["usage"]["output_tokens"] == 0
    assert without_ids(put_together(found)) == without_ids(answer(own, tools=[TOOL]))


def test_a_call_has_the_id_that_the_model_wrote(server: RunningServer) -> None:
    call = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    with running(ScriptedEngine(server.engine, [call]), chat_template=TEMPLATE, tool_call_parser="kimi_k2") as kimi:
        (block,) = answer(kimi, tools=[TOOL])["content"]
        (streamed,) = put_together(events(kimi, tools=[TOOL]))["content"]
    assert block["id"] == streamed["id"] == "functions.add:0"


def outputs(text: str, finish_reason: str, stop_reason: Any, cached: int = 0) -> list[RequestOutput]:
    completion = CompletionOutput(0, text, [1, 2], None, None, finish_reason, stop_reason)
    return [RequestOutput("0", None, [1, 2, 3], None, [completion], True, cached, RequestMetrics(0.0))]


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "\n", ("stop_sequence", "\n")),
        ("stop", 7, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_why_a_message_ends(
    own: RunningServer, engine: ScriptedEngine, finish_reason: str, stop_reason: Any, expected: Any
) -> None:
    engine.outputs = outputs("One", finish_reason, stop_reason, cached=2)
    engine.chunks = []
    for message in (answer(own, stop_sequences=["\n"]), put_together(events(own, stop_sequences=["\n"]))):
        assert (message["stop_reason"], message["stop_sequence"]) == expected
        usage = message["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (1, 2, 2)
    assert all(params.stop == ["\n"] for _, params in engine.asked)


def test_a_call_that_is_cut_off(own: RunningServer, engine: ScriptedEngine) -> None:
    engine.chunks, engine.finish_reason = ['<tool_call>\n{"name": "add", "arguments": {"a": '], "length"
    message = answer(own, tools=[TOOL])
    assert [block["input"] for block in message["content"]] == [{}]
    assert message["stop_reason"] == "max_tokens"


def prompt_of(own: RunningServer, engine: ScriptedEngine, **fields: Any) -> str:
    answer(own, **fields)
    prompt, _ = engine.asked[-1]
    text: str = prompt["prompt"]
    return text


def test_a_conversation_is_rendered(own: RunningServer, engine: ScriptedEngine) -> None:
    """Results of tools are messages; instructions come first, wherever they are; unknown keys of blocks are ignored."""
    text = prompt_of(
        own,
        engine,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=5a;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            *HELLO,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 5}},
                ],
            },
            {"role": "system", "content": "Be kind."},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
    )
    tools, _, rest = text.partition("</tools>")
    assert '"name": "add"' in tools
    assert '"type": "object"' in tools
    assert "web_search" not in tools
    assert rest.partition("</tool_call>")[2] == (
        "<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n"
        '<|im_start|>assistant\nI add.<think>Hm.</think><tool_call>{"name": "add", "arguments": {"a": 5}}</tool_call>'
        "<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>tool\n<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_an_answer_that_has_begun_is_continued(own: RunningServer, engine: ScriptedEngine) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Good"}]
    assert prompt_of(own, engine, messages=begun).endswith("<|im_start|>assistant\nGood")
    engine.chunks = [" day."]
    assert answer(own, messages=begun)["content"] == [{"type": "text", "text": " day."}]


def test_reasoning_is_turned_off_and_its_effort_chosen(own: RunningServer, engine: ScriptedEngine) -> None:
    off = prompt_of(own, engine, thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert off.endswith("<think>\n\n</think>\n\neffort low")
    for on in ({}, {"thinking": {"type": "adaptive"}}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}):
        assert prompt_of(own, engine, **on).endswith("assistant\n")


def test_the_choice_of_tools(own: RunningServer, engine: ScriptedEngine) -> None:
    engine.chunks = ["Hi"]
    assert "<tools>" not in prompt_of(own, engine, tools=[TOOL], tool_choice={"type": "none"})
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "add"}):
        answer(own, tools=[TOOL], tool_choice=choice)
        assert engine.asked[-1][1].structured_outputs is not None
    answer(own, tools=[TOOL], tool_choice={"type": "auto"})
    assert engine.asked[-1][1].structured_outputs is None


def test_an_answer_in_a_form(own: RunningServer, engine: ScriptedEngine) -> None:
    answer(own, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}, seed=5, top_k=3)
    _, params = engine.asked[-1]
    assert params.structured_outputs is not None
    assert (params.seed, params.top_k, params.max_tokens) == (5, 3, 64)


@pytest.mark.parametrize(
    ("asked", "begin"),
    [
        ({"max_tokens": None}, "max_tokens must be given"),
        ({"max_tokens": 0}, "max_tokens: expected int >= 1, got 0"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": HELLO * 4097}, "messages must have at most 4096 messages, got 4097"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}]},
         "messages must have at most 4096 blocks, got 4097"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}] * 4096}]}]},
         "messages must have at most 4096 blocks, got 4097"),
        ({"system": [{"type": "text", "text": "x"}] * 4097}, "system must have at most 4096 blocks, got 4097"),
        ({"tools": [TOOL] * 257}, "tools must have at most 256 tools, got 257"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: expected 'assistant' or 'system' or"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages[0].content[0].type: expected 'image' or 'redacted_thinking' or 'text' or 'thinking' or "
            "'tool_result' or 'tool_use', got 'document'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": IMAGE}]}]},
            "messages[0].content[0] must not be an image: the model takes only text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0] of type 'thinking' has no place",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b",
                                                                     "input": 5}]}]},
            "messages[1].content[0].input must be an object, got 5",
        ),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences must have at most 64 strings, got 65"),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop must be absent"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema must be given"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name must be given"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice must name one of the tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: expected int >= 1, got 0"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"n": 2}, "n must be absent"),
        ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_errors_have_the_shape_that_clients_read(own: RunningServer, asked: dict[str, Any], begin: str) -> None:
    response = ask(own, **asked)
    body = response.json()
    assert (response.status_code, set(body), set(body["error"])) == (400, {"type", "error"}, {"type", "message"})
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(begin)


def test_errors_before_and_beside_a_message(own: RunningServer, engine: ScriptedEngine, server: RunningServer) -> None:
    assert ask(own, model="another").json()["error"]["type"] == "not_found_error"
    assert ask(own, "/batches").json()["error"]["type"] == "not_found_error"
    assert httpx.get(f"{own.url}/v1/messages", timeout=60).json()["error"]["type"] == "invalid_request_error"
    engine.error = RuntimeError("a failure")
    assert ask(own).json()["error"] == {"type": "api_error", "message": "the server failed; its log has the reason"}
    engine.pause_s = 0.2
    try:
        (failed,) = events(own)
    finally:
        engine.pause_s = 0.0
    assert failed == {"type": "error", "error": {"type": "api_error", "message": ask(own).json()["error"]["message"]}}
    with running(ScriptedEngine(server.engine), api_key=("secret",)) as locked:
        assert ask(locked).json()["error"]["type"] == "authentication_error"


def test_the_key_may_be_where_these_clients_put_it(server: RunningServer) -> None:
    with running(ScriptedEngine(server.engine), api_key=("secret",), admin_api_key=("chief",)) as locked:

        def status(**headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return httpx.get(f"{locked.url}/v1/models", headers=named, timeout=60).status_code

        assert status(x_api_key="secret") == status(authorization="Bearer secret") == status(x_api_key="chief") == 200
        assert status(x_api_key="") == status(x_api_key="wrong") == status(authorization="secret") == 401
        assert status(authorization="Bearer wrong", x_api_key="secret") == 401


def test_tokens_are_counted_as_the_model_reads_them(own: RunningServer, engine: ScriptedEngine) -> None:
    asked = {"system": "Be brief.", "tools": [TOOL], "thinking": {"type": "disabled"}}
    response = ask(own, "/count_tokens", **asked, max_tokens=None)
    answer(own, **asked)
    prompt, _ = engine.asked[-1]
    assert response.json() == {"input_tokens": len(prompt["prompt_token_ids"])}
    without = ask(own, "/count_tokens", **asked, tool_choice={"type": "none"}).json()
    assert without["input_tokens"] < response.json()["input_tokens"]
    assert ask(own, "/count_tokens", messages=[]).json()["error"]["type"] == "invalid_request_error"


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}])
def test_every_way_to_ask_for_a_chat_has_one_answer(server: RunningServer, sampling: dict[str, Any]) -> None:
    """Whole or in events, with a cold prefix cache or a warm one; and each says that the length ended it."""
    text = "class Way:\n    def ask(self):"
    length = {"max_tokens": 48, **sampling}
    chat = {"messages": [{"role": "user", "content": text}], **length}
    given = {"input": text, "max_output_tokens": 48, **sampling}
    for _ in range(2):
        whole = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json()["choices"][0]
        response = httpx.post(f"{server.url}/v1/responses", json=given, timeout=60).json()
        messages = [answer(server, **chat), put_together(events(server, **chat))]
        texts = [whole["message"]["content"], response["output"][0]["content"][0]["text"]]
        texts += [message["content"][0]["text"] for message in messages]
        assert len(set(texts)) == 1
        ends = [whole["finish_reason"], response["status"], *(message["stop_reason"] for message in messages)]
        assert ends == ["length", "incomplete", "max_tokens", "max_tokens"]
        assert [message["usage"]["output_tokens"] for message in messages] == [48, 48]
