"""What a grammar of calls lets through is what its parser reads: texts are drawn from the grammar at random."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.grammars.text import grammar_text
from compiled_engine.grammars.trials import parser_limits
from compiled_engine.sampling.structured_outputs import StructuredOutputs
from compiled_engine.server.chat_format import ChatFormat, SpecialTokenGuard
from compiled_engine.server.chat_messages import FunctionDefinition, Tool
from compiled_engine.server.errors import ApiError
from compiled_engine.server.forms import ToolUse, answer_form
from compiled_engine.server.long_work import LongWork
from compiled_engine.server.parsers import harmony
from compiled_engine.server.parsers.answer import joined
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Reasoning
from compiled_engine.server.parsers.registry import TOOL_FORMATS

SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": -9, "maximum": 99}, "b": {"enum": ["x", 'say "hi"', "ü"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "look-up": {"type": "object", "properties": {}, "additionalProperties": False},
}
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
# The bytes, an end, and the special tokens that some formats have.
SPECIAL = ("<end>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", *harmony.MARKUP)
MARKS = {*b'<[{"'}
READABLE = {*range(97, 110), *b' \n{}[],:;"0123<>'}
TEMPLATES = {"hermes": "", "llama3_json": "", "mistral": "", "mistral with names": "[ARGS]", "openai": ""}

# What precedes an answer's text.
BEFORE_TEXT = {"openai": "<|channel|>final<|message|>"}


class Bytes:
    tokens = (*(bytes([byte]) for byte in range(256)), *(text.encode() for text in SPECIAL))
    eos_token_id, bos_token_id = 256, None
    special_token_ids = tuple(range(256, 256 + len(SPECIAL)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def tokens_of(text: str, special: bool) -> list[int]:
    """Bytes, and the special tokens if there are any."""
    parts = re.split(f"({'|'.join(map(re.escape, SPECIAL))})", text) if special else [text]
    ids = {token: 256 + index for index, token in enumerate(SPECIAL)} if special else {}
    return [token for part in parts for token in ([ids[part]] if part in ids else part.encode())]


LONG_WORK = LongWork("forms", 1000, 10)


class Guard(SpecialTokenGuard):
    def __init__(self, special: bool) -> None:
        self._tokenizer = None
        self._ids = {text: 256 + index for index, text in enumerate(SPECIAL)} if special else {}


def chat_format(name: str, special: bool, reasoning: str | None = None) -> ChatFormat:
    tokenizer: Any = None
    tools = TOOL_FORMATS[name.split(maxsplit=1)[0]]
    reasoning = reasoning or tools.reasoning
    return ChatFormat(tokenizer, TEMPLATES[name], None, tools, reasoning, Guard(special), LONG_WORK, (), {})


def tool_use(*, required: bool, several: bool = True, strict: bool = True, names: tuple[str, ...] = ()) -> ToolUse:
    tools = [
        Tool(type="function", function=FunctionDefinition(name=name, parameters=SCHEMAS[name], strict=strict))
        for name in names or SCHEMAS
    ]
    return ToolUse(tools, required=required, several=several)


def form_of(
    chat: ChatFormat,
    use: ToolUse | None,
    asked: dict[str, Any] | None = None,
    prompt: str = "",
    continued: str | None = None,
) -> str:
    given = None if asked is None else StructuredOutputs(json=asked, disable_any_whitespace=True)
    form = asyncio.run(answer_form(LONG_WORK, chat, prompt, use, given, continued))
    assert form is not None
    return grammar_text(form)


def drawn(grammar: str, seed: int, longest: int = 400) -> str | None:
    """A text of the grammar; None if it has not ended by then. Ends where it may, more often than not."""
    rng = random.Random(seed)
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes())), grammar, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    text = b""
    for _ in range(longest):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = [i for i in np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist() if i < len(Bytes.tokens)]
        assert allowed, matcher.get_error()
        if 256 in allowed and (len(allowed) == 1 or rng.random() < 0.6):
            return text.decode()
        marks = [i for i in allowed if i > 256 or i in MARKS]
        # Text that can be read, and rather what begins a call than more of it.
        plain = [i for i in allowed if i in READABLE] or allowed
        token = rng.choice(marks if marks and rng.random() < 0.4 else [i for i in plain if i != 256] or allowed)
        assert matcher.consume_token(token), matcher.get_error()
        text += Bytes.tokens[token]
    return None


def check_calls(chat: ChatFormat, text: str, *, at_least: int, at_most: int = 99, prompt: str = "") -> list[Any]:
    parser = chat.parser(prompt, list(SCHEMAS), one_call=False)
    pieces = joined(parser.push(text) + parser.finish())
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    assert at_least <= len(starts) <= at_most, text
    for start in starts:
        arguments = json.loads(
            "".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == start.index)
        )
        assert start.name in SCHEMAS, text
        assert set(arguments) == set(SCHEMAS[start.name]["properties"]), text
        if start.name == "add":
            assert -9 <= arguments["a"] <= 99, text
            assert arguments["b"] in ("x", 'say "hi"', "ü"), text
    return pieces


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_required_calls_are_calls_and_follow_their_schemas(name: str, special: bool) -> None:
    chat = chat_format(name, special)
    for several in (False, True):
        grammar = form_of(chat, tool_use(required=True, several=several, strict=False))
        texts = [text for seed in range(12) if (text := drawn(grammar, seed)) is not None]
        assert len(texts) > 4
        for text in texts:
            pieces = check_calls(chat, text, at_least=1, at_most=99 if several else 1)
            assert not "".join(piece.text for piece in pieces if isinstance(piece, Content)).strip()


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_strict_calls_follow_their_schemas_wherever_they_occur(name: str, special: bool) -> None:
    chat = chat_format(name, special)
    grammar = form_of(chat, tool_use(required=False))
    texts = [text for seed in range(25) if (text := drawn(grammar, seed)) is not None]
    for text in texts:
        check_calls(chat, text, at_least=0)
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes())), grammar, log_level=0, limits=parser_limits())
    said = f"{BEFORE_TEXT.get(name, '')}I will not <b>call</b> it. Sorry, [1, 2]"
    assert matcher.consume_tokens(tokens_of(said, special)), matcher.get_error()
    assert matcher.is_accepting()
    if not special and name == "hermes":
        assert not matcher.consume_tokens(list(b"<tool_call>call it</tool_call>"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_is_a_call_or_has_the_form_that_was_asked_for(name: str) -> None:
    chat = chat_format(name, special=True)
    grammar = form_of(chat, tool_use(required=False, strict=False), ANSWER)
    for seed in range(25):
        text = drawn(grammar, seed)
        if text is not None and text.removeprefix(BEFORE_TEXT.get(name, "")) not in ('{"ok":true}', '{"ok":false}'):
            parser = chat.parser("", list(SCHEMAS), one_call=False)
            assert any(isinstance(piece, CallStart) for piece in parser.push(text) + parser.finish()), text


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("reasoning", "prompt"), [("qwen3", ""), ("qwen3", "<think>\n"), ("deepseek_r1", "")])
def test_the_form_begins_where_the_reasoning_ends(reasoning: str, prompt: str, special: bool) -> None:
    chat = chat_format("hermes", special, reasoning)
    inside = bool(prompt) or reasoning == "deepseek_r1"
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))

    def accepts(grammar: str, *parts: str) -> bool:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        tokens = [token for part in parts for token in tokens_of(part, special and part in SPECIAL)]
        return matcher.consume_tokens(tokens) and matcher.is_accepting()

    answer = form_of(chat, None, ANSWER, prompt)
    begin = () if inside else ("<think>",)
    assert accepts(answer, *begin, 'I {"think" ', "</think>", '\n\n{"ok":true}')
    assert accepts(answer, '{"ok":true}') is not inside
    assert not accepts(answer, *begin, "hm", "</think>", "so: yes")
    calls = form_of(chat, tool_use(required=True, names=("look-up",)), None, prompt)
    call = '<tool_call>\n{"name": "look-up", "arguments": {}}\n</tool_call>'
    assert accepts(calls, *begin, "hm", "</think>", "\n", call)
    whole = f"{'' if inside else '<think>'}hm</think>\n{call}"
    pieces = check_calls(chat, whole, at_least=1, prompt=prompt)
    assert [piece.text for piece in pieces if isinstance(piece, Reasoning)] == ["hm"]
    closed = form_of(chat, None, ANSWER, "<think>\n\n</think>\n\n")
    assert accepts(closed, '{"ok":true}')
    assert not accepts(closed, "hm", "</think>", '{"ok":true}')
    within = form_of(chat, None, ANSWER, "<think>\nLet me", "<think>\nLet me")
    assert accepts(within, " see", "</think>", '\n{"ok":true}')
    assert not accepts(within, '{"ok":true}')
    for continued in ("<think>hm</think>So: ", "So: "):
        after = form_of(chat, None, ANSWER, continued, continued)
        assert accepts(after, '{"ok":true}')
        assert not accepts(after, "hm", "</think>", '{"ok":true}')


def test_text_needs_no_grammar() -> None:
    chat = chat_format("hermes", special=False, reasoning="qwen3")
    assert asyncio.run(answer_form(LONG_WORK, chat, "", None, None)) is None
    assert asyncio.run(answer_form(LONG_WORK, chat, "", tool_use(required=False, strict=False), None)) is None


def test_a_strict_schema_that_is_not_supported_is_refused_and_any_other_is_not_followed() -> None:
    chat = chat_format("hermes", special=False)
    odd = FunctionDefinition(name="odd", parameters={"type": "object", "not": {}}, strict=True)
    with pytest.raises(ApiError, match=r"tools\[0\].function.parameters: .*Unimplemented keys") as caught:
        form_of(chat, ToolUse([Tool(type="function", function=odd)], required=False, several=True))
    assert caught.value.status == 400
    odd.strict = False
    grammar = form_of(chat, ToolUse([Tool(type="function", function=odd)], required=True, several=False))
    assert "odd" in (drawn(grammar, 3, 2000) or grammar)


def test_literals_of_a_real_tokenizer(bundled_tokenizer: Tokenizer) -> None:
    guard = SpecialTokenGuard(bundled_tokenizer)
    special = bundled_tokenizer.decode([min(bundled_tokenizer.special_ids)])
    (token_id,) = bundled_tokenizer.encode(special, add_special_tokens=False)
    assert guard.literal(special) == f"<[{token_id}]>"
    assert guard.literal('a "b"') == '"a \\"b\\""'
