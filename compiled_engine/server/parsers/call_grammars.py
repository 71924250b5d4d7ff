"""Calls as grammars: what a model may write where it must call a tool, or where its calls must follow their schemas.

Each grammar gives rules of Lark: `calls`, one or several, and `free`, an answer in which calls may occur. The arguments
are JSON whatever the format, since a schema is followed in JSON alone; all parsers read JSON too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiled_engine.server.parsers import deepseek, gemma, harmony, kimi_k2, llama3_json, mistral
from compiled_engine.server.parsers.call_marks import CallMarks

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


# Answers that do not begin with a list.
NO_LIST = r"\s*[^\s\[](?s:.*)"


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


@dataclass(frozen=True)
class MarkedGrammar:
    """The grammar of calls between marks.

    before: returns, in Lark, what precedes the arguments of a call of the tool with this name. after: the text that
    follows them. between: the text between two calls.
    """

    marks: CallMarks
    before: Callable[[str, Literal], str]
    after: str = ""
    between: str = ""

    def __call__(self, tools: Sequence[CallableTool], literal: Literal, template: str, several: bool) -> CallRules:
        marks = self.marks
        closing = [literal(mark) for mark in marks.closing]
        begin, each, before, after = literal(marks.lead or marks.opening), "tool", "", " ".join(closing)
        rules = [*_choice(tools), *self._tools(tools, literal), _arguments(tools)]
        if marks.lead:
            rules.append(" ".join(["call:", literal(marks.opening), "tool", *closing[:-1]]))
            each, after = "call", closing[-1]
        elif marks.calls == "list":
            before, after = '"["', f'"]" {"" if marks.bare else after}'
        between = quoted(self.between) if self.between else ""
        is_one = marks.calls == "one" and not marks.lead
        more = f"({between} {each})*" if several and not is_one else ""
        rules.append(f"rest: {before} {each} {more} {after}")
        if marks.bare:
            return CallRules("calls: rest", f"free: rest | TEXT?\nTEXT: /{NO_LIST}/", "\n".join(rules))
        calls = f"calls: {begin} rest" + (f" ({between} {begin} rest)*" if several and is_one else "")
        return CallRules(calls, free_text(tuple(filter(None, (marks.lead, marks.opening))), literal), "\n".join(rules))

    def _tools(self, tools: Sequence[CallableTool], literal: Literal) -> list[str]:
        after = quoted(self.after) if self.after else ""
        return [
            f"tool_{index}: {self.before(tool.name, literal)} arguments_{index} {after}"
            for index, tool in enumerate(tools)
        ]


def object_begin(name: str, literal: Literal, key: str = "arguments") -> str:
    """The beginning of a call that is an object."""
    return quoted(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')


def line_of_object(name: str, literal: Literal) -> str:
    """The same, on a line of its own."""
    return f'"\\n" {object_begin(name, literal)}'


def kimi_begin(name: str, literal: Literal) -> str:
    """The beginning of a call with an id."""
    return f"{quoted(f'functions.{name}:')} /[0-9]{{1,3}}/ {literal(kimi_k2.ARGUMENTS)}"


def fenced_begin(name: str, literal: Literal) -> str:
    """The beginning of a call of DeepSeek's, with arguments between fences."""
    before = f"{name}\n{deepseek.FENCE}\n"
    return f"{quoted(deepseek.KIND)} {literal(deepseek.SEPARATOR)} {quoted(before)}"


def separated_begin(name: str, literal: Literal) -> str:
    """The same without fences."""
    return f"{quoted(name)} {literal(deepseek.SEPARATOR)}"


def gemma_begin(name: str, literal: Literal) -> str:
    """The beginning of a call of Gemma's."""
    return quoted(gemma.KIND + name)


def python_begin(name: str, literal: Literal) -> str:
    """The beginning of a call in Python, whose arguments are given as a dictionary."""
    return quoted(f"{name}(**")


def llama3_calls(tools: Sequence[CallableTool], literal: Literal, template: str, several: bool) -> CallRules:
    """An answer that is no call does not begin with a brace, nor with the tag."""
    tag, text = literal(llama3_json.TAG), r"/\s*[^\s{](?s:.*)/"
    if tag == quoted(llama3_json.TAG):
        text += rf" & ~/\s*{re.escape(llama3_json.TAG)}(?s:.*)/"
    return CallRules(
        calls='calls: tool ("; " tool)*' if several else "calls: tool",
        free=f"free: {tag}? calls | TEXT?\nTEXT: {text}",
        shared=_objects(tools, "parameters"),
    )


def mistral_calls(tools: Sequence[CallableTool], literal: Literal, template: str, several: bool) -> CallRules:
    """A list of objects, or names and arguments where the template has a token between these."""
    marker = literal(mistral.MARKER)
    if mistral.ARGUMENTS in template:
        named = [
            f"tool_{index}: {quoted(tool.name)} {literal(mistral.ARGUMENTS)} arguments_{index}"
            for index, tool in enumerate(tools)
        ]
        calls = f"calls: ({marker} rest){'+' if several else ''}"
        shared = "\n".join(["rest: tool", *_choice(tools), *named, _arguments(tools)])
    else:
        more = ' (", " tool)*' if several else ""
        calls, shared = f"calls: {marker} rest", f'rest: "[" tool{more} "]"\n{_objects(tools, "arguments")}'
    return CallRules(calls=calls, free=free_text((mistral.MARKER,), literal), shared=shared)


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
        f"TEXT: /(?s:.+)/{without((mark,)) if start == quoted(harmony.START) else ''}",
    ]
    return CallRules(
        calls="calls: call",
        free="\n".join(free),
        shared="\n".join([*calls, _arguments(tools)]),
    )


def _choice(tools: Sequence[CallableTool]) -> list[str]:
    return [f"tool: {' | '.join(f'tool_{index}' for index in range(len(tools)))}"]


def _objects(tools: Sequence[CallableTool], key: str) -> str:
    """`tool`: an object with the name of one and arguments that follow its schema."""
    rules = [
        f'tool_{index}: {object_begin(tool.name, quoted, key)} arguments_{index} "}}"'
        for index, tool in enumerate(tools)
    ]
    return "\n".join([*_choice(tools), *rules, _arguments(tools)])


def _arguments(tools: Sequence[CallableTool]) -> str:
    return "\n".join(f"arguments_{index}: %json {tool.schema}" for index, tool in enumerate(tools))
