"""Grammars of tool calls, for required calls and for calls that must follow their schemas.

Each grammar defines two Lark rules: `calls`, one call or several, and `free`, an answer that may contain calls.
Arguments are JSON in every format but XML, since schemas are enforced on JSON only; all parsers read JSON too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiled_engine.server.parsers import deepseek, gemma, harmony, kimi_k2, llama3_json, mistral
from compiled_engine.server.parsers.call_marks import CallMarks

Literal = Callable[[str], str]
"""Writes a text as a Lark literal, by id if it is a special token."""


@dataclass(frozen=True)
class CallableTool:
    """A tool that may be called."""

    name: str
    schema: str  # JSON text of its arguments' schema


@dataclass(frozen=True)
class CallRules:
    """The Lark rules of a call grammar. Both `calls` and `free` also need the rules in `shared`."""

    calls: str
    free: str
    shared: str


CallGrammar = Callable[[Sequence[CallableTool], Literal, str, bool], CallRules]
"""Makes the rules, given the tools, the literal writer, the chat template, and whether several calls are allowed."""


def free_text(marks: Sequence[str], literal: Literal) -> str:
    """Return the Lark rule `free`, which matches calls and the text around them. The text contains none of `marks`.

    A call is the first of `marks`, followed by the rule `rest`, which the caller defines.
    """
    start = literal(marks[0])
    if start == quoted(marks[0]):  # plain text, so text before it must end where it begins
        rules = f"free: (said rest)* TEXT?\nsaid[suffix={start}]: /(?s:.*)/{without(marks)}"
    else:
        rules = f"free: TEXT? ({start} rest TEXT?)*"
    return f"{rules}\nTEXT: /(?s:.+)/{without(marks)}"


def without(marks: Sequence[str]) -> str:
    """Return the part of a Lark terminal that excludes texts with any of the marks."""
    found = "|".join(re.escape(mark).replace("\\\n", r"\n").replace("/", r"\/") for mark in marks)
    return f" & ~/(?s:.*)({found})(?s:.*)/"


# An answer that does not begin with a list.
NO_LIST = r"\s*[^\s\[](?s:.*)"


def quoted(text: str) -> str:
    """Return a text as a quoted Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def text_until(mark: str, literal: Literal, name: str) -> str:
    """Return the Lark rule `name`, which matches any text and the mark that follows it.

    A mark that is a special token can follow the text directly, since text never contains special tokens. Any other
    mark becomes the rule's suffix, for which the grammar library searches.
    """
    written = literal(mark)
    if written == quoted(mark):
        return f"{name}[suffix={written}]: /(?s:.*)/"
    return f"{name}: {name.upper()}? {written}\n{name.upper()}: /(?s:.+)/"


@dataclass(frozen=True)
class MarkedGrammar:
    """Makes the Lark rules of calls that are between marks. Implements CallGrammar."""

    marks: CallMarks
    before: Callable[[str, Literal], str]  # returns, in Lark, what precedes the arguments of a call of the named tool
    after: str = ""  # text after the arguments
    between: str = ""  # text between two calls

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
    """Return, in Lark, the beginning of a call that is a JSON object, up to its arguments, which are under `key`."""
    return quoted(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')


def line_of_object(name: str, literal: Literal) -> str:
    """Return, in Lark, the beginning of a call that is a JSON object on its own line."""
    return f'"\\n" {object_begin(name, literal)}'


def kimi_begin(name: str, literal: Literal) -> str:
    """Return, in Lark, the beginning of a Kimi K2 call, which has an id."""
    return f"{quoted(f'functions.{name}:')} /[0-9]{{1,3}}/ {literal(kimi_k2.ARGUMENTS)}"


def fenced_begin(name: str, literal: Literal) -> str:
    """Return, in Lark, the beginning of a DeepSeek V3 call, whose arguments are fenced."""
    before = f"{name}\n{deepseek.FENCE}\n"
    return f"{quoted(deepseek.KIND)} {literal(deepseek.SEPARATOR)} {quoted(before)}"


def separated_begin(name: str, literal: Literal) -> str:
    """Return, in Lark, the beginning of a DeepSeek V3.1 call, which has no fences."""
    return f"{quoted(name)} {literal(deepseek.SEPARATOR)}"


def gemma_begin(name: str, literal: Literal) -> str:
    """Return, in Lark, the beginning of a Gemma call."""
    return quoted(gemma.KIND + name)


def python_begin(name: str, literal: Literal) -> str:
    """Return, in Lark, the beginning of a Python call, whose arguments are a dictionary."""
    return quoted(f"{name}(**")


def llama3_calls(tools: Sequence[CallableTool], literal: Literal, template: str, several: bool) -> CallRules:
    """Return the rules of Llama 3's calls. Implements CallGrammar.

    An answer without a call begins neither with a brace nor with <|python_tag|>.
    """
    tag, text = literal(llama3_json.TAG), r"/\s*[^\s{](?s:.*)/"
    if tag == quoted(llama3_json.TAG):
        text += rf" & ~/\s*{re.escape(llama3_json.TAG)}(?s:.*)/"
    return CallRules(
        calls='calls: tool ("; " tool)*' if several else "calls: tool",
        free=f"free: {tag}? calls | TEXT?\nTEXT: {text}",
        shared=_objects(tools, "parameters"),
    )


def mistral_calls(tools: Sequence[CallableTool], literal: Literal, template: str, several: bool) -> CallRules:
    """Return the rules of calls in Mistral's format. Implements CallGrammar.

    If the template has a token between names and arguments, a call is a name and arguments. Otherwise calls are a list
    of objects.
    """
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
    """Return the rules of gpt-oss's format, in which an answer has at most one call, at its end.

    Implements CallGrammar. The rule `free` uses the rule `thought` of the reasoning grammar.
    """
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
    """Return the Lark rule `tool`, which matches a JSON object of a tool's name and, under `key`, its arguments.

    The result also has the rules that `tool` uses.
    """
    rules = [
        f'tool_{index}: {object_begin(tool.name, quoted, key)} arguments_{index} "}}"'
        for index, tool in enumerate(tools)
    ]
    return "\n".join([*_choice(tools), *rules, _arguments(tools)])


def _arguments(tools: Sequence[CallableTool]) -> str:
    return "\n".join(f"arguments_{index}: %json {tool.schema}" for index, tool in enumerate(tools))
