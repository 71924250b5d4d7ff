"""Calls as grammars: what a model may write where it must call a tool, or where its calls must follow their schemas.

Each function gives rules of Lark: `calls`, one or several, and `free`, an answer in which calls may occur.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiled_engine.server.parsers import hermes, llama3_json, mistral

Literal = Callable[[str], str]
"""How Lark writes a text that may be a special token of the model."""


@dataclass(frozen=True)
class CallableTool:
    """schema: of its arguments, JSON as text."""

    name: str
    schema: str


@dataclass(frozen=True)
class CallRules:
    """calls, free: see above; each with all rules that it needs, except those of `shared`."""

    calls: str
    free: str
    shared: str


CallGrammar = Callable[[Sequence[CallableTool], Literal, str, bool], CallRules]
"""Given the tools, how literals are written, the chat template, and whether there may be several calls."""


def free_text(marks: Sequence[str], literal: Literal) -> str:
    """The rule `free`: text without the marks, and in it calls, which are the first mark and the rule `rest`."""
    start = literal(marks[0])
    if start == quoted(marks[0]):  # text, so a text in front of it has to end where it begins
        rules = f"free: (said rest)* TEXT?\nsaid[suffix={start}]: /(?s:.*)/{without(marks)}"
    else:
        rules = f"free: TEXT? ({start} rest TEXT?)*"
    return f"{rules}\nTEXT: /(?s:.+)/{without(marks)}"


def without(marks: Sequence[str]) -> str:
    """The part of a terminal that keeps it from holding one of the marks."""
    found = "|".join(re.escape(mark).replace("\\\n", r"\n").replace("/", r"\/") for mark in marks)
    return f" & ~/(?s:.*)({found})(?s:.*)/"


def quoted(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def hermes_calls(tools: Sequence[CallableTool], literal: Literal, template: str, several: bool) -> CallRules:
    opening, closing = literal(hermes.OPENING), literal(hermes.CLOSING)
    return CallRules(
        calls='calls: call ("\\n" call)*' if several else "calls: call",
        free=free_text((hermes.OPENING,), literal),
        shared=f'call: {opening} rest\nrest: "\\n" tool "\\n" {closing}\n{_tools(tools, "arguments")}',
    )


def llama3_calls(tools: Sequence[CallableTool], literal: Literal, template: str, several: bool) -> CallRules:
    """An answer that is no call does not begin with a brace, nor with the tag."""
    tag, text = literal(llama3_json.TAG), r"/\s*[^\s{](?s:.*)/"
    if tag == quoted(llama3_json.TAG):
        text += rf" & ~/\s*{re.escape(llama3_json.TAG)}(?s:.*)/"
    return CallRules(
        calls='calls: tool ("; " tool)*' if several else "calls: tool",
        free=f"free: {tag}? calls | TEXT?\nTEXT: {text}",
        shared=_tools(tools, "parameters"),
    )


def mistral_calls(tools: Sequence[CallableTool], literal: Literal, template: str, several: bool) -> CallRules:
    """A list of objects, or names and arguments where the template has a token between these."""
    marker = literal(mistral.MARKER)
    if mistral.ARGUMENTS in template:
        named = "\n".join(
            f"named_{index}: {quoted(tool.name)} {literal(mistral.ARGUMENTS)} arguments_{index}"
            for index, tool in enumerate(tools)
        )
        choice = " | ".join(f"named_{index}" for index in range(len(tools)))
        calls = f"calls: ({marker} rest){'+' if several else ''}"
        shared = f"rest: {choice}\n{named}\n{_arguments(tools)}"
    else:
        more = ' (", " tool)*' if several else ""
        calls, shared = f"calls: {marker} rest", f'rest: "[" tool{more} "]"\n{_tools(tools, "arguments")}'
    return CallRules(calls=calls, free=free_text((mistral.MARKER,), literal), shared=shared)


def _tools(tools: Sequence[CallableTool], key: str) -> str:
    """`tool`: an object with the name of one and arguments that follow its schema."""
    rules = [f"tool: {' | '.join(f'tool_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        beginning = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        rules.append(f'tool_{index}: {quoted(beginning)} arguments_{index} "}}"')
    return "\n".join([*rules, _arguments(tools)])


def _arguments(tools: Sequence[CallableTool]) -> str:
    return "\n".join(f"arguments_{index}: %json {tool.schema}" for index, tool in enumerate(tools))
