"""Calls as tags: what is read for the types of a schema, and that it does not depend on how the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from test_answer_parsers import calls, chunked, content, cuts, parse

from compiled_engine.server.parsers.answer import joined
from compiled_engine.server.parsers.argument_schemas import ANY_TYPE, ArgumentSchemas, json_of
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, TextParser
from compiled_engine.server.parsers.registry import TOOL_FORMATS

FORMATS = ("qwen3_coder", "seed_oss", "glm45", "minimax_m2")
# What the families' templates make of `calls`, a list of names with arguments.
_TYPED = "{{ value if value is string else value | tojson }}"
_FUNCTION = (
    "<function={{ name }}>\n{% for key, value in given.items() %}<parameter={{ key }}>GAP"
    + _TYPED
    + "GAP</parameter>\n{% endfor %}</function>"
)
TEMPLATES = {
    "qwen3_coder": "{% for name, given in calls %}<tool_call>\n" + _FUNCTION.replace("GAP", "\n")
    + "\n</tool_call>{{ '\n' if not loop.last }}{% endfor %}",
    "seed_oss": "{% for name, given in calls %}<seed:tool_call>\n" + _FUNCTION.replace("GAP", "")
    + "\n</seed:tool_call>{% endfor %}",
    "glm45": "{% for name, given in calls %}\n<tool_call>{{ name }}\n{% for key, value in given.items() %}"
    "<arg_key>{{ key }}</arg_key>\n<arg_value>" + _TYPED + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "glm47": "{% for name, given in calls %}<tool_call>{{ name }}{% for key, value in given.items() %}"
    "<arg_key>{{ key }}</arg_key><arg_value>" + _TYPED + "</arg_value>{% endfor %}</tool_call>{% endfor %}",
    "minimax_m2": "<minimax:tool_call>\n{% for name, given in calls %}<invoke name=\"{{ name }}\">\n"
    "{% for key, value in given.items() %}<parameter name=\"{{ key }}\">" + _TYPED
    + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>",
}  # fmt: skip
ENVIRONMENT = Environment(keep_trailing_newline=True)
ENVIRONMENT.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"},
        "size": {"type": ["number", "null"]},
        "flag": {"type": "boolean"},
        "nothing": {"type": "null"},
        "table": {"type": "object"},
        "list": {"$ref": "#/$defs/list"},
        "either": {"oneOf": [{"$ref": "#/$defs/list"}, {"type": "integer"}, {"enum": ["a", "b", 1.5]}]},
        "kind": {"$ref": "#/$defs/kind"},
        "both": {"allOf": [{"$ref": "#/$defs/kind"}], "description": "x"},
        "open": {"description": "x"},
    },
    "$defs": {"list": {"type": "array"}, "kind": {"enum": ["1", "true", "null"]}},
}
SCHEMAS: dict[str, dict[str, Any]] = {"add": SCHEMA, "look-up": {}}


def parser(name: str) -> TextParser:
    return TOOL_FORMATS[{"glm47": "glm45"}.get(name, name)].parser(SCHEMAS)


def written(name: str, made: list[tuple[str, dict[str, Any]]]) -> str:
    return ENVIRONMENT.from_string(TEMPLATES[name]).render(calls=made)


def one(name: str, key: str, text: str) -> str:
    """A call of `add` with an argument, whose text is written as it is."""
    return written(name, [("add", {key: text})])


# Texts without the line break that some formats have around them, and without tags.
strings = st.text(max_size=12).filter(lambda text: "<" not in text and not text.startswith("\n"))
containers: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)
lists, tables = st.lists(containers, max_size=3), st.dictionaries(strings, containers, max_size=3)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": strings,
        "maybe": strings.filter(lambda text: text not in ("null", "None")) | st.none(),
        "count": st.integers(),
        "size": st.floats(allow_nan=False, allow_infinity=False) | st.none(),
        "flag": st.booleans(),
        "nothing": st.none(),
        "table": tables,
        "list": lists,
        "either": lists | st.integers() | st.sampled_from(["a", "b", 1.5]),
        "kind": st.sampled_from(["1", "true", "null"]),
        "both": st.sampled_from(["1", "true", "null"]),
        "open": lists | tables | st.sampled_from(["a", "x: 1", " {", "[1", '"q"']),
    },
)
MADE = st.lists(st.tuples(st.just("add"), ARGUMENTS) | st.just(("look-up", {})), min_size=1, max_size=3)


@pytest.mark.parametrize("name", TEMPLATES)
@given(made=MADE, places=cuts)
def test_calls_have_the_arguments_that_the_template_writes(
    name: str, made: list[tuple[str, dict[str, Any]]], places: list[int]
) -> None:
    text = written(name, made)
    pieces = parse(parser(name), *chunked(text, places))
    assert calls(pieces) == made
    assert content(pieces) == ""
    assert parse(parser(name), *text) == pieces


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=add>", "<function=", "</function>", "<parameter=text>", "</parameter>"),
    *("<parameter=count>", "<parameter=maybe>", "<arg_key>text</arg_key>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="add">', "<invoke name="),
    *("</invoke>", '<parameter name="text">', "<seed:tool_call>", "</seed:tool_call>", "add", "text", "nu", "ll"),
    *(" ", "\n", "\n", "<", ">", "/", '"', "'", "7", "é", "{", "x"),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join), places=cuts)
def test_no_text_depends_on_the_chunks_or_is_lost_without_a_call(name: str, text: str, places: list[int]) -> None:
    whole = parse(parser(name), text)
    assert parse(parser(name), *chunked(text, places)) == whole
    assert parse(parser(name), *text) == whole
    starts = [piece.index for piece in whole if isinstance(piece, CallStart)]
    assert starts == list(range(len(starts)))
    if not starts:
        assert content(whole) == text


# The type of each argument is that of its name, see SCHEMA.
VALUES: list[tuple[str, str, Any]] = [
    ("text", "a", "a"),
    ("text", "null", "null"),
    ("text", "7", "7"),
    ("text", '{"a": 1}', '{"a": 1}'),
    ("text", '"quoted" \\n', '"quoted" \\n'),
    ("text", "  two\n\n lines  \t", "  two\n\n lines  \t"),
    ("text", "<b>&amp;</b> a < b", "<b>&amp;</b> a < b"),
    ("text", "", ""),
    ("maybe", "null", None),
    ("maybe", "None", None),
    ("maybe", "nullable", "nullable"),
    ("maybe", "nul", "nul"),
    ("maybe", "", ""),
    ("maybe", "7", "7"),
    ("count", "7", 7),
    ("count", " -7 ", -7),
    ("count", "7.0", 7.0),
    ("count", "7.5", "7.5"),
    ("count", "seven", "seven"),
    ("count", "007", "007"),
    ("count", "true", "true"),
    ("count", "null", None),
    ("count", "1" * 5000, "1" * 5000),
    ("size", "1e3", 1000.0),
    ("size", "NaN", "NaN"),
    ("size", "1e999", "1e999"),
    ("size", "3", 3),
    ("flag", "true", True),
    ("flag", "False", False),
    ("flag", "yes", "yes"),
    ("flag", "1", "1"),
    ("nothing", "null", None),
    ("nothing", "x", "x"),
    ("table", '{"a": [1, "}"]}', {"a": [1, "}"]}),
    ("table", "[1]", "[1]"),
    ("table", '{"a": NaN}', '{"a": NaN}'),
    ("table", "{'a': 1}", "{'a': 1}"),
    ("table", "[" * 5000, "[" * 5000),
    ("list", '\n [1,\n "a"] ', [1, "a"]),
    ("list", '{"a": 1}', '{"a": 1}'),
    ("either", "3", 3),
    ("either", "1.5", 1.5),
    ("either", "b", "b"),
    ("either", "[3]", [3]),
    ("kind", "1", "1"),
    ("both", "true", "true"),
]


@pytest.mark.product(one_in=1000, each=("key", "text"))
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(("key", "text", "expected"), VALUES)
def test_the_schema_gives_an_argument_its_type(name: str, key: str, text: str, expected: Any) -> None:
    call = one(name, key, text)
    for pieces in (parse(parser(name), call), parse(parser(name), *call)):
        assert calls(pieces) == [("add", {key: expected})]


@pytest.mark.parametrize(
    ("text", "typed", "read"),
    [("7", "7", 7), ("true", "true", True), ("null", "null", None), ("[7]", [7], [7]), ('{"a": 1}', {"a": 1}, {"a": 1}),
     ("so", "so", "so"), ('"so"', '"so"', '"so"'), ("[", "[", "[")],
)  # fmt: skip
@pytest.mark.parametrize("key", ["open", "unknown"])
def test_an_argument_without_a_type(key: str, text: str, typed: Any, read: Any) -> None:
    """Only GLM's template writes JSON for all that is no string, so that other formats have a string in doubt."""
    for name in TEMPLATES:
        expected = read if name.startswith("glm") else typed
        assert calls(parse(parser(name), one(name, key, text))) == [("add", {key: expected})]


QWEN, GLM, MINIMAX = "qwen3_coder", "glm45", "minimax_m2"


@pytest.mark.parametrize(
    ("name", "text", "arguments", "said"),
    [
        # Tags that are left out, and whitespace.
        (QWEN, "<function=add>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>", {"count": 1}, ""),
        (QWEN, "Yes.\n<function=add>\n</function>", {}, "Yes."),
        (QWEN, "<tool_call>\n<function=add>\n<parameter=count>\n1\n</parameter>\n</tool_call>\nso", {"count": 1}, "so"),
        (QWEN, "<tool_call>\n<function=add>\n<parameter=count>\n1\n</parameter>\n</function>", {"count": 1}, ""),
        (QWEN, "<tool_call><function=add></tool_call> so", {}, "so"),
        (QWEN, '<tool_call> <function="add"> <parameter=count>1</parameter></function></tool_call>', {"count": 1}, ""),
        (QWEN, "<tool_call>\n<function=add>\n<parameter=text>\na\n<parameter=count>\n1\n</parameter>\n</function>\n"
         "</tool_call>", {"text": "a", "count": 1}, ""),
        (QWEN, "<tool_call>\n<function=add>\n<parameter=text>\na\n</function>\n</tool_call>so", {"text": "a"}, "so"),
        (QWEN, "<tool_call>\n<function=add>\n</function>\n</tool_ca", {}, "</tool_ca"),
        (QWEN, "<tool_call>\n<function=add>\n</function>\nso", {}, "so"),
        (QWEN, "<tool_call>\n<function=add>\n<parameter=count>\n1\n</parameter>\nso</function>\n</tool_call>",
         {"count": 1}, "so</function>\n</tool_call>"),
        (QWEN, "<tool_call>\n<function=add>\n<parameter=>x</parameter>\n</function>", {},
         "<parameter=>x</parameter>\n</function>"),
        (GLM, "<tool_call>add <arg_key>text</arg_key> <arg_value>a b</arg_value> </tool_call>", {"text": "a b"}, ""),
        (GLM, "<tool_call>\nadd</tool_call>\n\nso", {}, "so"),
        (GLM, "<tool_call>add\n<arg_key>text</arg_key>\n<arg_value>\na\n</arg_value></tool_call>",
         {"text": "\na\n"}, ""),
        (GLM, "<tool_call>add\n<arg_key>count</arg_key>\n<arg_value>1</arg_value>\nso</tool_call>", {"count": 1},
         "so</tool_call>"),
        (MINIMAX, "<invoke name='add'><parameter name=text>a</parameter></invoke></minimax:tool_call>", {"text": "a"},
         ""),
        # Line breaks around a text.
        (QWEN, "<tool_call>\n<function=add>\n<parameter=text>\n\n\n</parameter>\n</function>", {"text": "\n"}, ""),
        (QWEN, "<tool_call>\n<function=add>\n<parameter=text>\n</parameter>\n</function>", {"text": ""}, ""),
        (QWEN, "<tool_call>\n<function=add>\n<parameter=text>\n\na\n\n</parameter></function>", {"text": "\na\n"}, ""),
        (QWEN, "<tool_call>\n<function=add>\n<parameter=text>a\n</parameter>\n</function>", {"text": "a\n"}, ""),
        (MINIMAX, '<minimax:tool_call><invoke name="add"><parameter name="text">\na\n</parameter></invoke>',
         {"text": "a"}, ""),
        # Of equal names the first counts.
        (QWEN, "<tool_call>\n<function=add>\n<parameter=text>\na\n</parameter>\n<parameter=text>\nbcd\n</parameter>\n"
         "<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>", {"text": "a", "count": 1}, ""),
    ],
)  # fmt: skip
def test_what_is_written_in_another_way(name: str, text: str, arguments: dict[str, Any], said: str) -> None:
    for pieces in (parse(parser(name), text), parse(parser(name), *text)):
        assert calls(pieces) == [("add", arguments)]
        assert content(pieces) == said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (QWEN, "The tag is <function=name> \n or <function=add> in a text"),
        (QWEN, "a <tool_call>"),
        (QWEN, "a\n <tool_call> <function=add>\n"),
        (QWEN, "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        (QWEN, "<tool_call>\n<function=a b>\n</function>\n</tool_call>"),
        (QWEN, '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'),
        (QWEN, f"<tool_call>\n<function={'a' * 600}>\n</function>\n</tool_call>"),
        (QWEN, "<function=other>\n</function>"),
        (GLM, "<tool_call>call me</tool_call>"),
        (GLM, '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
        (MINIMAX, "<minimax:tool_call>\nno\n</minimax:tool_call>"),
        (MINIMAX, '<invoke name="other"></invoke>'),
    ],
)
def test_what_is_no_call_is_content_with_its_markup(name: str, text: str) -> None:
    for pieces in (parse(parser(name), text), parse(parser(name), *text)):
        assert content(pieces) == text
        assert not calls(pieces)


@pytest.mark.parametrize("length", [509, 512, 513, 520])
def test_the_longest_name_of_an_argument(length: int) -> None:
    text = f"<tool_call>add<arg_key>{'k' * length}</arg_key><arg_value>v</arg_value></tool_call>"
    whole = parse(parser(GLM), text)
    assert calls(whole) == [("add", {"k" * length: "v"} if length <= 512 else {})]
    assert parse(parser(GLM), *text) == whole


def test_a_name_of_no_tool_is_a_call_within_the_tags() -> None:
    """As in other formats: the client answers that there is none."""
    text = "<tool_call>\n<function=other>\n<parameter=a>\n[1]\n</parameter>\n</function>\n</tool_call>"
    assert calls(parse(parser(QWEN), text)) == [("other", {"a": [1]})]


def test_an_answer_that_ends_within_a_call_has_the_beginning_of_its_arguments() -> None:
    text = "<tool_call>\n<function=add>\n<parameter=count>\n12\n</parameter>\n<parameter=text>\nonce up\n</para"
    assert parse(parser(QWEN), text) == [CallStart(0, "add"), CallArguments(0, '{"count": 12, "text": "once up')]
    cut = text[: text.index("2\n")]
    assert parse(parser(QWEN), cut) == [CallStart(0, "add"), CallArguments(0, "{")]


@pytest.mark.parametrize("key", ["text", "maybe"])
def test_a_string_comes_while_it_is_written(key: str) -> None:
    reader = parser(QWEN)
    first = parse_on(reader, f'<tool_call>\n<function=add>\n<parameter={key}>\nsay "hi" to')
    assert first == [CallStart(0, "add"), CallArguments(0, f'{{"{key}": "say \\"hi\\" to')]
    assert parse_on(reader, " me\n") == [CallArguments(0, " me")]
    assert parse_on(reader, "ü\n</par") == [CallArguments(0, "\\nü")]


def parse_on(reader: TextParser, text: str) -> list[Any]:
    return joined(reader.push(text))


def test_a_long_argument_is_not_held() -> None:
    """Only what may be a tag is."""
    reader = parser(QWEN)
    reader.push("<tool_call>\n<function=add>\n<parameter=text>\n")
    text = "x < y\n" * 2000
    given = "".join(piece.text for character in text for piece in reader.push(character))  # type: ignore[union-attr]
    assert json.loads(f'{{{given}"}}') == {"text": text.removesuffix("\n")}


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(3000):
    DEEP = {"anyOf": [DEEP]}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"properties": {"x": {"$ref": "#/properties/x"}}},
        {"properties": {"x": {"$ref": "#"}}, "anyOf": [{"$ref": "#"}]},
        {"properties": {"x": DEEP}},
        {"properties": {"x": {"$ref": "#/$defs/a0"}},
         "$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 50} for i in range(50)}},
        {"properties": {"x": {"$ref": "http://example.com/x"}}},
        {"properties": {"x": {"$ref": "#/$defs/none"}}},
        {"properties": {"x": True}, "additionalProperties": False},
        {"properties": ["x"], "anyOf": 1, "required": 1},
        {"properties": {"x": {"type": 1, "enum": 1, "anyOf": []}}},
    ],
)  # fmt: skip
def test_a_schema_that_says_nothing_allows_any_type(schema: dict[str, Any]) -> None:
    arguments = ArgumentSchemas(schema)
    assert arguments.types("x") == ANY_TYPE
    assert len(arguments.branches("x")) <= 1


def test_properties_of_branches() -> None:
    schema = {
        "$ref": "#/$defs/base",
        "$defs": {"base": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        "allOf": [{"properties": {"b": {"type": "boolean"}}, "required": ["b"]}],
        "oneOf": [{"properties": {"c": {"const": 1}}, "required": ["c"]}, {"properties": {"c": {"const": "x"}}}],
        "additionalProperties": {"type": "number"},
    }
    arguments = ArgumentSchemas(schema)
    assert {name: arguments.types(name) for name in "abcd"} == {
        "a": {"integer"},
        "b": {"boolean"},
        "c": {"integer", "string"},
        "d": {"integer", "number"},
    }
    assert arguments.required == {"a", "b"}
    assert arguments.branches("c") == [{"const": 1}, {"const": "x"}]


@given(text=st.text(max_size=20), types=st.frozensets(st.sampled_from(sorted(ANY_TYPE))))
def test_every_text_is_json(text: str, types: frozenset[str]) -> None:
    json.loads(json_of(text, types))
