"""Tool calls and reasoning, as OpenAI's client puts them together, of an engine whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running_server import MODEL, RunningServer, ScriptedEngine, running

from compiled_engine.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
MESSAGES: Any = [{"role": "user", "content": "What is 1 + 2?"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ANSWER = f"<think>\nI can add.\n</think>\n\nLet me add.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def scripted(server: RunningServer) -> Iterator[tuple[openai.OpenAI, ScriptedEngine]]:
    engine = ScriptedEngine(server.engine)
    with (
        running(engine, chat_template=TEMPLATE, tool_call_parser="hermes") as own,
        openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, engine


@pytest.fixture
def client(scripted: tuple[openai.OpenAI, ScriptedEngine]) -> openai.OpenAI:
    client, engine = scripted
    engine.chunks, engine.finish_reason = list(ANSWER), "stop"
    engine.asked.clear()
    return client


@pytest.fixture
def engine(scripted: tuple[openai.OpenAI, ScriptedEngine]) -> ScriptedEngine:
    return scripted[1]


def check_message(message: Any) -> None:
    assert message.content == "Let me add."
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == "I can add."
    assert [call.function.name for call in message.tool_calls] == ["add", "add"]
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"a": 1, "b": 2}] * 2
    assert len({call.id for call in message.tool_calls}) == 2


def test_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)
    assert answer.choices[0].finish_reason == "tool_calls"
    check_message(answer.choices[0].message)


def test_a_stream_that_the_client_puts_together(client: openai.OpenAI) -> None:
    reasoning = ""
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                reasoning += (event.chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "")
        answer = stream.get_final_completion()
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    assert reasoning == "I can add."
    assert message.content == "Let me add."
    assert [call.function.name for call in message.tool_calls or ()] == ["add", "add"]
    assert [json.loads(call.function.arguments) for call in message.tool_calls or ()] == [{"a": 1, "b": 2}] * 2


def test_a_message_that_is_continued_within_its_reasoning(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    """And within its answer: the last tag decides, and the first space of what follows stays."""
    continued: Any = {"continue_final_message": True, "add_generation_prompt": False}
    for text, chunks, reasoning, content in (
        ("<think>\nI can", " add.</think>\n\nYes", " add.", "Yes"),
        ("<think>\nI can add.\n</think>\n\nYes,", " three.", None, " three."),
    ):
        engine.chunks = list(chunks)
        messages = [*MESSAGES, {"role": "assistant", "content": text}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, extra_body=continued)
        message = answer.choices[0].message
        assert ((message.model_extra or {}).get("reasoning_content"), message.content) == (reasoning, content)


def test_a_call_without_arguments_is_taken_in_a_history(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for arguments in ("null", "", "{}"):
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        history: Any = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
        client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
        assert '<tool_call>{"name": "add", "arguments": {}}</tool_call>' in engine.asked[-1][0]["prompt"]


def test_the_prompt_has_tools_and_what_was_called_before(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history: Any = [
        {"role": "developer", "content": "Calculate."},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm", "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3", "extra": 1}]},
    ]
    client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    prompt = engine.asked[0][0]["prompt"]
    assert "<|im_start|>system\nCalculate.<|im_end|>" in prompt
    assert '"name": "add"' in prompt.split("</tools>")[0]
    assert '<think>hm</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in prompt
    assert "<|im_start|>tool\n3<|im_end|>" in prompt


def test_arguments_that_are_too_deep_stay_text(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for depth, begin in ((600, '"{' + '\\"a\\":{' * 599), (2, '{"a": {"a": 1}}')):
        call = {"type": "function", "function": {"name": "add", "arguments": '{"a":' * depth + "1" + "}" * depth}}
        history: Any = [{"role": "assistant", "tool_calls": [{"id": "call_1", **call}]}, *MESSAGES]
        client.chat.completions.create(model=MODEL, messages=history)
        assert f'"arguments": {begin}' in engine.asked[-1][0]["prompt"]


def test_without_tools_calls_are_text(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **more)
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        assert CALL in (answer.choices[0].message.content or "")
        assert "<tools>" not in engine.asked[-1][0]["prompt"]


def test_a_single_call_and_no_reasoning(client: openai.OpenAI) -> None:
    extra = {"include_reasoning": False}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, parallel_tool_calls=False, extra_body=extra
    )
    message = answer.choices[0].message
    assert len(message.tool_calls or ()) == 1
    assert (message.model_extra or {})["reasoning_content"] is None


def test_the_prompt_may_close_the_reasoning(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.chunks = ["<think> is a tag"]
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra)
    assert answer.choices[0].message.content == "<think> is a tag"


def test_a_cut_call_ends_by_length(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.chunks, engine.finish_reason = ['<tool_call>{"name": "add", "argum', 'ents": {"a": '], "length"
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"a": '  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("end", "reason", "status"),
    [('{"a": 1}', "tool_calls", "completed"), ('{"a": [1]', "stop", "incomplete"), ("{", "stop", "incomplete")],
)
def test_a_call_that_a_stop_string_cuts_off_is_none_to_execute(
    client: openai.OpenAI, engine: ScriptedEngine, end: str, reason: str, status: str
) -> None:
    engine.chunks = [f"{CALL}<tool_call>", f'{{"name": "add", "arguments": {end}']
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    answer = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert answer.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == reason
    calls = answer.choices[0].message.tool_calls or []
    assert [call.function.arguments for call in calls] == ['{"a": 1, "b": 2}', end]  # type: ignore[union-attr]
    response = client.responses.create(model=MODEL, input="What is 1 + 2?", tools=FUNCTION)
    assert [(item.arguments, item.status) for item in response.output] == [  # type: ignore[union-attr]
        ('{"a": 1, "b": 2}', "completed"),
        (end, status),
    ]


def test_a_stop_string_within_the_reasoning_leaves_no_content(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.chunks = ["<think>\nI c", "an add"]
    asked: Any = {"model": MODEL, "messages": MESSAGES, "stop": "."}
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.message.model_extra or {})["reasoning_content"] == "I can add"
    assert not choice.message.content
    assert choice.finish_reason == "stop"
    deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join((each.delta.model_extra or {}).get("reasoning_content") or "" for each in deltas) == "I can add"
    assert not any(each.delta.content for each in deltas)
    assert deltas[-1].finish_reason == "stop"


def test_an_engine_that_fails(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.finish_reason = "error"
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))


FUNCTION: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}]


def check_response(response: Any) -> None:
    assert (response.status, response.object) == ("completed", "response")
    reasoning, message, *calls = response.output
    assert reasoning.content[0].text == "I can add."
    assert message.content[0].text == response.output_text == "Let me add."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 1, "b": 2})] * 2
    assert all(item.status == "completed" for item in response.output)
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


def test_a_response(client: openai.OpenAI) -> None:
    tools = [*FUNCTION, {"type": "web_search"}]
    raw = client.responses.with_raw_response.create(model=MODEL, input="What is 1 + 2?", tools=tools)
    check_response(raw.parse())
    assert "web_search" in raw.headers["x-compiled-engine-warning"]


def test_a_response_that_is_streamed(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="What is 1 + 2?", tools=FUNCTION) as stream:
        events = list(stream)
        check_response(stream.get_final_response())
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds.count("response.output_item.done") == 4
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_response_are_those_of_its_text(
    client: openai.OpenAI, engine: ScriptedEngine, size: int, stream: bool
) -> None:
    """However many tokens come at once. What ends the answer is no part of its text."""
    tokens = ["<think>", "\nI can", " add", ".", "</think>", "\n\n", "d", " is", " 3", "<", "4", " <", "tool_call>"]
    tokens += ['{"name": "add", "arguments": ', '{"a"', ": 1}}", "</tool_call>", "<|im_end|>"]
    parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    engine.outputs = [output_of(part, last=part is parts[-1]) for part in parts]
    asked: Any = {"include": ["message.output_text.logprobs"], "tools": FUNCTION}
    try:
        if stream:
            with client.responses.stream(model=MODEL, input="What is d?", **asked) as events:
                parts_of_text = [event for event in events if event.type == "response.output_text.delta"]
                response: Any = events.get_final_response()
            shown = [entry.token for event in parts_of_text for entry in event.logprobs]
        else:
            response = client.responses.create(model=MODEL, input="What is d?", **asked)
            shown = [entry.token for entry in response.output[1].content[0].logprobs]
    finally:
        engine.outputs = []
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "".join(shown) == "d is 3<4"
    assert shown == ["d", " is", " 3", "<", "4"]


def output_of(tokens: list[str], *, last: bool) -> RequestOutput:
    """Tokens with their log-probabilities; the last one of an answer is no text."""
    text = "".join(tokens[:-1] if last else tokens)
    logprobs = [{number: Logprob(-1.0, 1, token)} for number, token in enumerate(tokens)]
    completion = CompletionOutput(0, text, [5] * len(tokens), None, logprobs, "stop" if last else None, None)
    return RequestOutput("0", None, [1, 2], None, [completion], last, 0, RequestMetrics(0.0))


def test_a_conversation_of_responses(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    first = client.responses.create(model=MODEL, input="What is 1 + 2?", tools=FUNCTION)
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "What is 1 + 2?"}]}, *first.output]
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in first.output
        if item.type == "function_call"
    ]
    client.responses.create(model=MODEL, input=items, instructions="Calculate.", tools=FUNCTION)
    prompt = engine.asked[-1][0]["prompt"]
    assert "<|im_start|>system\nCalculate.<|im_end|>" in prompt
    assert "Let me add.<think>I can add.</think><tool_call>" in prompt
    assert prompt.count("<|im_start|>assistant") == 2
    assert prompt.count("<|im_start|>tool\n3<|im_end|>") == 2


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ],
)
def test_what_a_response_cannot_be(client: openai.OpenAI, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": MODEL, "input": "Hello.", **asked})
    assert caught.value.param == param


def test_calls_have_the_ids_that_the_model_wrote(server: RunningServer) -> None:
    """In answers of both interfaces, whole and streamed."""
    engine = ScriptedEngine(server.engine)
    text = '<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|>'
    engine.chunks, ids = list(text.format(4) + text.format(5)), ["functions.add:4", "functions.add:5"]
    with (
        running(engine, chat_template=TEMPLATE, tool_call_parser="kimi_k2") as own,
        openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
        message = client.chat.completions.create(**asked).choices[0].message
        assert [call.id for call in message.tool_calls or ()] == ids
        chunks = list(client.chat.completions.create(**asked, stream=True))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert [call.id for call in calls if call.id] == ids
        response = client.responses.create(model=MODEL, input="What is 1 + 2?", tools=FUNCTION)
        assert [(item.call_id, item.name) for item in response.output] == [(each, "add") for each in ids]  # type: ignore[union-attr]
