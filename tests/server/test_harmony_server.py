"""A server of a model with gpt-oss's template and special tokens: its answers and calls, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from chat_templates import FAMILIES
from checkpoints import make_checkpoint
from running_server import ENGINE, MODEL, RunningServer, ScriptedEngine, running
from tiny_tokenizers import byte_level
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.server.app import build_app
from compiled_engine.server.options import ServerOptions
from compiled_engine.server.parsers.harmony import MARKUP
from compiled_engine.server.parsers.registry import TOOL_FORMATS

MESSAGES: Any = [{"role": "user", "content": "1 + 2?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>I add.{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>Let me add.{NEXT}"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"ok": true}'
FINAL = "<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncLLM:
    """generation_config.json names one of the tokens that end answers, as the model's first release did."""
    path = tmp_path_factory.mktemp("gpt_oss")
    backend = Backend.from_str(byte_level().to_json())
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKUP])
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": FAMILIES["gpt-oss"].source}))
    make_checkpoint(path, "qwen3", num_hidden_layers=1, vocab_size=backend.get_vocab_size())
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": backend.token_to_id("<|return|>")}))
    return AsyncLLM(model=path, **ENGINE)


@pytest.fixture(scope="module")
def real(engine: AsyncLLM) -> Iterator[RunningServer]:
    with running(engine) as server:
        yield server


@pytest.fixture(scope="module")
def scripted(real: RunningServer) -> Iterator[tuple[openai.OpenAI, ScriptedEngine]]:
    engine = ScriptedEngine(real.engine)
    with running(engine) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client, engine


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_answers_whole_and_streamed(scripted: tuple[openai.OpenAI, ScriptedEngine]) -> None:
    client, engine = scripted
    for text, reasoning, content, arguments in (
        (f"{THOUGHT}{FINAL}Hello!", "I add.", "Hello!", None),
        (THOUGHT + CALL, "I add.", None, {"ok": True}),
        (THOUGHT + PREAMBLE + CALL, "I add.", "Let me add.", {"ok": True}),
    ):
        engine.chunks, engine.finish_reason = list(text), "stop"
        create: Any = client.chat.completions.create
        (choice,) = create(model=MODEL, messages=MESSAGES, tools=TOOLS).choices
        message = choice.message
        assert (message.reasoning_content, message.reasoning, message.content) == (reasoning, reasoning, content)
        assert choice.finish_reason == ("stop" if arguments is None else "tool_calls")
        found = calls_of(message)
        assert found == ([] if arguments is None else [("add", arguments)])
        thought = ""
        with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
            for event in stream:
                if event.type == "chunk" and event.chunk.choices:
                    thought += (event.chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "")
            (streamed,) = stream.get_final_completion().choices
        assert thought == reasoning
        assert (streamed.message.content or None, streamed.finish_reason) == (content, choice.finish_reason)
        calls = [
            (call.function.name, json.loads(call.function.arguments)) for call in streamed.message.tool_calls or ()
        ]
        assert calls == found
        assert engine.asked[-1][1].skip_special_tokens is False


def test_responses_whole_and_streamed(scripted: tuple[openai.OpenAI, ScriptedEngine]) -> None:
    client, engine = scripted
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    for text, kinds in (
        (THOUGHT + PREAMBLE + CALL, ["reasoning", "message", "function_call"]),
        (f"{THOUGHT}{FINAL}Hello!", ["reasoning", "message"]),
    ):
        engine.chunks, engine.finish_reason = list(text), "stop"
        whole: Any = client.responses.create(model=MODEL, input="1 + 2?", tools=tools)
        assert (whole.status, [item.type for item in whole.output]) == ("completed", kinds)
        assert whole.output[0].content[0].text == "I add."
        if "function_call" in kinds:
            assert json.loads(whole.output[-1].arguments) == {"ok": True}
        with client.responses.stream(model=MODEL, input="1 + 2?", tools=tools) as stream:
            for _ in stream:
                pass
            last: Any = stream.get_final_response()
        assert [item.type for item in last.output] == kinds
        assert last.output_text == whole.output_text


def test_an_answer_that_ends_within_its_reasoning_or_a_header(scripted: tuple[openai.OpenAI, ScriptedEngine]) -> None:
    client, engine = scripted
    for text, reasoning in ((THOUGHT.removesuffix(NEXT), "I add."), (f"{THOUGHT}<|channel|>fin", "I add.")):
        engine.chunks, engine.finish_reason = list(text), "length"
        (choice,) = client.chat.completions.create(model=MODEL, messages=MESSAGES).choices
        assert (choice.finish_reason, choice.message.content) == ("length", "")
        assert (choice.message.model_extra or {})["reasoning_content"] == reasoning


def test_the_history_reaches_the_template(scripted: tuple[openai.OpenAI, ScriptedEngine], real: RunningServer) -> None:
    client, engine = scripted
    engine.chunks, engine.finish_reason = [f"{FINAL}ok"], "stop"
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"ok": true}'}}
    calls = [call, {**call, "id": "call_2"}]
    history: Any = [
        {"role": "developer", "content": "Add."},
        *MESSAGES,
        {"role": "assistant", "content": "Let me.", "reasoning_content": "I add.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "<|end|>3"},
        {"role": "tool", "tool_call_id": "call_2", "content": "4"},
    ]
    client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS, reasoning_effort="high")
    prompt = engine.asked[-1][0]
    called = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"ok": true}<|call|>'
    result = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"{}"<|end|>'
    assert prompt["prompt"].endswith(
        f"<|start|>assistant<|channel|>analysis<|message|>I add.\nLet me.<|end|>"
        f"{called}{result.format('<|end|>3')}{called}{result.format('4')}<|start|>assistant"
    )
    assert "Reasoning: high" in prompt["prompt"]
    (end,) = real.serving.chat_format().tokenizer.encode("<|end|>", add_special_tokens=False)
    assert prompt["prompt_token_ids"].count(end) == 6  # none of them in the result


def test_forms_and_demanded_calls_of_a_model(real: RunningServer) -> None:
    """A random model, with reasoning made unlikely: it follows the grammar, and ends its answers."""
    tokenizer = real.serving.chat_format().tokenizer
    beginnings = tokenizer.encode("f", add_special_tokens=False) + tokenizer.encode("c", add_special_tokens=False)
    bias = {str(token_id): 100 for token_id in beginnings}  # of `final` and `commentary`
    named: Any = {"type": "function", "function": {"name": "add"}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 120, "logit_bias": bias}
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        (choice,) = client.chat.completions.create(**asked, response_format=form).choices
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content or "")["ok"] in (True, False)
        for tool_choice in ("required", named):
            (choice,) = client.chat.completions.create(**asked, tools=TOOLS, tool_choice=tool_choice).choices
            assert choice.finish_reason == "tool_calls"
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments)["ok"] in (True, False)


def test_a_call_ends_the_answer_whether_the_checkpoint_says_so_or_not(real: RunningServer) -> None:
    (call,) = real.serving.chat_format().tokenizer.encode("<|call|>", add_special_tokens=False)
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "logit_bias": {str(call): 100}}
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**asked)
        assert (answer.choices[0].finish_reason, answer.usage and answer.usage.completion_tokens) == ("stop", 1)
        answer = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("tools", "reasoning", "found"),
    [
        ("auto", "auto", ("openai", "openai_gptoss")),
        ("openai", "auto", ("openai", "openai_gptoss")),
        ("none", "auto", (None, "openai_gptoss")),
        ("hermes", "auto", ("hermes", "openai_gptoss")),
        ("auto", "none", (None, None)),
        ("openai", "none", "reasoning_parser must be auto or openai_gptoss where tool_call_parser is openai"),
    ],
)
def test_one_parser_reads_reasoning_and_calls(engine: AsyncLLM, tools: str, reasoning: str, found: Any) -> None:
    options = ServerOptions(tool_call_parser=tools, reasoning_parser=reasoning)
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            build_app(engine, options, MODEL)
        return
    chat = build_app(engine, options, MODEL).serving.chat_format()
    assert (chat.tools, chat.reasoning) == (TOOL_FORMATS.get(found[0]), found[1])
