"""Calls as grammars: what a model may write where it must call a tool, or where its calls must follow their schemas.

Each function gives rules of Lark: `calls`, one or several, and `free`, an answer in which calls may occur.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiled_engine.server.parsers import harmony, hermes, llama3_json, mistral

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


def quoted(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def text_until(mark: str, literal: Literal, name: str) -> str:
    """A rule for any text with a mark at its end. A special token is in no text, so it ends one; any other mark has to
    be looked for."""
    written = literal(mark)
    if written == quoted(mark):
        return f"{name}[suffix={written}]: /(?s:.*)/"
    return f"{name}: {name.upper()}? {written}\n{name.upper()}: /(?s:.+)/"


def hermes_calls(tools: Sequence[CallableTool], literal: Literal, template: str, several: bool) -> CallRules:
    opening, closing = literal(hermes.OPENING), literal(hermes.CLOSING)
    return CallRules(
        calls='calls: call ("\\n" call)*' if several else "calls: call",
        free=f"free: TEXT? (call TEXT?)*\n{_text_without(hermes.OPENING, opening)}",
        shared=f'call: {opening} "\\n" tool "\\n" {closing}\n{_tools(tools, "arguments")}',
    )


def llama3_calls(tools: Sequence[CallableTool], literal: Literal, template: str, several: bool) -> CallRules:
    """An answer that is no call does not begin with a brace."""
    return CallRules(
        calls='calls: tool ("; " tool)*' if several else "calls: tool",
        free=f"free: {literal(llama3_json.TAG)}? calls | TEXT?\nTEXT: /\\s*[^\\s{{](?s:.*)/",
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
        calls = f"calls: call{'+' if several else ''}"
        shared = f"call: {marker} ({choice})\n{named}\n{_arguments(tools)}"
    else:
        more = ' (", " tool)*' if several else ""
        calls, shared = f'calls: {marker} "[" tool{more} "]"', _tools(tools, "arguments")
    return CallRules(calls=calls, free=f"free: TEXT? calls?\n{_text_without(mistral.MARKER, marker)}", shared=shared)


def harmony_calls(tools: Sequence[CallableTool], literal: Literal, template: str, several: bool) -> CallRules:
    """One call, as it ends the answer. `free` uses the rule `thought` of harmony's reasoning."""
    start, channel, message = map(literal, (harmony.START, harmony.CHANNEL, harmony.MESSAGE))
    calls = [f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        recipient = f" to={harmony.FUNCTIONS}{tool.name}"
        header = f'{quoted(recipient)} {channel} "commentary" | {channel} {quoted(f"commentary{recipient}")}'
        calls.append(f"call_{index}: ({header}) content_type {message} arguments_{index}")
    calls.append(f'content_type: " "? {literal(harmony.CONSTRAIN)} "json" | " json"')
    preamble = f'preamble: {channel} "commentary" {message} note {start} "{harmony.AUTHOR}"'
    mark = "<|"  # begins all markers
    free = [
        f'free: (preamble thought*)* (call | {channel} "final" {message} TEXT?)',
        preamble,
        text_until(harmony.END, literal, "note"),
        _text_without(mark, quoted(mark) if start == quoted(harmony.START) else start),
    ]
    return CallRules(
        calls="calls: call",
        free="\n".join(free),
        shared="\n".join([*calls, _arguments(tools)]),
    )


def _tools(tools: Sequence[CallableTool], key: str) -> str:
    """`tool`: an object with the name of one and arguments that follow its schema."""
    rules = [f"tool: {' | '.join(f'tool_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        beginning = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        rules.append(f'tool_{index}: {quoted(beginning)} arguments_{index} "}}"')
    return "\n".join([*rules, _arguments(tools)])


def _arguments(tools: Sequence[CallableTool]) -> str:
    return "\n".join(f"arguments_{index}: %json {tool.schema}" for index, tool in enumerate(tools))


def _text_without(mark: str, literal: str) -> str:
    """The terminal TEXT: any text that does not hold the mark, which no text holds if it is a special token."""
    if literal != quoted(mark):
        return "TEXT: /(?s:.+)/"
    escaped = re.escape(mark)
    return f"TEXT: /(?s:.+)/ & ~/(?s:.*){escaped}(?s:.*)/"
