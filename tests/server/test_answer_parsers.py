"""Tool calls and reasoning in a model's text: what is found, and that it does not depend on how the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.server.parsers.answer import AnswerParser, joined
from compiled_engine.server.parsers.mistral import MistralParser
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning, TextParser
from compiled_engine.server.parsers.registry import (
    TOOL_FORMATS,
    reasoning_format_of,
    reasoning_parser,
    tool_format_of,
)

# Formats that differ in more than their marks.
FORMATS = [
    *("hermes", "llama3_json", "mistral", "kimi_k2", "deepseek_v3", "gemma4", "jamba", "xlam", "lfm2", "olmo3"),
    "llama4_pythonic",
]
# What answers are made of, with and without sense.
FRAGMENTS = [
    *sorted({text for name in FORMATS for text in TOOL_FORMATS[name].markup}),
    *("functions.add:0", "call:add", '{a:[1,<|"|>}<|"|>]}', "function", "```json", "```", "add(a=1)", "add(**{", ")"),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>"),
    *('{"name": "add", "arguments": {"a": [1, "}"]}}', '{"name":"add","parameters":{}}', '{"name": "add"}'),
    *('{"arguments": "{\\"a\\": 1}", "id": 7, "name": "add"}', '"a\\"}', "add", "[", "]", "{", "}", ",", ";", ":", '"'),
    *('"name"', '"arguments"', " ", "\n", "null", "1.5", "text", "é", "\\", "<", "</"),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
cuts = st.lists(st.integers(0, 200), max_size=12)


def parse(parser: TextParser | AnswerParser, *chunks: str) -> list[Piece]:
    return joined([piece for chunk in chunks for piece in parser.push(chunk)] + parser.finish())


def tools(name: str) -> TextParser:
    return TOOL_FORMATS[name].parser({"add": {}})


def chunked(text: str, places: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[start:end] for start, end in pairwise(borders)]


def calls(pieces: list[Piece]) -> list[tuple[str, object]]:
    """Each call with its arguments, which have to be JSON."""
    arguments = {piece.index: piece.text for piece in pieces if isinstance(piece, CallArguments)}
    return [(piece.name, json.loads(arguments[piece.index])) for piece in pieces if isinstance(piece, CallStart)]


def content(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


@pytest.mark.parametrize("name", FORMATS)
@given(text=texts, places=cuts)
def test_calls_do_not_depend_on_the_chunks(name: str, text: str, places: list[int]) -> None:
    whole = parse(tools(name), text)
    assert parse(tools(name), *chunked(text, places)) == whole
    assert parse(tools(name), *text) == whole


@pytest.mark.parametrize("name", FORMATS)
@given(text=texts, places=cuts, one_call=st.booleans(), inside=st.booleans())
def test_answers_do_not_depend_on_the_chunks(
    name: str, text: str, places: list[int], one_call: bool, inside: bool
) -> None:
    def make() -> AnswerParser:
        return AnswerParser(reasoning_parser("qwen3", "<think>" if inside else "user:"), tools(name), one_call=one_call)

    assert parse(make(), *chunked(text, places)) == parse(make(), text)


@pytest.mark.parametrize("name", FORMATS)
@given(text=texts)
def test_no_character_of_a_text_without_calls_is_lost(name: str, text: str) -> None:
    pieces = parse(tools(name), text)
    if not any(isinstance(piece, CallStart) for piece in pieces):
        assert content(pieces) == text
    indices = [piece.index for piece in pieces if isinstance(piece, CallStart)]
    assert indices == list(range(len(indices)))


@given(text=st.text(alphabet=st.characters(exclude_characters="<[{"), max_size=60), places=cuts)
def test_text_without_markup_stays_as_it_is(text: str, places: list[int]) -> None:
    for name in FORMATS:
        assert content(parse(AnswerParser(reasoning_parser("qwen3", ""), tools(name)), *chunked(text, places))) == text


KEYS = st.text(alphabet=st.characters(codec="utf-8", categories=["L", "Nd"]), min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(
    KEYS | st.just("a_b"),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


def of_gemma(value: object, quote: str) -> str:
    """A value as Gemma's templates write it."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{quote}{key}{quote}:{of_gemma(each, quote)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(of_gemma(each, quote) for each in value)}]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else str(value)


def in_python(arguments: dict[str, object]) -> str:
    return f"add({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


# How a model of a format writes a call of the tool `add`, what is between two, and what is around all of them.
BY_FORMAT: dict[str, tuple[Callable[[int, Any], str], str, str]] = {
    "hermes": (lambda i, given: f"<tool_call>\n{of_json(given)}\n</tool_call>", "\n", "{}"),
    "llama3_json": (lambda i, given: of_json(given, "parameters"), "; ", "{}"),
    "mistral": (lambda i, given: of_json(given), ", ", "[TOOL_CALLS] [{}]"),
    "kimi_k2": (
        lambda i, given: (
            f"<|tool_call_begin|>functions.add:{i}<|tool_call_argument_begin|>{json.dumps(given)}<|tool_call_end|>"
        ),
        "",
        "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
    ),
    "deepseek_v3": (
        lambda i, given: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{json.dumps(given)}\n```<｜tool▁call▁end｜>"
        ),
        "\n",
        "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        lambda i, given: f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{json.dumps(given)}<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
    ),
    "gemma4": (lambda i, given: "<|tool_call>call:add" + of_gemma(given, '<|"|>') + "<tool_call|>", "", "{}"),
    "functiongemma": (
        lambda i, given: "<start_function_call>call:add" + of_gemma(given, "<escape>") + "<end_function_call>",
        "",
        "{}",
    ),
    "granite": (lambda i, given: of_json(given), ", ", "<|tool_call|>[{}]"),
    "granite_20b_fc": (lambda i, given: f"<function_call> {of_json(given)}", "\n", "{}"),
    "internlm": (lambda i, given: f"<|action_start|><|plugin|>\n{of_json(given)}<|action_end|>", "", "{}"),
    "jamba": (lambda i, given: of_json(given), ",\n", "<tool_calls>[\n{}\n]</tool_calls>"),
    "longcat": (lambda i, given: f"<longcat_tool_call>{of_json(given)}</longcat_tool_call>", "\n", "{}"),
    "phi4_mini_json": (lambda i, given: of_json(given), ", ", "functools[{}]"),
    "xlam": (lambda i, given: of_json(given), ", ", "[{}]"),
    "lfm2": (lambda i, given: in_python(given), ", ", "<|tool_call_start|>[{}]<|tool_call_end|>"),
    "olmo3": (lambda i, given: in_python(given), "\n", "<function_calls>\n{}\n</function_calls>"),
    "llama4_pythonic": (lambda i, given: in_python(given), ", ", "<|python_start|>[{}]<|python_end|>"),
    "pythonic": (lambda i, given: in_python(given), ", ", "[{}]"),
    "openai": (
        lambda i, given: (
            f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{json.dumps(given)}<|call|>"
        ),
        "<|start|>assistant",
        "{}",
    ),
}


def of_json(arguments: dict[str, object], key: str = "arguments") -> str:
    return json.dumps({"name": "add", key: arguments})


def written(name: str, arguments: list[dict[str, object]]) -> str:
    """How a model of the format writes calls of the tool `add`."""
    each, between, around = BY_FORMAT[name]
    return around.replace("{}", between.join(each(index, given) for index, given in enumerate(arguments)))


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "openai"])
@given(arguments=st.lists(ARGUMENTS, min_size=1, max_size=3), places=cuts)
def test_calls_have_the_arguments_that_were_written(
    name: str, arguments: list[dict[str, object]], places: list[int]
) -> None:
    pieces = parse(tools(name), *chunked(written(name, arguments), places))
    assert calls(pieces) == [("add", each) for each in arguments]
    assert content(pieces) == ""


@given(arguments=st.lists(ARGUMENTS, min_size=1, max_size=3), places=cuts, with_id=st.booleans())
def test_calls_of_newer_mistral_models(arguments: list[dict[str, object]], places: list[int], with_id: bool) -> None:
    between = "[CALL_ID]ab12[ARGS]" if with_id else ""
    text = "".join(f"[TOOL_CALLS]add{between}{json.dumps(each)}" for each in arguments)
    assert calls(parse(tools("mistral"), *chunked(text, places))) == [("add", each) for each in arguments]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", 'I see.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', [("f", {"a": 2})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call> no <tool_call>{"name": "f", "arguments": {}}</tool_call>', [("f", {})]),
        ("hermes", "<tool_call>no</tool_call>", []),
        ("hermes", '<tool_call>{"id": }, "name": "f", "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"id": 1[2], "name": "f", "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"\\q": 1, "name": "f", "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": 7, "name": "f", "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name" is: "f", "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>so {"name": "f", "arguments": {}}</tool_call>', []),
        ("hermes", f'<tool_call>{{"name": {"[" * 20_000}{"]" * 20_000}, "arguments": {{}}}}</tool_call>', []),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ("llama3_json", '{"name": "Ada", "parameters": {}}', []),
        ("llama3_json", '{"answer": 42}', []),
        ("llama3_json", 'Here: {"name": "add", "parameters": {}}', []),
        ("mistral", "[TOOL_CALLS][]", []),
        ("mistral", "[TOOL_CALLS] what is this", []),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]a b[ARGS]{"a": 1}', []),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]ab12{"a": 1}', [("add", {"a": 1})]),
        ("mistral", '[TOOL_CALLS]{"name": "add", "arguments": {}}', []),
        ("mistral", '[TOOL_CALLS]add[AR{"a": 1}', []),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]{"a": 1}', []),
    ],
)
def test_what_is_a_call(name: str, text: str, expected: list[tuple[str, object]]) -> None:
    pieces = parse(tools(name), text)
    assert calls(pieces) == expected
    if not expected:
        assert content(pieces) == text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_ca', "</tool_ca"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call>\n', ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}} </b>', "</b>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</ tool_call>', "</ tool_call>"),
        ("llama3_json", '{"name": "add", "parameters": {}} ; \n', ""),
        ("llama3_json", '{"name": "add", "parameters": {}}; {"x": 1}; {"name": "add", "parameters": {}}',
         '; {"x": 1}; {"name": "add", "parameters": {}}'),
        ("llama3_json", '{"name": "add", "parameters": {} ; {"name": "add", "parameters": {}}',
         '; {"name": "add", "parameters": {}}'),
        ("llama3_json", '{"name": "add", "parameters": {}} and so on', " and so on"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}] then', "then"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}} then', "then"),
        ("mistral", "[TOOL_CALLS] add{} then", "then"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {},}</tool_call>', ""),
        ("hermes", '<tool_call>{"arguments": {}, "name": "add", \n}\n</tool_call> then', "then"),
        ("hermes", '<tool_call>{"name": "add",}</tool_call>', ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}</tool_call>\nthen', "then"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {},</tool_call>', ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {},,}</tool_call>', ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}}</tool_call>', ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}} }\n}\n</tool_call>\nthen', "then"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}]}\n</tool_call>', ""),
        ("hermes", '<tool_call>{"arguments": {}, "name": "add"}}', ""),
        ("longcat", '<longcat_tool_call>{"name": "add", "arguments": {}}}</longcat_tool_call>\nthen', "then"),
        ("jamba", '<tool_calls>[{"name": "add", "arguments": {}}}]</tool_calls>', ""),
        ("jamba", '<tool_calls>[{"name": "add", "arguments": {}}]] so', "]so"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}} so', "}so"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}}</tool_', "}</tool_"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call>} so', "} so"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}' + "}" * 17 + "</tool_call>",
         "}" * 17 + "</tool_call>"),
        ("llama3_json", '{"name": "add", "parameters": {}, }', ""),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}, }]', ""),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}, ]', ""),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}},] then', "then"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}] then', "then"),
    ],
)  # fmt: skip
def test_what_is_said_behind_a_call(name: str, text: str, said: str) -> None:
    """Its markup is none of it; what follows no call is."""
    for pieces in (parse(tools(name), text), parse(tools(name), *text)):
        assert calls(pieces) == [("add", {})]
        assert content(pieces) == said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>no</tool_call><tool_call>{"name": "add", "arguments": {}}</tool_call>'),
        ("mistral", '[TOOL_CALLS][no] [TOOL_CALLS][{"name": "add", "arguments": {}}]'),
    ],
)
def test_what_is_no_call_takes_no_index(name: str, text: str) -> None:
    starts = [piece for piece in parse(tools(name), text) if isinstance(piece, CallStart)]
    assert [(piece.index, piece.name) for piece in starts] == [(0, "add")]


def test_a_call_that_fails_after_its_beginning_keeps_its_index() -> None:
    """The arguments of the next one do not go to it."""
    text = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, x}][TOOL_CALLS][{"name": "add", "arguments": {"b": 2}}]'
    pieces = parse(tools("mistral"), text)
    assert [piece.index for piece in pieces if isinstance(piece, CallStart)] == [0, 1]
    assert calls(pieces) == [("add", {"a": 1}), ("add", {"b": 2})]


@pytest.mark.parametrize(
    "keys",
    [
        '"name": "add", "name": "mul", "arguments": {"a": 1}',
        '"arguments": "{\\"a\\": 1}", "arguments": "{\\"b\\": 2}", "name": "add"',
        '"name": "add", "arguments": {"a": 1}, "arguments": {"b": 2}, "name": "mul"',
    ],
)
def test_of_equal_keys_the_first_counts(keys: str) -> None:
    both = TOOL_FORMATS["hermes"].parser({"add": {}, "mul": {}})
    assert calls(parse(both, f"<tool_call>{{{keys}}}</tool_call>")) == [("add", {"a": 1})]


def test_a_call_that_is_cut_off_leaves_no_markup() -> None:
    assert parse(tools("mistral"), '[TOOL_CALLS]add[ARGS]{"a": 1') == [CallStart(0, "add"), CallArguments(0, '{"a": 1')]


def test_arguments_come_while_they_are_written() -> None:
    parser = tools("hermes")
    first = parser.push('<tool_call>{"name": "add", "arguments": {"text": "once up')
    assert first == [CallStart(0, "add"), *(CallArguments(0, character) for character in '{"text": "once up')]
    assert joined(parser.push("on a")) == [CallArguments(0, "on a")]


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "answer"),
    [
        ("user:", "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("user:<think>\n", "hm</think>yes", "hm", "yes"),
        ("user:<think>\n\n</think>\n\n", "</think> is a tag", "", "</think> is a tag"),
        ("user:", "no <think>hm</think>", "", "no <think>hm</think>"),
        ("user:", "<think>it never ends", "it never ends", ""),
        ("user:<think>\n", "<thi", "<thi", ""),
        ("user:", "<thi", "", "<thi"),
    ],
)
def test_reasoning(prompt: str, text: str, reasoning: str, answer: str) -> None:
    for chunks in ([text], list(text)):
        pieces = parse(AnswerParser(reasoning_parser("qwen3", prompt), None), *chunks)
        assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == reasoning
        assert content(pieces) == answer


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("continued", "text", "reasoning", "answer"),
    [
        ("<think>\nLet me", " think.\n</think>\n\nYes", " think.", "Yes"),
        ("<think>\nLet me", " never end", " never end", ""),
        ("<think>\n", "\nhm</think>\nyes", "hm", "yes"),
        ("<think>\nhm\n</think>\n\nThe sum", " is 3.", "", " is 3."),
        ("<think>a</think>b<think>c", " d</think> e", " d", "e"),
        ("<think>hm</think>", " Yes", "", " Yes"),
        ("The sum", " is </think> 3.", "", " is </think> 3."),
    ],
)
def test_reasoning_of_a_continued_message(name: str, continued: str, text: str, reasoning: str, answer: str) -> None:
    """Its last tag decides, whatever is at the end of the prompt."""
    for prompt in (f"<think>old</think>{continued}", f"<think>\n\n</think>\n\n{continued}"):
        for chunks in ([text], list(text)):
            pieces = parse(AnswerParser(reasoning_parser(name, prompt, continued), None), *chunks)
            assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == reasoning
            assert content(pieces) == answer


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "answer"),
    [
        ("gemma4", "<|turn>model\n", "<|channel>thought\nhm\n<channel|>yes", "hm", "yes"),
        ("gemma4", "<|turn>model\n", "<|channel>hm<channel|>yes", "hm", "yes"),
        ("gemma4", "<|turn>model\n<|channel>thought\n", "hm<channel|>yes", "hm", "yes"),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "yes", "", "yes"),
        ("gemma4", "<|turn>model\n", "<|channel>thou", "", ""),
        ("gemma4", "<|turn>model\n", "<|channel>thought\nhm", "hm", ""),
        ("gemma4", "<|turn>model\n", "<|chan", "", "<|chan"),
        ("gemma4", "<|turn>model\n", "<|channel>thought\nhm\n<|tool_call>call:f{}", "hm", "<|tool_call>call:f{}"),
        ("mistral", "[/INST]", "[THINK]hm[/THINK]yes", "hm", "yes"),
        ("mistral", "[/INST][THINK]", "hm [/THINK] yes", "hm", "yes"),
        ("granite", "", "Here is my thought process:\nhm\n\nHere is my response:\nyes", "hm", "yes"),
        ("granite", "", "Here is my answer", "", "Here is my answer"),
        ("seed_oss", "", "<seed:think>hm</seed:think>yes", "hm", "yes"),
        ("hunyuan_a13b", "", "<think>\nhm\n</think>\n<answer>\nyes\n</answer>", "hm", "yes"),
        ("hunyuan_a13b", "", "<answer>yes</answer> so", "", "yes so"),
        ("hunyuan_a13b", "", "<think>hm</think>yes <ans", "hm", "yes <ans"),
        ("hunyuan_a13b", "", "<think>hm</think><answer>yes</ans", "hm", "yes</ans"),
        ("hunyuan_a13b", "<think>\n\n</think>\n", "<answer>\nyes\n</answer>", "", "yes"),
        ("hunyuan_a13b", "<think>\n\n</think>\n", " yes", "", " yes"),
        ("ernie45", "<think>", "hm</think>\n\n<response>\nyes</response>\n", "hm", "yes\n"),
        ("kimi_k2", "", "<think>hm</think>yes", "hm", "yes"),
        ("kimi_k2", "", "<think>hm<|tool_calls_section_begin|>x", "hm", "<|tool_calls_section_begin|>x"),
        ("kimi_k2", "<think>", "hm <|tool_calls_sec", "hm <|tool_calls_sec", ""),
        ("qwen3", "", "<think>hm<|tool_calls_section_begin|>x", "hm<|tool_calls_section_begin|>x", ""),
    ],
)
def test_reasoning_with_other_tags(name: str, prompt: str, text: str, reasoning: str, answer: str) -> None:
    for chunks in ([text], list(text)):
        parser = reasoning_parser(name, prompt)
        pieces = parse(AnswerParser(parser, None), *chunks)
        assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == reasoning
        assert content(pieces) == answer


def test_a_call_ends_the_reasoning_of_kimi() -> None:
    text = f"<think>hm{written('kimi_k2', [{'a': 1}])}"
    pieces = parse(AnswerParser(reasoning_parser("kimi_k2", ""), tools("kimi_k2")), *text)
    assert pieces == [Reasoning("hm"), CallStart(0, "add", "functions.add:0"), CallArguments(0, '{"a": 1}')]


def test_a_continued_message_without_text_is_an_answer_that_begins() -> None:
    assert parse(AnswerParser(reasoning_parser("deepseek_r1", "bot:", ""), None), "hm</think>a") == [
        Reasoning("hm"),
        Content("a"),
    ]


def test_calls_after_reasoning_and_none_within_it() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    pieces = parse(AnswerParser(reasoning_parser("deepseek_r1", ""), tools("hermes")), f"{call}</think>\n\n{call}")
    assert pieces == [Reasoning(call), CallStart(0, "add"), CallArguments(0, "{}")]


def test_a_single_call_where_parallel_ones_are_not_wanted() -> None:
    pieces = parse(AnswerParser(None, tools("hermes"), one_call=True), written("hermes", [{"a": 1}, {"a": 2}]))
    assert pieces == [CallStart(0, "add"), CallArguments(0, '{"a": 1}')]


@pytest.mark.parametrize(
    ("template", "tool_format", "reasoning"),
    [
        ("{{ m.content }}", None, None),
        ("<tool_call>\n{'name': ..., 'arguments': ...} content.split('</think>') <think>", "hermes", "qwen3"),
        ("<tool_call>\n<function=name>\n<parameter=key> tool_call.arguments", "qwen3_coder", None),
        ("<seed:tool_call>\n<function=name>\n<parameter=key> tool_call.arguments", "seed_oss", None),
        ("<tool_call>name\n<arg_key>key</arg_key>\n<arg_value> tool_call.arguments", "glm45", None),
        ("'<minimax:tool_call>' ... <invoke name= ... tool_call.arguments", "minimax_m2", None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", None),
        ("<|start_header_id|>ipython <|python_tag|>", "llama3_json", None),
        ("content.split('</think>')[-1]", None, "deepseek_r1"),
        ("<|tool_calls_section_begin|><|tool_call_begin|> <think></think>", "kimi_k2", "kimi_k2"),
        ("<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' '```json' '</think>'", "deepseek_v3", "deepseek_r1"),
        ("<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' <think></think>", "deepseek_v31", "qwen3"),
        ("'<|tool_call>call:' <|channel>thought <channel|> parameters:{", "gemma4", "gemma4"),
        ("'<start_function_call>call:' <escape>", "functiongemma", None),
        ("<|tool_call|> Here is my thought process: Here is my response:", "granite", "granite"),
        ('<function_call> {"name": "no_function", "arguments": {}}', "granite_20b_fc", None),
        ("<|action_start|><|plugin|>\n", "internlm", None),
        ('<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>', "jamba", None),
        ('<longcat_tool_call>{"name":', "longcat", None),
        ('formatted as functools[{"name":', "phi4_mini_json", None),
        ('ipython, a single JSON array: [{"name": "f", "arguments": {}}]', "xlam", None),
        ("List of tools: <|tool_list_start|>[", "lfm2", None),
        ("<function_calls>\n", "olmo3", None),
        ("ipython [func_name1(params_name1=params_value1)]", "pythonic", None),
        ("<|header_start|>ipython [func_name1(param1=value1)]", "llama4_pythonic", None),
        ("[TOOL_CALLS] [THINK][/THINK]", "mistral", "mistral"),
        ("<seed:think></seed:think>", None, "seed_oss"),
        ("<think></think> <answer></answer>", None, "hunyuan_a13b"),
        ("between <think></think> and <response></response>", None, "ernie45"),
    ],
)
def test_formats_follow_from_the_template(template: str, tool_format: str | None, reasoning: str | None) -> None:
    assert tool_format_of(template) == tool_format
    assert reasoning_format_of(template) == reasoning


def test_ids_of_calls() -> None:
    assert TOOL_FORMATS["hermes"].call_id().startswith("call_")
    mistral = TOOL_FORMATS["mistral"].call_id()
    assert len(mistral) == 9
    assert mistral.isalnum()


def test_a_name_of_mistral_without_end_is_content() -> None:
    """It would be compared with all before it at each further character."""
    parser = MistralParser()
    text = "[TOOL_CALLS]" + "a" * 5000
    pieces: list[Piece] = []
    given = 0
    for number, character in enumerate(text):
        new = parser.push(character)
        pieces += new
        given += len(content(new))
        assert number + 1 - given < 1000
    assert joined(pieces + parser.finish()) == [Content(text)]
