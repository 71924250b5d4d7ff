"""Find the message forms that a chat template reads: text or parts, arguments as objects or text, one or more calls.

Templates do not declare their forms. Each template is rendered with small probe conversations, and the output shows
which forms it reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat, takewhile
from typing import Any

from compiled_engine.frontend.chat_template import REASONING_FIELDS, render_template

# Nesting depth up to which arguments are parsed; deeper ones stay text.
DEEPEST_ARGUMENTS = 64
MARK, OTHER_MARK = "probe7one", "probe7two"
# Loop iterations allowed in a probe, far more than any needs. They end a probe of an endless template.
MOST_PASSES = 100_000
# A mark inside a structure that was dumped as JSON or Python repr.
_DUMPED = re.compile(rf"""['"](?:text|{OTHER_MARK})['"]\s*:\s*['"]{MARK}""")
_BLANK = dict.fromkeys(
    [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")],
    "",
)
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "probe"}}},
    },
}


@dataclass(frozen=True)
class ContentForm:
    """The form in which a chat template reads a message's content: text, or a list of parts."""

    text: bool  # It reads a string.
    parts: int  # How many parts of a list it reads, 0 to 2; 2 stands for any number.

    def adapt(self, content: Any) -> Any:
        """Return the content, a string or a list of text parts, in this form.

        A list is joined with line ends to one text, unless the template reads any number of parts.
        """
        if isinstance(content, str):
            return content if self.text or not self.parts else [{"type": "text", "text": content}]
        if not isinstance(content, list | tuple) or self.parts == 2:
            return content
        return self.adapt("\n".join(part["text"] for part in content))


@dataclass(frozen=True)
class TemplateForms:
    """The forms in which a chat template reads messages, tool calls and tools."""

    contents: Mapping[str, ContentForm]  # By role. Other roles have the user's form.
    arguments_as_text: bool  # Arguments of calls are read as a JSON string.
    one_call: bool = False  # Only the first of a message's calls is read.
    one_text: bool = False  # A message with calls may have content or reasoning, not both.
    one_system: bool = False  # Only the first of several leading system messages is read.
    described: bool = False  # A tool must have a description.

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages of a conversation in the forms that the template reads.

        Messages may be merged or split, see `one_system` and `one_call`.
        """
        if self.one_system:
            messages = _one_system(messages)
        if self.one_call:
            messages = _one_call_each(messages)
        return [self.adapt(message) for message in messages]

    def tools(self, tools: Sequence[Any]) -> list[Any]:
        """Return the tools (JSON schemas), with empty descriptions added if the template needs descriptions."""
        return [_described(tool) for tool in tools] if self.described else list(tools)

    def adapt(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return one message in the forms that the template reads."""
        adapted = dict(message)
        if "content" in message:
            form = self.contents.get(message.get("role", ""), self.contents["user"])
            adapted["content"] = form.adapt(message["content"])
        if isinstance(calls := message.get("tool_calls"), list | tuple):
            adapted["tool_calls"] = [self._adapt_call(call) for call in calls]
            reasoning = next((name for name in REASONING_FIELDS if message.get(name)), None)
            content = adapted.get("content")
            if self.one_text and reasoning and content and isinstance(content, str):
                adapted |= {"content": "", reasoning: f"{message[reasoning]}\n{content}"}
        return adapted

    def _adapt_call(self, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if "function" in call:
            return {**call, "function": self._adapt_call(call["function"])}
        if "arguments" not in call:
            return call
        arguments = _parsed(call["arguments"])
        if self.arguments_as_text and isinstance(arguments, Mapping):
            given = call["arguments"]  # as the model wrote it
            is_object = isinstance(given, str) and given.strip().startswith("{")
            arguments = given if is_object else json.dumps(arguments, ensure_ascii=False)
        return {**call, "arguments": arguments}


def _one_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    first = list(takewhile(lambda message: message.get("role") in ("system", "developer"), messages))
    if len(first) < 2:
        return list(messages)
    texts = [ContentForm(text=True, parts=0).adapt(message.get("content") or "") for message in first]
    return [{**first[0], "content": "\n\n".join(texts)}, *messages[len(first) :]]


def _one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages, with each message that has several calls split into messages with one call.

    Each of these messages is followed by the results of its call.
    """
    apart: list[Mapping[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple) or len(calls) < 2:
            apart.append(message)
            continue
        ids = [call.get("id") if isinstance(call, Mapping) else None for call in calls]
        results: list[list[Mapping[str, Any]]] = [[] for _ in calls]
        begin = place
        while place < len(messages) and messages[place].get("role") == "tool":
            call_id = messages[place].get("tool_call_id")
            owner = ids.index(call_id) if ids.count(call_id) == 1 else min(place - begin, len(calls) - 1)
            results[owner].append(messages[place])
            place += 1
        bare = {name: value for name, value in message.items() if name not in REASONING_FIELDS} | {"content": ""}
        for index, call in enumerate(calls):
            apart += [{**(bare if index else message), "tool_calls": [call]}, *results[index]]
    return apart


def _described(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def _parsed(arguments: Any) -> Any:
    """Return a call's arguments as an object if they are the text of a JSON object; {} for None, "" and null.

    Other arguments, and objects with more than DEEPEST_ARGUMENTS levels, are returned unchanged, so that the model sees
    its own output.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments.strip() or "{}")
    except (ValueError, RecursionError):
        return arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) and not _is_deep(value) else arguments


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST_ARGUMENTS):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


@cache
def forms_of(template: str) -> TemplateForms:
    """Return the forms in which a chat template reads messages and tools, found by rendering probe conversations."""
    user = _content_form(template, [], "user", [])
    asks = {"role": "user", "content": user.adapt("probe")}
    answers = {"role": "assistant", "content": user.adapt("probe")}
    as_text = _reads_arguments_as_text(template, asks, user)
    calls = [asks, _call(user, json.dumps({"x": "probe"}) if as_text else {"x": "probe"})]
    surroundings: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
        "system": ([], [asks]),
        "developer": ([], [asks]),
        "assistant": ([asks], [asks]),
        "tool": (calls, [answers, asks]),
    }
    contents = {
        role: _content_form(template, before, role, after, user) for role, (before, after) in surroundings.items()
    }
    return TemplateForms(
        {"user": user, **contents},
        as_text,
        one_call=_reads_one_call(template, calls),
        one_text=_reads_one_text(template, calls),
        one_system=_reads_one_system(template, contents["system"], asks),
        described=_needs_descriptions(template, asks),
    )


def _reads_one_call(template: str, calls: Sequence[Any]) -> bool:
    """Return whether the template drops the second call of a message without an error.

    calls: a user message, and an assistant message with a call.
    """
    asks, message = calls

    def shown(*names: str) -> list[bool]:
        of_message = [
            {**call, "function": {**call["function"], "name": name}} for call in message["tool_calls"] for name in names
        ]
        text = _rendered(template, [asks, {**message, "tool_calls": of_message}])
        return [name in text for name in names]

    return shown(MARK, OTHER_MARK) == [True, False] and shown(OTHER_MARK) == [True]


def _reads_one_text(template: str, calls: Sequence[Any]) -> bool:
    """Return whether the template refuses a message that has a call, content and reasoning.

    calls: a user message, and an assistant message with a call.
    """
    asks, message = calls
    content, thought = {"content": asks["content"]}, {REASONING_FIELDS[0]: "probe"}

    def takes(fields: Mapping[str, Any]) -> bool:
        return bool(_rendered(template, [asks, {**message, **fields}]))

    return takes(content) and takes(thought) and not takes(content | thought)


def _reads_one_system(template: str, form: ContentForm, asks: Any) -> bool:
    """Return whether the template drops the second of two system messages without an error.

    form: the form of a system message's content. asks: a user message.
    """
    text = _rendered(
        template, [*({"role": "system", "content": form.adapt(mark)} for mark in (MARK, OTHER_MARK)), asks]
    )
    return MARK in text and OTHER_MARK not in text


def _needs_descriptions(template: str, asks: Any) -> bool:
    """Return whether the template refuses a tool without a description. asks: a user message."""
    function = {name: value for name, value in _TOOL["function"].items() if name != "description"}

    def takes(tool: Any) -> bool:
        return bool(_rendered(template, [asks], [[tool]]))

    return takes(_TOOL) and not takes({**_TOOL, "function": function})


def _content_form(
    template: str, before: Sequence[Any], role: str, after: Sequence[Any], default: ContentForm | None = None
) -> ContentForm:
    """Return the form in which a template reads the content of messages with the role `role`.

    The form is found by rendering a probe between the messages `before` and `after`. If the probe's content does not
    show in the output in either form, the result is `default`, or text if that is None.
    """

    def rendered(content: Any) -> str:
        message = {"role": role, "content": content, "name": "probe", "tool_call_id": "probe0000"}
        return _rendered(template, [*before, message, *after])

    parts = [{"type": "text", "text": MARK}, {"type": "text", "text": OTHER_MARK}]
    text = MARK in rendered(MARK)
    of_parts = rendered(parts)
    if MARK not in of_parts:
        of_parts = rendered(parts[:1])
    reads_parts = MARK in of_parts and not _DUMPED.search(of_parts)
    if not text and not reads_parts:
        return default or ContentForm(text=True, parts=0)
    return ContentForm(text, reads_parts + (reads_parts and OTHER_MARK in of_parts))


def _reads_arguments_as_text(template: str, asks: Any, user: ContentForm) -> bool:
    """Return whether the template renders the arguments of calls as JSON only if they are given as JSON text.

    asks: a user message. user: the form of its content.
    """
    given = {OTHER_MARK: MARK}
    answers = {"role": "tool", "content": "probe", "name": "probe", "tool_call_id": "probe0000"}

    def shows(arguments: Any) -> bool:
        text = _rendered(template, [asks, _call(user, arguments), answers])
        return MARK in text and str(given) not in text

    return not shows(given) and shows(json.dumps(given))


def _call(user: ContentForm, arguments: Any) -> dict[str, Any]:
    call = {"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": user.adapt(""), "tool_calls": [call]}


def rendered_probe(template: str, role: str, content: Any) -> str:
    """Return the text that the template renders for a conversation that ends with a message of this role and content.

    Returns "" if the template refuses the conversation. No tools are given.
    """
    before = [] if role in ("user", "system") else [{"role": "user", "content": "probe"}]
    return _rendered(template, [*before, {"role": role, "content": content}], with_tools=(None,))


def _rendered(template: str, messages: Sequence[Any], with_tools: Sequence[list[Any] | None] = (None, [_TOOL])) -> str:
    """Return the texts that the template renders with each of the tool lists in `with_tools`, joined.

    A conversation that the template refuses renders as "".
    """
    texts = []
    for tools in with_tools:
        with suppress(Exception):  # templates may raise anything
            text = render_template(
                template,
                messages,
                tools=tools,
                add_generation_prompt=True,
                continue_final_message=False,
                variables=_BLANK,
                is_stopped=partial(next, repeat(False, MOST_PASSES), True),
            )
            texts.append(text)
    return "\n".join(texts)
