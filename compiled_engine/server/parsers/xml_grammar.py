"""The grammar of calls written as XML tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_engine.server.parsers.argument_schemas import ArgumentSchemas
from compiled_engine.server.parsers.call_grammars import CallableTool, CallRules, Literal, free_text, quoted, without
from compiled_engine.server.parsers.xml_markup import XmlMarkup

# Schema keywords that do not constrain values.
NOTES = ("description", "title", "default", "examples")
REFERENCE = re.compile(r'"\$ref"')
# A reference outside the definitions: its schema cannot be used apart from its document.
ELSEWHERE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
# Larger length bounds are ignored: a grammar's size grows with the count.
MOST_COUNTED = 10_000
# First characters of JSON values by type, and the literals of the other types.
BEGINNINGS = {"object": "{", "array": r"\[", "integer": "-0-9", "number": "-0-9"}
WORDS = {"null": ("null",), "boolean": ("true", "false")}
# Parts of a regular expression that must be escaped between slashes.
PART = re.compile(r"\\.|[/\n]", re.DOTALL)
ESCAPES = {"/": r"\/", "\n": r"\n"}
# Argument names of a tool whose schema lists none.
ANY_NAME = r"""NAME: /[^\s<>"']{1,64}/"""


def xml_calls(
    markup: XmlMarkup, tools: Sequence[CallableTool], literal: Literal, template: str, several: bool
) -> CallRules:
    """Return the rules of calls written as XML tags. Implements CallGrammar for the tags `markup`.

    Arguments are in the order of the schema. The text of an argument cannot contain a text that would make the parser
    end the argument early. `template` is not used.
    """
    grammar = _XmlGrammar(markup, literal)
    start = literal(markup.starts[0])
    rules = [grammar.call(index, tool) for index, tool in enumerate(tools)]
    choice = " | ".join(f"call_{index}" for index in range(len(tools)))
    more = " (LINE? call)*" if several and markup.opening else ""
    rest = f"LINE? call{more} LINE? {literal(markup.closing)}" if markup.opening else "call"
    return CallRules(
        calls=f"calls: {start} rest{f' (LINE? {start} rest)*' if several else ''}",
        free=free_text(markup.starts, literal),
        shared="\n".join([f"rest: {rest}", f"call: {choice}", *rules, 'LINE: "\\n"', ANY_NAME, *grammar.values]),
    )


class _XmlGrammar:
    """Builds the Lark rules of calls. `values` has the rules of argument values; equal schemas share one rule."""

    def __init__(self, markup: XmlMarkup, literal: Literal) -> None:
        self._markup = markup
        self._literal = literal
        self._rules: dict[str, tuple[str, str]] = {}

    @property
    def values(self) -> list[str]:
        return [rule for _, rule in self._rules.values()]

    def call(self, index: int, tool: CallableTool) -> str:
        """Return the Lark rule `call_INDEX`, which matches calls of a tool.

        The rule describes the text after the first opening tag, `markup.starts[0]`, up to and including the call's end
        tag.
        """
        markup, arguments = self._markup, ArgumentSchemas(json.loads(tool.schema))
        head = f"{markup.quote}{tool.name}{markup.quote}{markup.name_end}"
        parts = [quoted((markup.call if markup.opening else "") + head), "LINE?"]
        names = [*arguments.properties, *sorted(arguments.required - arguments.properties.keys())]
        for name in names:
            before = self._plain(markup.key, markup.quote, name, markup.quote, markup.key_end)
            count = "" if name in arguments.required else "?"
            parts.append(self._argument(before, self._value(name, arguments), count))
        if not names and not arguments.closed:
            before = f"{self._plain(markup.key, markup.quote)} NAME {self._plain(markup.quote, markup.key_end)}"
            parts.append(self._argument(before, self._terminal(_text({})), "*"))
        return f"call_{index}: {' '.join([*parts, self._literal(markup.call_end)])}"

    def _argument(self, before: str, value: str, count: str) -> str:
        opening = self._plain(self._markup.value, self._markup.gap)
        if self._markup.value:
            return f"({before} LINE? {opening} {value} LINE?){count}"
        return f"({before} {opening} {value} LINE?){count}"

    def _plain(self, *parts: str) -> str:
        """Return tags and texts as Lark literals.

        Each special token becomes one literal, and so does each text between special tokens.
        """
        found = [""]
        for part in parts:
            written = self._literal(part)
            if written == quoted(part):
                found[-1] += part
            else:
                found += [written, ""]
        return " ".join(part if place % 2 else quoted(part) for place, part in enumerate(found) if part)

    def _value(self, name: str, arguments: ArgumentSchemas) -> str:
        """Return, in Lark, what matches a value of the argument `name` and the closing tag.

        Alternatives that are text share one terminal; JSON values have a rule of their own. A terminal matches as much
        as it can, so a string must not begin like a JSON value that the argument may have.
        """
        texts: list[str] = []
        values: list[Any] = []
        branches = arguments.branches(name)
        beginnings = "".join(sorted({BEGINNINGS.get(each.get("type", ""), "") for each in branches}))
        apart = rf" & ~/\s*[{beginnings}](?s:.*)/" if beginnings else ""
        for schema in branches:
            kind = schema.get("type")
            if "const" in schema or isinstance(schema.get("enum"), list):
                texts += [quoted(each) for each in _written(schema)]
            elif kind == "string":
                texts.append(f"({_text(schema)}{apart})")
            elif kind in WORDS:
                texts += [quoted(each) for each in WORDS[kind]]
            elif kind is None:
                texts.append(_text({}))
            else:
                values.append({key: given for key, given in schema.items() if key not in NOTES})
        ways = [self._terminal(" | ".join(texts))] if texts or not values else []
        if values:
            ways.append(self._json(_schema(values, arguments)))
        return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"

    def _terminal(self, text: str) -> str:
        """Return the name of the rule for an argument's text and closing tag.

        `text` is the Lark expression for the argument's text. The rule excludes texts that contain one of
        `markup.value_ends`, at which the parser would end the argument early.
        """
        markup, closing = self._markup, self._literal(self._markup.value_end)
        name = f"text_{len(self._rules)}"
        body = f"({text or _text({})}){without(markup.value_ends)}"
        if closing == quoted(markup.value_end):  # plain text, so the argument must end where it begins
            rule = f"{name}[suffix={quoted(markup.gap + markup.value_end)}]: {body}"
        else:
            rule = f"{name}: {name.upper()} {closing}\n{name.upper()}: {body}"
        return self._rules.setdefault(text, (name, rule))[0]

    def _json(self, schema: str) -> str:
        """Return the name of the rule that matches JSON for the schema, and then the closing tag."""
        name = f"value_{len(self._rules)}"
        end = self._plain(self._markup.gap, self._markup.value_end)
        return self._rules.setdefault(schema, (name, f"{name}: {name}_json {end}\n{name}_json: %json {schema}"))[0]


def _schema(values: list[Any], arguments: ArgumentSchemas) -> str:
    """Return one JSON schema, as text, for values that follow any of the schemas `values`.

    The result includes the definitions that the schemas refer to. If a schema refers to any other part of its document,
    the result keeps only the types of `values`.
    """
    schema: dict[str, Any] = values[0] if len(values) == 1 else {"anyOf": values}
    below = ["x-guidance"]
    if REFERENCE.search(json.dumps(schema)):
        below += ["$defs", "definitions"]
        if ELSEWHERE.search(json.dumps([schema, *(arguments.root.get(key) for key in below)])):
            schema = {"type": sorted({value["type"] for value in values})}
    return json.dumps(schema | {key: arguments.root[key] for key in below if key in arguments.root}, ensure_ascii=False)


def _written(schema: Mapping[str, Any]) -> list[str]:
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]


def _text(schema: Mapping[str, Any]) -> str:
    least, most = _count(schema, "minLength") or 0, _count(schema, "maxLength")
    counted = f"/(?s:.{{{least},{'' if most is None else most}}})/"
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return counted
    begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = PART.sub(lambda part: ESCAPES.get(part[0], part[0]), pattern[begin : len(pattern) - end])
    anything = "(?s:.*)"
    return f"{counted} & /{'' if begin else anything}({inner}){'' if end else anything}/"


def _count(schema: Mapping[str, Any], key: str) -> int | None:
    count = schema.get(key)
    return count if isinstance(count, int) and 0 <= count <= MOST_COUNTED else None
