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
from random_schemas import is_valid, random_schema

from compiled_engine.features.structured.grammars.text import grammar_text
from compiled_engine.features.structured.grammars.trials import parser_limits
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.sampling.structured_outputs import StructuredOutputs
from compiled_engine.server.chat_format import ChatFormat, SpecialTokenGuard
from compiled_engine.server.chat_messages import FunctionDefinition, Tool
from compiled_engine.server.errors import ApiError
from compiled_engine.server.forms import ToolUse, answer_form
from compiled_engine.server.long_work import LongWork
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
TAGS = sorted({text for tools in TOOL_FORMATS.values() for text in tools.markup if text[-1] in ">]"})
SPECIAL = ("<end>", "<think>", "</think>", "<|channel>", "<channel|>", "[THINK]", "[/THINK]", *TAGS)
MARKS = {*b'<[{"'}
READABLE = {*range(97, 110), *b' \n{}[],:;"0123<>/'}
# Formats whose grammars differ in more than their marks.
TEMPLATES = {
    **dict.fromkeys(("hermes", "llama3_json", "mistral", "kimi_k2", "deepseek_v3", "deepseek_v31", "gemma4"), ""),
    **dict.fromkeys(("granite", "internlm", "jamba", "phi4_mini_json", "xlam", "lfm2", "olmo3", "pythonic"), ""),
    **dict.fromkeys(("qwen3_coder", "seed_oss", "glm45", "minimax_m2", "openai"), ""),
    "mistral with names": "[ARGS]",
}

# What precedes an answer's text.
BEFORE_TEXT = {"openai": "<|channel|>final<|message|>"}
WHOLE_ANSWERS = ("llama3_json", "xlam", "llama4_pythonic", "pythonic")
OBJECT = '{"name": "look-up", "arguments": {}}'
D, S, E = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALLS = {
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "llama3_json": '{"name": "look-up", "parameters": {}}',
    "mistral": f"[TOOL_CALLS][{OBJECT}]",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look-up:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": f"<｜tool▁calls▁begin｜>{D}function{S}look-up\n```json\n{{}}\n```{E}<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜>{D}look-up{S}{{}}{E}<｜tool▁calls▁end｜>",
    "gemma4": "<|tool_call>call:look-up{}<tool_call|>",
    "functiongemma": "<start_function_call>call:look-up{}<end_function_call>",
    "granite": f"<|tool_call|>[{OBJECT}]",
    "granite_20b_fc": f"<function_call>\n{OBJECT}\n",
    "internlm": f"<|action_start|><|plugin|>\n{OBJECT}\n<|action_end|>",
    "jamba": f"<tool_calls>[{OBJECT}]</tool_calls>",
    "longcat": f"<longcat_tool_call>\n{OBJECT}\n</longcat_tool_call>",
    "phi4_mini_json": f"functools[{OBJECT}]",
    "xlam": f"[{OBJECT}]",
    "lfm2": "<|tool_call_start|>[look-up(**{})]<|tool_call_end|>",
    "olmo3": "<function_calls>look-up(**{})</function_calls>",
    "llama4_pythonic": "[look-up(**{})]",
    "pythonic": "[look-up(**{})]",
    "qwen3_coder": "<tool_call>\n<function=look-up>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=look-up>\n</function>\n</seed:tool_call>",
    "glm45": "<tool_call>look-up\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look-up">\n</invoke>\n</minimax:tool_call>',
    "mistral with names": "[TOOL_CALLS]look-up[ARGS]{}",
}


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


TOKENS = LLTokenizer(TokenizerWrapper(Bytes()))
LONG_WORK = LongWork("forms", 1000, 10)


class Words:
    """The tokenizer of `Bytes`, with or without the special tokens."""

    def __init__(self, special: bool) -> None:
        self.ids_of_special = {text: 256 + index for index, text in enumerate(SPECIAL)} if special else {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def chat_format(name: str, special: bool, reasoning: str | None = None) -> ChatFormat:
    tokenizer: Any = Words(special)
    tools = TOOL_FORMATS[name.split(maxsplit=1)[0]]
    reasoning = reasoning or tools.reasoning
    return ChatFormat(
        tokenizer, TEMPLATES.get(name, ""), None, tools, reasoning, SpecialTokenGuard(tokenizer), LONG_WORK, (), {}
    )


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


def drawn(grammar: str, seed: int, longest: int = 600) -> str | None:
    """A text of the grammar; None if it has not ended by then. Ends where it may, more often than not."""
    rng = random.Random(seed)
    matcher = LLMatcher(TOKENS, grammar, log_level=0, limits=parser_limits())
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
    parser = chat.parser(prompt, SCHEMAS, one_call=False)
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


@pytest.mark.product(one_in=1000, each=("name",))
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_required_calls_are_calls_and_follow_their_schemas(name: str, special: bool) -> None:
    chat = chat_format(name, special)
    for several in (False, True):
        grammar = form_of(chat, tool_use(required=True, several=several, strict=False))
        texts = [text for seed in range(8) if (text := drawn(grammar, seed)) is not None]
        assert len(texts) > 3
        for text in texts:
            pieces = check_calls(chat, text, at_least=1, at_most=99 if several else 1)
            assert not "".join(piece.text for piece in pieces if isinstance(piece, Content)).strip()


@pytest.mark.product(one_in=1000, each=("name",))
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_strict_calls_follow_their_schemas_wherever_they_occur(name: str, special: bool) -> None:
    chat = chat_format(name, special)
    grammar = form_of(chat, tool_use(required=False))
    texts = [text for seed in range(25) if (text := drawn(grammar, seed)) is not None]
    for text in texts:
        check_calls(chat, text, at_least=0)
    matcher = LLMatcher(TOKENS, grammar, log_level=0, limits=parser_limits())
    said = f"{BEFORE_TEXT.get(name, '')}I will not <b>call</b> it. Sorry, [1, 2]"
    assert matcher.consume_tokens(tokens_of(said, special)), matcher.get_error()
    assert matcher.is_accepting()
    if not special and name not in WHOLE_ANSWERS:
        opening = ["<|tool_call_begin|>"] if name == "kimi_k2" else []
        for mark in (*TOOL_FORMATS[name.split(maxsplit=1)[0]].markup[:1], *opening):
            assert not matcher.deep_copy().consume_tokens(list(f"{mark}call it".encode()))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_text_may_come_before_and_after_a_strict_call(name: str, special: bool) -> None:
    """The text is written as a model of the format writes it, except for arguments that a grammar wants in JSON."""
    chat = chat_format(name, special)
    grammar = form_of(chat, tool_use(required=False, names=("look-up",)))
    matcher = LLMatcher(TOKENS, grammar, log_level=0, limits=parser_limits())
    text = CALLS[name] if name in WHOLE_ANSWERS else f"So I look it up.{CALLS[name]}"
    for _ in range(1 if name in WHOLE_ANSWERS else 2):
        assert matcher.consume_tokens(tokens_of(text, special)), matcher.get_error()
        assert matcher.is_accepting()
    if name not in WHOLE_ANSWERS:
        assert matcher.consume_tokens(list(b"Done, <b>[1]</b>."))
        assert matcher.is_accepting()
    assert check_calls(chat, text, at_least=1)[0] == (
        CallStart(0, "look-up") if name in WHOLE_ANSWERS else Content("So I look it up.")
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_is_a_call_or_has_the_form_that_was_asked_for(name: str) -> None:
    chat = chat_format(name, special=True)
    grammar = form_of(chat, tool_use(required=False, strict=False), ANSWER)
    for seed in range(25):
        text = drawn(grammar, seed)
        if text is not None and text.removeprefix(BEFORE_TEXT.get(name, "")) not in ('{"ok":true}', '{"ok":false}'):
            parser = chat.parser("", SCHEMAS, one_call=False)
            assert any(isinstance(piece, CallStart) for piece in parser.push(text) + parser.finish()), text


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("reasoning", "prompt"), [("qwen3", ""), ("qwen3", "<think>\n"), ("deepseek_r1", ""), ("kimi_k2", "")]
)
def test_the_form_begins_where_the_reasoning_ends(reasoning: str, prompt: str, special: bool) -> None:
    chat = chat_format("hermes", special, reasoning)
    inside = bool(prompt) or reasoning == "deepseek_r1"

    def accepts(grammar: str, *parts: str) -> bool:
        matcher = LLMatcher(TOKENS, grammar, log_level=0, limits=parser_limits())
        tokens = [token for part in parts for token in tokens_of(part, special and part in SPECIAL)]
        return matcher.consume_tokens(tokens) and matcher.is_accepting()

    answer = form_of(chat, None, ANSWER, prompt)
    begin = () if inside else ("<think>",)
    assert accepts(answer, *begin, 'I {"think" ', "</think>", '\n\n{"ok":true}')
    assert accepts(answer, '{"ok":true}') is not inside
    assert not accepts(answer, *begin, "hm", "</think>", "so: yes")
    calls = form_of(chat, tool_use(required=True, names=("look-up",)), None, prompt)
    call = ("<tool_call>", f"\n{OBJECT}\n", "</tool_call>")
    assert accepts(calls, *begin, "hm", "</think>", "\n", *call)
    whole = f"{'' if inside else '<think>'}hm</think>\n{''.join(call)}"
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


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if TOOL_FORMATS[name.split(maxsplit=1)[0]].markup])
def test_required_calls_follow_random_schemas(name: str, special: bool) -> None:
    chat = chat_format(name, special)
    found = 0
    for seed in range(6):
        schema = random_schema(random.Random(seed))
        tool = Tool(type="function", function=FunctionDefinition(name="f", parameters=schema, strict=True))
        grammar = form_of(chat, ToolUse([tool], required=True, several=False))
        if (text := drawn(grammar, seed)) is None:
            continue
        parser = chat.parser("", {"f": schema}, one_call=False)
        pieces = joined(parser.push(text) + parser.finish())
        start, *rest = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        assert isinstance(start, CallStart), text
        assert start.name == "f", text
        arguments = "".join(piece.text for piece in rest if isinstance(piece, CallArguments))
        assert is_valid(json.loads(arguments), schema), (text, schema)
        found += 1
    assert found > 2


# Schemas of one argument, texts that are an argument of them, and others that are none.
TEXTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "string"}, ["", "a", "</x>\n<b>", "7", "null"], []),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é\nü"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a/b\\d$"}, ["a/b1"], ["a/b", "xa/b1"]),
    ({"type": "string", "pattern": "[xy]"}, ["x", "a y b"], ["", "z"]),
    ({"type": "string", "pattern": "^x", "maxLength": 3}, ["x", "x z"], ["x  zz", " x"]),
    ({"enum": ["a", "", 7, None]}, ["a", "", "7", "null"], ["b", "8"]),
    ({"$ref": "#/$defs/kind"}, ["a", "b"], ["c"]),
    ({"anyOf": [{"$ref": "#/$defs/kind"}, {"type": "null"}]}, ["a", "null"], ["c", "true"]),
    ({"type": ["string", "null"]}, ["so", "null", "nullable"], []),
    ({"type": ["integer", "string"]}, ["7", "seven", "x7"], ["7x", "-x"]),
    ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]},
     ["[7]", "seven"], ["[x]", "[7.5]"]),
    ({"type": "array", "items": {"$ref": "#/$defs/kind"}}, ['["a"]'], ['["c"]', "a"]),
    ({"type": "boolean"}, ["true"], ["True", "yes"]),
    ({"type": "number", "minimum": 0}, ["1.5"], ["-1", '"1"']),
    ({}, ["x", "7", '{"a": 1}'], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), TEXTS)
def test_the_text_of_an_argument_follows_its_schema(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    plain, special = chat_format("qwen3_coder", special=False), chat_format("glm45", special=True)
    whole = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"kind": {"enum": ["a", "b"]}}}
    tool = Tool(type="function", function=FunctionDefinition(name="f", parameters=whole, strict=True))
    given = ToolUse([tool], required=True, several=False)
    grammars = [form_of(chat, given) for chat in (plain, special)]

    def accepts(text: str) -> bool:
        """Whether both formats take a text, or neither does."""
        before = ("<tool_call>", "f", "<arg_key>", "x", "</arg_key>", "<arg_value>")
        tags = (*before, text, "</arg_value>", "</tool_call>")
        ids = [token for tag in tags for token in ([256 + SPECIAL.index(tag)] if tag in SPECIAL else tag.encode())]
        call = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
        found = set()
        for grammar, tokens in zip(grammars, (list(call.encode()), ids), strict=True):
            matcher = LLMatcher(TOKENS, grammar, log_level=0, limits=parser_limits())
            found.add(bool(matcher.consume_tokens(tokens) and matcher.is_accepting()))
        (result,) = found
        return result

    assert [text for text in right if not accepts(text)] == []
    assert [text for text in wrong if accepts(text)] == []


def test_a_text_does_not_hold_what_would_end_it() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    tool = Tool(type="function", function=FunctionDefinition(name="f", parameters=schema, strict=True))
    grammar = form_of(chat_format("qwen3_coder", special=False), ToolUse([tool], required=True, several=False))
    for text in ("</parameter>", "\n<parameter=x>", "\n</function>\n</tool_call>"):
        matcher = LLMatcher(TOKENS, grammar, log_level=0, limits=parser_limits())
        assert matcher.consume_tokens(list(b"<tool_call>\n<function=f>\n<parameter=x>\na < b"))
        assert not matcher.consume_tokens(list(text.encode()))


def test_many_tools_fit_into_a_grammar() -> None:
    kinds = ("string", "integer", "boolean", "array")
    properties = {f"argument_{i}": {"type": kinds[i % 4], "description": "x" * 100} for i in range(10)}
    schema = {"type": "object", "properties": properties, "required": ["argument_1"]}
    tools = [
        Tool(type="function", function=FunctionDefinition(name=f"tool_{i}", parameters=schema, strict=True))
        for i in range(128)
    ]
    for name in ("qwen3_coder", "glm45", "minimax_m2"):
        assert form_of(chat_format(name, special=True), ToolUse(tools, required=True, several=True))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("reasoning", "opening", "label", "closing"),
    [
        ("gemma4", "<|channel>", "thought", "<channel|>"),
        ("mistral", "[THINK]", "", "[/THINK]"),
        ("granite", "Here is my thought process:", "", "Here is my response:"),
        ("seed_oss", "<seed:think>", "", "</seed:think>"),
    ],
)
def test_the_form_begins_where_reasoning_with_other_tags_ends(
    reasoning: str, opening: str, label: str, closing: str, special: bool
) -> None:
    chat = chat_format("hermes", special, reasoning)
    known = {text: 256 + index for index, text in enumerate(SPECIAL)} if special else {}

    def allows(grammar: str, *parts: str) -> LLMatcher | None:
        matcher = LLMatcher(TOKENS, grammar, log_level=0, limits=parser_limits())
        tokens = [token for part in parts for token in ([known[part]] if part in known else part.encode())]
        return matcher if matcher.consume_tokens(tokens) else None

    before = form_of(chat, None, ANSWER)
    for parts in ((opening, f"{label}\nhm", closing, '\n{"ok":true}'), ('{"ok":true}',)):
        matcher = allows(before, *parts)
        assert matcher is not None
        assert matcher.is_accepting()
    assert allows(before, opening, f"{label}\nhm", closing, "so: yes") is None
    assert allows(form_of(chat, None, ANSWER, f"model:{opening}{label}\n"), "hm") is not None


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
