"""Calls as tags, as a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from compiled_engine.server.parsers.argument_schemas import ArgumentSchemas
from compiled_engine.server.parsers.call_grammars import CallableTool, CallRules, Literal, free_text, quoted, without
from compiled_engine.server.parsers.xml_markup import XmlMarkup

# A schema below which only definitions are referred to can be used without what is around it.
ELSEWHERE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
# Longer texts are not counted: a grammar's size grows with the count.
MOST_COUNTED = 10_000
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
        self._rules: dict[tuple[int, int | None], tuple[str, str]] = {}

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
            rules.append(f"{rule}: {self._before('NAME')} {self._text(0, None)}")
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
        """The text of an argument with its closing tag, and the rules that this needs."""
        end = f"{quoted(self._markup.gap) if self._markup.gap else ''} {self._literal(self._markup.value_end)}"
        choices, types = arguments.choices(name), arguments.types(name)
        if choices:
            texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in choices]
            return f"{rule.upper()} {end}", [f"{rule.upper()}: {' | '.join(map(quoted, texts))}"]
        if "string" in types:
            schema, *others = arguments.of(name)
            counted = schema if isinstance(schema, dict) and not others and types == {"string"} else {}
            return self._text(_count(counted, "minLength") or 0, _count(counted, "maxLength")), []
        return f"{rule} {end}", [f"{rule}: %json {self._schema(name, arguments)}"]

    def _schema(self, name: str, arguments: ArgumentSchemas) -> str:
        """The schema of one argument, with all that it refers to."""
        given, root = arguments.of(name), arguments.root
        schema: dict[str, Any] = {"anyOf": given}
        if ELSEWHERE.search(json.dumps(schema)):
            schema = {"type": sorted(arguments.types(name))}
        below = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
        return json.dumps(schema | below, ensure_ascii=False)

    def _text(self, least: int, most: int | None) -> str:
        """The name of the rule for a text of so many characters, with the closing tag."""
        markup, name = self._markup, f"text_{len(self._rules)}"
        if (least, most) in self._rules:
            return self._rules[least, most][0]
        closing, marks = self._literal(markup.value_end), without(markup.value_ends)
        up_to = "" if most is None else most
        if closing == quoted(markup.value_end):  # text, so the argument has to end where it begins
            rule = f"{name}[suffix={quoted(markup.gap + markup.value_end)}]: /(?s:.{{{least},{up_to}}})/{marks}"
        else:
            some = f"{name.upper()}{'' if least else '?'}" if most != 0 else ""
            rule = f"{name}: {some} {closing}\n{name.upper()}: /(?s:.{{{max(least, 1)},{up_to or ''}}})/{marks}"
        self._rules[least, most] = name, rule
        return name


def _count(schema: dict[str, Any], key: str) -> int | None:
    count = schema.get(key)
    return count if isinstance(count, int) and 0 <= count <= MOST_COUNTED else None
