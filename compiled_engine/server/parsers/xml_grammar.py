"""Calls as tags, as a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_engine.server.parsers.argument_schemas import ArgumentSchemas
from compiled_engine.server.parsers.call_grammars import CallableTool, CallRules, Literal, free_text, quoted, without
from compiled_engine.server.parsers.xml_markup import XmlMarkup

# A schema below which only definitions are referred to can be used without what is around it.
ELSEWHERE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
# Longer texts are not counted: a grammar's size grows with the count.
MOST_COUNTED = 10_000
# What a text of JSON begins with, and is.
BEGINNINGS = {"object": "{", "array": r"\[", "integer": "-0-9", "number": "-0-9"}
WORDS = {"null": ("null",), "boolean": ("true", "false")}
# Parts of an expression that are written in another way between slashes.
PART = re.compile(r"\\.|[/\n]", re.DOTALL)
ESCAPES = {"/": r"\/", "\n": r"\n"}
# Where a tool names no arguments.
ANY_NAME = r"""NAME: /[^\s<>"']{1,64}/"""


def xml_calls(
    markup: XmlMarkup, tools: Sequence[CallableTool], literal: Literal, template: str, several: bool
) -> CallRules:
    """Arguments come in the order of the schema. A text is what the parser reads as one: without what would end it."""
    grammar = _XmlGrammar(markup, literal)
    start = literal(markup.starts[0])
    rules = [grammar.call(index, tool) for index, tool in enumerate(tools)]
    choice = " | ".join(f"call_{index}" for index in range(len(tools)))
    more = " (LINE? call)*" if several and markup.opening else ""
    rest = f"LINE? call{more} LINE? {literal(markup.closing)}" if markup.opening else "call"
    return CallRules(
        calls=f"calls: {start} rest{f' (LINE? {start} rest)*' if several else ''}",
        free=free_text(markup.starts, literal),
        shared="\n".join([f"rest: {rest}", f"call: {choice}", *rules, 'LINE: "\\n"', ANY_NAME, *grammar.texts]),
    )


class _XmlGrammar:
    """texts: the rules of texts, which arguments share."""

    def __init__(self, markup: XmlMarkup, literal: Literal) -> None:
        self._markup = markup
        self._literal = literal
        self._rules: dict[str, tuple[str, str]] = {}

    @property
    def texts(self) -> list[str]:
        return [rule for _, rule in self._rules.values()]

    def call(self, index: int, tool: CallableTool) -> str:
        """The rules of a tool's calls: from its name on to the tag that ends them."""
        markup, schema = self._markup, json.loads(tool.schema)
        arguments = ArgumentSchemas(schema)
        rules, parts = [], []
        names = [*arguments.properties, *sorted(arguments.required - arguments.properties.keys())]
        for place, name in enumerate(names):
            rule = f"argument_{index}_{place}"
            value, more = self._value(f"value_{index}_{place}", name, arguments)
            rules += [f"{rule}: {self._before(quoted(name))} {value}", *more]
            parts.append(f"({rule} LINE?)" + ("" if name in arguments.required else "?"))
        if not names and not arguments.closed:
            rule = f"argument_{index}"
            rules.append(f"{rule}: {self._before('NAME')} {self._terminal(_text({}))}")
            parts.append(f"({rule} LINE?)*")
        head = f"{markup.quote}{tool.name}{markup.quote}{markup.name_end}"
        begin = quoted((markup.call if markup.opening else "") + head)
        return "\n".join([f"call_{index}: {begin} LINE? {' '.join(parts)} {self._literal(markup.call_end)}", *rules])

    def _before(self, name: str) -> str:
        """What precedes the text of an argument with a name."""
        markup, quote = self._markup, quoted(self._markup.quote) if self._markup.quote else ""
        value = f"LINE? {self._literal(markup.value)}" if markup.value else ""
        gap = quoted(markup.gap) if markup.gap else ""
        parts = (self._literal(markup.key), quote, name, quote, self._literal(markup.key_end), value, gap)
        return " ".join(part for part in parts if part)

    def _value(self, rule: str, name: str, arguments: ArgumentSchemas) -> tuple[str, list[str]]:
        """The text of an argument with its closing tag, and the rules that this needs.

        Texts are one terminal, and JSON is apart from it: a terminal goes on as long as it can, so that no text may
        begin as JSON does.
        """
        texts: list[str] = []
        values: list[Any] = []
        branches = arguments.branches(name)
        beginnings = "".join(sorted({BEGINNINGS.get(each.get("type", ""), "") for each in branches}))
        apart = rf" & ~/\s*[{beginnings}](?s:.*)/" if beginnings else ""
        for schema in branches:
            kind = schema.get("type")
            if "const" in schema or "enum" in schema:
                texts += [quoted(each) for each in _written(schema)]
            elif kind == "string":
                texts.append(f"({_text(schema)}{apart})")
            elif kind in ("null", "boolean"):
                texts += [quoted(each) for each in WORDS[kind]]
            elif kind is None:
                texts.append(f"({_text({})})")
            else:
                values.append(schema)
        ways = [self._terminal(" | ".join(texts))] if texts else []
        if not values:
            return "".join(ways) or self._terminal(_text({})), []
        gap = quoted(self._markup.gap) if self._markup.gap else ""
        ways.append(f"{rule} {gap} {self._literal(self._markup.value_end)}")
        return f"({' | '.join(ways)})", [f"{rule}: %json {_schema(values, arguments)}"]

    def _terminal(self, text: str) -> str:
        """The name of the rule for a text with the closing tag, which is nothing that would end it earlier."""
        markup, closing = self._markup, self._literal(self._markup.value_end)
        if text not in self._rules:
            name = f"text_{len(self._rules)}"
            body = f"({text}){without(markup.value_ends)}"
            if closing == quoted(markup.value_end):  # text, so the argument has to end where it begins
                rule = f"{name}[suffix={quoted(markup.gap + markup.value_end)}]: {body}"
            else:
                rule = f"{name}: {name.upper()} {closing}\n{name.upper()}: {body}"
            self._rules[text] = name, rule
        return self._rules[text][0]


def _schema(values: list[Any], arguments: ArgumentSchemas) -> str:
    """Schemas of an argument, with all that they refer to."""
    schema: dict[str, Any] = {"anyOf": values}
    if ELSEWHERE.search(json.dumps(schema)):
        schema = {"type": sorted({value["type"] for value in values})}
    below = {key: arguments.root[key] for key in ("$defs", "definitions", "x-guidance") if key in arguments.root}
    return json.dumps(schema | below, ensure_ascii=False)


def _written(schema: Mapping[str, Any]) -> list[str]:
    """The texts of the values that a schema lists."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]


def _text(schema: Mapping[str, Any]) -> str:
    """The terminal of a string."""
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
