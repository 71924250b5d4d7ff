"""Markup whose tags are tokens of the tokenizer: special ones, added ones that are not special, or plain text."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from llguidance import LLMatcher, LLTokenizer
from running_server import RunningServer, ScriptedEngine, running
from test_call_grammars import ANSWER, LONG_WORK, SCHEMAS, form_of, tool_use
from test_call_grammars import CALLS as LOOK_UPS
from tiny_tokenizers import byte_level, wrap
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from compiled_engine.features.structured.grammars.trials import parser_limits
from compiled_engine.frontend.detokenizer import Detokenizer
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.server.chat_format import ChatFormat, SpecialTokenGuard
from compiled_engine.server.parsers.answer import joined
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Reasoning
from compiled_engine.server.parsers.registry import TOOL_FORMATS

MARKED = ("kimi_k2", "deepseek_v3", "gemma4", "granite", "internlm", "lfm2")
TAGS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("[THINK]", "[/THINK]", *(text for name in MARKED for text in TOOL_FORMATS[name].markup)),
)
KINDS = ("special", "added", "text")
ARGUMENTS = '{"a": 7, "b": "x"}'
TEMPLATE = "{{ messages[0].content }}{{ tools }}<think></think>"
# Of each format: what the template holds, a call, and what is between two.
CALLS = {
    "hermes": ("<tool_call>arguments", f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>', "\n"),
    "mistral": ("[TOOL_CALLS]", f'[TOOL_CALLS][{{"name": "add", "arguments": {ARGUMENTS}}}]', None),
    "mistral with names": ("[TOOL_CALLS][ARGS]", f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}", ""),
    "llama3_json": ("<|python_tag|>", f'{{"name": "add", "parameters": {ARGUMENTS}}}', "; "),
    "qwen3_coder": (
        "<tool_call><function=",
        "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
        "</function>\n</tool_call>",
        "\n",
    ),
    "glm45": (
        "<tool_call><arg_key><arg_value>",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>x</arg_value>\n</tool_call>",
        "\n",
    ),
    "minimax_m2": (
        "<minimax:tool_call><invoke name=",
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">7</parameter>\n'
        '<parameter name="b">x</parameter>\n</invoke>\n</minimax:tool_call>',
        "\n",
    ),
    **{name: ("", LOOK_UPS[name].replace("look-up", "add").replace("{}", ARGUMENTS), None) for name in MARKED},
}


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMAS["add"]}}]


def tokenizer_of(kind: str) -> Tokenizer:
    backend = Backend.from_str(byte_level().to_json())
    if kind != "text":
        backend.add_tokens([AddedToken(tag, special=kind == "special", normalized=False) for tag in TAGS])
    return wrap(backend)


def chat_of(kind: str, reasoning: str | None = "qwen3", calls: str = "hermes") -> ChatFormat:
    tokenizer = tokenizer_of(kind)
    guard = SpecialTokenGuard(tokenizer)
    tools = TOOL_FORMATS[calls.split(maxsplit=1)[0]]
    return ChatFormat(tokenizer, TEMPLATE + CALLS[calls][0], None, tools, reasoning, guard, LONG_WORK, (), {})


def accepts(chat: ChatFormat, grammar: str, text: str) -> bool:
    """Whether the grammar lets these tokens through, and the text may end."""
    backend = LLTokenizer(chat.tokenizer.to_json(), eos_token=[1])
    matcher = LLMatcher(backend, grammar, log_level=0, limits=parser_limits())
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


@pytest.mark.product(one_in=3, each=("calls",))
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_are_demanded_can_be_written(kind: str, calls: str) -> None:
    chat = chat_of(kind, None, calls)
    _, call, between = CALLS[calls]
    grammar = form_of(chat, tool_use(required=True, several=True))
    assert accepts(chat, grammar, call)
    assert between is None or accepts(chat, grammar, call + between + call)
    assert not accepts(chat, grammar, call.replace("7", '"7"'))
    assert not accepts(chat, grammar, "Hello")


@pytest.mark.product(one_in=3, each=("calls",))
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_strict_calls_follow_their_schemas_in_free_text(kind: str, calls: str) -> None:
    chat = chat_of(kind, None, calls)
    call = ("<|python_tag|>" if calls == "llama3_json" else "") + CALLS[calls][1]
    grammar = form_of(chat, tool_use(required=False, several=True))
    assert accepts(chat, grammar, "Hello")
    assert accepts(chat, grammar, call)
    assert not accepts(chat, grammar, call.replace("7", '"7"'))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_reasoning_before_json_can_be_closed(kind: str, reasoning: str) -> None:
    chat = chat_of(kind, reasoning)
    grammar = form_of(chat, None, asked=ANSWER, prompt="<think>\n" if reasoning == "deepseek_r1" else "")
    opening = "" if reasoning == "deepseek_r1" else "<think>"
    for text in ("so {be} it\n", " ", "x" * 50):
        assert accepts(chat, grammar, opening + text + '</think>\n\n{"ok":true}')
    assert not accepts(chat, grammar, opening + "so</think>not json")


@pytest.mark.product(one_in=1000, each=("kind", "calls"))
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_answers_are_parsed_whichever_tokens_their_markup_is(kind: str, calls: str, size: int) -> None:
    chat = chat_of(kind, calls=calls)
    mark = "<|python_tag|>" if calls == "llama3_json" else ""
    ids = chat.tokenizer.encode(f"<think>\nI add.\n</think>\n\n{mark}{CALLS[calls][1]}", add_special_tokens=False)
    skip = not chat.has_special_markup(with_tools=True)
    detokenizer = Detokenizer(chat.tokenizer, skip_special_tokens=skip)
    parser = chat.parser("", SCHEMAS, one_call=False)
    pieces = [piece for i in range(0, len(ids), size) for piece in parser.push(detokenizer.push(ids[i : i + size]))]
    start = CallStart(0, "add", "functions.add:0" if calls == "kimi_k2" else None)
    expected = [Reasoning("I add."), start, CallArguments(0, ARGUMENTS)]
    assert joined(pieces + parser.push(detokenizer.flush()) + parser.finish()) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("reasoning", "asked", "keeps"),
    [
        ("qwen3", {}, True),
        ("none", {}, False),
        ("none", {"tools": TOOLS}, True),
        ("none", {"tools": TOOLS, "tool_choice": "none"}, False),
        ("qwen3", {"skip_special_tokens": True}, False),
    ],
)
def test_answers_keep_special_tokens_where_their_markup_has_some(
    server: RunningServer, kind: str, reasoning: str, asked: dict[str, Any], keeps: bool
) -> None:
    """Unless the request says what is to be done."""
    engine = ScriptedEngine(server.engine, ["a"])
    engine.tokenizer = tokenizer_of(kind)
    options = {"chat_template": TEMPLATE, "tool_call_parser": "hermes", "reasoning_parser": reasoning}
    with running(engine, **options) as asking:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **asked}
        for path in ("chat/completions", "responses"):
            if path == "responses":
                flat = [{"type": "function", **tool["function"]} for tool in asked.get("tools", [])]
                body = {"input": "x", **asked, **({"tools": flat} if flat else {})}
                if "skip_special_tokens" in asked:
                    continue
            answer = httpx.post(f"{asking.url}/v1/{path}", json=body, timeout=30)
            assert answer.status_code == 200, answer.text
            assert engine.asked[-1][1].skip_special_tokens == (not (keeps and kind == "special"))


def test_the_tokenizer_decides_which_texts_keep_special_tokens() -> None:
    assert chat_of("special").has_special_markup(with_tools=False)
    assert chat_of("special", None).has_special_markup(with_tools=True)
    assert not chat_of("special", None).has_special_markup(with_tools=False)
    assert not chat_of("added").has_special_markup(with_tools=True)
    assert not chat_of("text").has_special_markup(with_tools=True)
