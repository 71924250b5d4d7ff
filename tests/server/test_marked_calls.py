"""Calls between the marks of families of models: what is a call, what is content, and how texts are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_answer_parsers import ARGUMENTS, BY_FORMAT, calls, chunked, content, cuts, parse, tools, written

from compiled_engine.server.parsers.gemma_arguments import GemmaArguments
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece
from compiled_engine.server.parsers.registry import TOOL_FORMATS

SAMPLES: list[dict[str, Any]] = [
    {"a": 1, "b": "x"},
    {"text": 'it\'s "so" \\ <b> }{ [1], \n(é)', "list": [1, {"no": None, "yes": True}, []], "f": -1.5},
    {},
]


@pytest.mark.parametrize("name", sorted({*BY_FORMAT} - {"openai"}))
def test_calls_in_a_text_that_is_cut_anywhere(name: str) -> None:
    is_whole = name in ("llama3_json", "xlam", "pythonic")
    text = ("" if is_whole or name == "llama4_pythonic" else "I call. \n\n") + written(name, SAMPLES)
    whole = parse(tools(name), text)
    assert calls(whole) == [("add", each) for each in SAMPLES]
    assert content(whole) in ("I call.", "")
    for place in range(len(text)):
        assert parse(tools(name), text[:place], text[place:]) == whole, (name, place)


@pytest.mark.parametrize("name", sorted({*BY_FORMAT} - {"llama3_json", "xlam", "pythonic", "openai"}))
def test_a_text_that_ends_anywhere_keeps_what_is_no_call(name: str) -> None:
    """Before its call begins, all of it is content; then none of its markup is."""
    text = written(name, SAMPLES[:1])
    for end in range(len(text)):
        pieces = parse(tools(name), text[:end])
        if any(isinstance(piece, CallStart) for piece in pieces):
            left = content(pieces)  # of a closing mark that was cut off
            assert text[:end].endswith(left)
            assert not left or any(mark.startswith(left) for mark in (*TOOL_FORMATS[name].markup, "```"))
        else:
            assert content(pieces) == text[:end]


D, E = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
K, A = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"


@pytest.mark.parametrize(
    ("name", "text", "expected", "said"),
    [
        ("kimi_k2", f'{K}functions.f:0{A}{{"a": 1}}<|tool_call_end|>', [("f", {"a": 1})], ""),
        ("kimi_k2", f"{K} functions.my.f:12 {A} {{}} <|tool_call_end|> <|tool_calls_section_end|> so",
         [("my.f", {})], "so"),
        ("kimi_k2", f"{K}f{A}{{}}", [("f", {})], ""),
        ("kimi_k2", f"{K}functions.a:b:3{A}{{}}", [("a:b", {})], ""),
        ("kimi_k2", f"{K}functions.f:0{{}}<|tool_call_end|>", [], None),
        ("kimi_k2", f"{K}{A}{{}}", [], None),
        ("kimi_k2", f"{K}functions.f:0{A}[]", [], None),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>", [], None),
        ("kimi_k2", f"{K} no {K}functions.f:0{A}{{}}", [("f", {})], f"{K} no"),
        ("kimi_k2", f"{K}{'n' * 400}{A}{{}}", [], None),
        ("deepseek_v3", f"{D}function<｜tool▁sep｜>f\n```json\n{{}}\n```{E}", [("f", {})], ""),
        ("deepseek_v3", f"{D}function<｜tool▁sep｜>f\n```json\n{{}}{E} so", [("f", {})], "so"),
        ("deepseek_v3", f"{D}function<｜tool▁sep｜>f\n{{}}{E}", [], None),
        ("deepseek_v3", f"{D}f<｜tool▁sep｜>{{}}{E}", [], None),
        ("deepseek_v31", f'{D}f<｜tool▁sep｜>{{"a": "}}"}}{E}', [("f", {"a": "}"})], ""),
        ("deepseek_v31", f"{D}f\n{{}}{E}", [], None),
        ("deepseek_v31", f"{D}<｜tool▁sep｜>{{}}{E}", [], None),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x, y}<|"|>,b:[true,<|"|><|"|>],c:{d:-2.5e3}}<tool_call|>',
         [("f", {"a": "x, y}", "b": [True, ""], "c": {"d": -2500.0}})], ""),
        ("gemma4", '<|tool_call>call:f{"a": "x\\n", "b": null}<tool_call|>', [("f", {"a": "x\n", "b": None})], ""),
        ("gemma4", "<|tool_call>call:f{ a : San Francisco , b : None, c: NaN, d: 10:30 }",
         [("f", {"a": "San Francisco", "b": None, "c": "NaN", "d": "10:30"})], ""),
        ("gemma4", '<|tool_call>call:f{a:<|"|><|"<|"|>,}<tool_call|>', [("f", {"a": '<|"'})], ""),
        ("gemma4", "<|tool_call>call:f{}<tool_call|><|tool_call>call:g{}<tool_call|>", [("f", {}), ("g", {})], ""),
        ("gemma4", "<|tool_call>f{a:1}<tool_call|>", [], None),
        ("gemma4", "<|tool_call>call:{a:1}<tool_call|>", [], None),
        ("functiongemma", "<start_function_call>call:f{a:<escape>x<y<escape>,b:2}<end_function_call>",
         [("f", {"a": "x<y", "b": 2})], ""),
        ("granite", '<|tool_call|> [{"name": "f", "arguments": {}}, {"arguments": {"a": 1}, "name": "g"}]',
         [("f", {}), ("g", {"a": 1})], ""),
        ("granite", '<|tool_call|>{"name": "f", "arguments": {}}', [], None),
        ("granite", "<|tool_call|>[1, 2]", [], None),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n</tool_call>', [("f", {})], "</tool_call>"),
        ("granite", "<|tool_call|>[]", [], None),
        ("granite_20b_fc", '<function_call> {"name": "f", "arguments": {}}\n<function_call> {"name": "g"}',
         [("f", {}), ("g", {})], ""),
        ("internlm", '<|action_start|><|plugin|>{"name": "f", "parameters": {}}<|action_end|>\nso', [("f", {})], "so"),
        ("internlm", "<|action_start|><|interpreter|>print(1)<|action_end|>", [], None),
        ("jamba", '<tool_calls>[\n{"name": "f", "arguments": {}},\n{"name": "g"}</tool_calls> so',
         [("f", {}), ("g", {})], "so"),
        ("phi4_mini_json", 'So: functools[{"name": "f", "arguments": {}}]', [("f", {})], "So:"),
        ("phi4_mini_json", "import functools\n\nfunctools.cache", [], None),
        ("hermes", "the tag \n <tool_call> begins", [], None),
        ("mistral", "the tag \n [TOOL_CALLS] begins", [], None),
        ("xlam", '[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})], ""),
        ("xlam", '[{"name": "Ada", "arguments": {}}]', [], None),
        ("xlam", 'Here: [{"name": "add", "arguments": {}}]', [], None),
        ("xlam", "[1, 2]", [], None),
        ("pythonic", "[add(a=1, b='x', c=[1, {'k': None}], d=-2.5, e=(1, 2))]",
         [("add", {"a": 1, "b": "x", "c": [1, {"k": None}], "d": -2.5, "e": [1, 2]})], ""),
        ("pythonic", "[add(a=true, b=null, c=[false], d=True,)]",
         [("add", {"a": True, "b": None, "c": [False], "d": True})], ""),
        ("pythonic", '[add(**{"a": "\\/", "b": true}), add(from=1, a=2, a=3)]',
         [("add", {"a": "/", "b": True}), ("add", {"from": 1, "a": 2})], ""),
        ("pythonic", '[add(a="one\ntwo), (", b=\'it\\\'s\')]', [("add", {"a": "one\ntwo), (", "b": "it's"})], ""),
        ("pythonic", '[add(a="\\ud83d\\ude00", b="é")]', [("add", {"a": "😀", "b": "é"})], ""),
        ("pythonic", " [add()] so", [("add", {})], "so"),
        ("pythonic", "[add(a=1), add(b=c)]", [("add", {"a": 1})], "add(b=c)]"),
        ("pythonic", "[add(a=1), mul(a=1)]", [("add", {"a": 1})], "mul(a=1)]"),
        ("pythonic", "[add(1)]", [], None),
        ("pythonic", "[add('a'=1)]", [], None),
        ("pythonic", "[add(a=open('x'))]", [], None),
        ("pythonic", "[add(a={1})]", [], None),
        ("pythonic", "[add(a=1e999)]", [], None),
        ("pythonic", "[add(a=1j)]", [], None),
        ("pythonic", f"[add(a={'(' * 5000}{')' * 5000})]", [], None),
        ("pythonic", f"[add(a={'9' * 5000})]", [], None),
        ("pythonic", "[add (a=1)]", [], None),
        ("pythonic", "[added(a=1)]", [], None),
        ("pythonic", '[add(**{"a": })]', [], None),
        ("pythonic", "[add(**[1])]", [], None),
        ("pythonic", "[1, 2] and add(a=1)", [], None),
        ("pythonic", "add(a=1)", [], None),
        ("llama4_pythonic", "<|python_start|>[add(a=1)]<|python_end|>", [("add", {"a": 1})], ""),
        ("llama4_pythonic", "So <|python_start|>[add(a=1)]<|python_end|> so", [("add", {"a": 1})], "Soso"),
        ("llama4_pythonic", "[add(a=1)]", [("add", {"a": 1})], ""),
        ("lfm2", "<|tool_call_start|>[add(a=1), add()]<|tool_call_end|>so", [("add", {"a": 1}), ("add", {})], "so"),
        ("lfm2", "[add(a=1)]", [], None),
        ("olmo3", "<function_calls>add(a=1)\nadd(b=2)</function_calls> so",
         [("add", {"a": 1}), ("add", {"b": 2})], "so"),
    ],
)  # fmt: skip
def test_what_is_a_call(name: str, text: str, expected: list[tuple[str, object]], said: str | None) -> None:
    """said: None for all of a text that is no call."""
    pieces = parse(tools(name), text)
    assert calls(pieces) == expected
    if said is not None or not expected:
        assert content(pieces) == (text if said is None else said)
    assert parse(tools(name), *text) == pieces


def test_a_call_of_kimi_has_the_id_that_the_model_wrote() -> None:
    text = "".join(f"{K}functions.{each}{A}{{}}<|tool_call_end|>" for each in ("f:3", "g:4", "f:3"))
    found = [piece for piece in parse(tools("kimi_k2"), text) if isinstance(piece, CallStart)]
    assert found == [CallStart(0, "f", "functions.f:3"), CallStart(1, "g", "functions.g:4"), CallStart(2, "f", None)]


@pytest.mark.parametrize(
    ("name", "begin", "first"),
    [
        ("kimi_k2", f'{K}functions.f:0{A}{{"text": "once up', '{"text": "once up'),
        ("deepseek_v3", f'{D}function<｜tool▁sep｜>f\n```json\n{{"text": "once up', '{"text": "once up'),
        ("gemma4", '<|tool_call>call:f{text:<|"|>once "up', '{"text": "once \\"up'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"text": "once up', '{"text": "once up'),
    ],
)
def test_arguments_come_while_they_are_written(name: str, begin: str, first: str) -> None:
    pieces = tools(name).push(begin)
    assert [piece.name for piece in pieces if isinstance(piece, CallStart)] == ["f"]
    assert "".join(piece.text for piece in pieces if isinstance(piece, CallArguments)) == first


@pytest.mark.parametrize(
    "call", ['{"name": "\\ud800", "arguments": {}}', '{"name": "add", "arguments": "\\"\\ud800\\""}']
)
def test_half_a_character_is_no_part_of_a_call(call: str) -> None:
    """An answer could not be written with it."""
    text = f"<tool_call>{call}</tool_call>"
    assert parse(tools("hermes"), text) == [Content(text)]


def of_gemma(text: str) -> tuple[str, bool]:
    """The JSON of arguments, and whether they are complete."""
    arguments = GemmaArguments('<|"|>')
    found = ""
    for character in text:
        if arguments.closed or arguments.failed:
            break
        found += arguments.push(character)
    return found, arguments.closed


@given(text=st.lists(st.sampled_from(["{", "}", "[", "]", ",", ":", '<|"|>', '"', "a", "1", " ", "true", "<", "-"])))
def test_arguments_of_gemma_that_are_complete_are_json(text: list[str]) -> None:
    found, closed = of_gemma("{" + "".join(text))
    if closed:
        assert isinstance(json.loads(found), dict)


@given(arguments=ARGUMENTS)
def test_json_is_read_where_gemma_has_a_form_of_its_own(arguments: dict[str, object]) -> None:
    """A grammar asks for it."""
    found, closed = of_gemma(json.dumps(arguments))
    assert closed
    assert json.loads(found) == arguments


@pytest.mark.parametrize("name", ["pythonic", "lfm2"])
@given(arguments=st.lists(ARGUMENTS, min_size=1, max_size=3), places=cuts)
def test_json_is_read_within_calls_in_python(name: str, arguments: list[dict[str, object]], places: list[int]) -> None:
    """A grammar asks for it."""
    _, between, around = BY_FORMAT[name]
    text = around.replace("{}", between.join(f"add(**{json.dumps(each)})" for each in arguments))
    pieces: list[Piece] = parse(tools(name), *chunked(text, places))
    assert calls(pieces) == [("add", each) for each in arguments]
    assert content(pieces) == ""
