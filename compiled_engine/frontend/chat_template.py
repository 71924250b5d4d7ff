"""Renders chat templates with jinja2 in a sandbox, with the functions that transformers provides to templates.

Templates are untrusted: they see plain JSON values only, never Python objects.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from compiled_engine.frontend.tokenizer_files import Templates
from compiled_engine.process.smallest_first import Stopped, WorkStopped, never

# Names for a message's reasoning. Templates read the first.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Marks the end of the message to continue during rendering. The trailing space shows if the template strips messages.
MARK = "CONTINUE_FINAL_MESSAGE_TAG "
# Name of the variable is_stopped and of the filter that polls it. The space keeps templates from using it.
IS_STOPPED = "is stopped"


def choose_template(own: Templates, given: str | None, tools: Sequence[Any] | None) -> str:
    """Return the chat template to use.

    It is `given`, or the template of this name among the tokenizer's templates `own`. Without `given`, it is one of
    `own`: "tool_use" if there are `tools` and such a template, otherwise "default". Raises ValueError if there is no
    template, or if there are several but no "default".
    """
    if isinstance(own, dict):
        if given is not None:
            return own.get(given, given)
        if tools is not None and "tool_use" in own:
            return own["tool_use"]
        if "default" not in own:
            raise ValueError(f"chat_template must be given: the tokenizer's templates have no default: {sorted(own)}")
        return own["default"]
    template = own if given is None else given
    if template is None:
        raise ValueError("chat_template must be given: the tokenizer has none")
    return template


def render_template(
    template: str,
    conversation: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None,
    add_generation_prompt: bool,
    continue_final_message: bool | str,
    variables: Mapping[str, Any],
    is_stopped: Stopped = never,
) -> str:
    """Render a conversation to text.

    `tools` are JSON schemas. With `continue_final_message`, the text ends within the last message; a string names the
    field to continue. `variables` are passed to the template. `is_stopped` is polled in each loop iteration and macro
    call.

    Raises WorkStopped once `is_stopped` returns True, and any error that a template may raise.
    """
    messages = [_with_reasoning(plain(message)) for message in conversation]
    field = "content" if continue_final_message is True else str(continue_final_message or "")
    final = _mark(messages[-1], field, template) if field else ""
    text = _compile(template).render(
        messages=messages,
        tools=None if tools is None else [plain(tool) for tool in tools],
        add_generation_prompt=add_generation_prompt,
        **{"documents": None, **plain(variables), IS_STOPPED: is_stopped},
    )
    return _cut_at_mark(text, final) if field else text


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without fields that are None, and with its reasoning under each name that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    for name in REASONING_FIELDS:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _mark(message: dict[str, Any], field: str, template: str) -> str:
    """Append MARK, which shows where the message ends in the rendered text, to a field of a message, in place.

    If the field is a list, MARK is appended to its last text part. Returns the text without MARK. Raises ValueError if
    the field has no text, or if the template does not use the field.
    """
    text = message.get(field)
    if isinstance(text, list):
        part = next((part for part in reversed(text) if isinstance(part, dict) and "text" in part), {})
        return _mark(part, "text", template)
    if not isinstance(text, str):
        raise ValueError(f"the final message has no text in {field!r} to continue")
    names = [field]
    if field in REASONING_FIELDS:
        names = [name for name in REASONING_FIELDS if message.get(name) == text]
    if not any(name in template for name in names):
        raise ValueError(f"the chat template does not use {field!r} of the final message")
    message |= dict.fromkeys(names, text + MARK)
    return text


def _cut_at_mark(text: str, final: str) -> str:
    if final.strip() not in text or MARK.strip() not in text:
        raise ValueError("the final message cannot be continued: the rendered text does not contain it unchanged")
    end = text.rindex(MARK.strip())
    whole = text[end : end + len(MARK)] == MARK
    return text[:end] if whole else text[:end].rstrip()


def schema_of(tool: Any) -> Any:
    """Return a tool's JSON schema; transformers derives it from a function. Raises ValueError for anything else."""
    if isinstance(tool, dict):
        return tool
    if not callable(tool):
        raise ValueError(f"tools must be JSON schemas or functions, got {tool!r}")
    from transformers.utils import get_json_schema

    return get_json_schema(tool)


def plain(value: Any) -> Any:
    """Convert a value to JSON types, including dataclasses and objects with `model_dump`.

    Any other object becomes the name of its type.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # subclasses may have methods that the sandbox does not check
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {plain(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else list(map(plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    return f"<{type(value).__name__}>"


@cache
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters |= {"tojson": _to_json, IS_STOPPED: _stop}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": Dictionaries(),
        "namespace": Namespace,
    }
    code = environment.compile(_with_stops(environment.parse(template)))
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


def _with_stops(template: nodes.Template) -> nodes.Template:
    """Insert calls of `_stop` into each loop iteration and macro call of a template, in place. Return the template.

    Only loops and macros can run endlessly.
    """
    repeats: list[nodes.For | nodes.Macro] = [*template.find_all(nodes.For), *template.find_all(nodes.Macro)]
    for repeated in repeats:
        stop = nodes.Filter(nodes.Const(None), IS_STOPPED, [], [], None, None)
        repeated.body.insert(0, nodes.ExprStmt(stop).set_lineno(repeated.lineno))
    return template


@jinja2.pass_context
def _stop(context: Context, value: None) -> None:
    """Raise WorkStopped if the rendering was cancelled. Templates call this as a filter.

    A call of a function would take longer, since the sandbox checks each one.
    """
    if context.parent[IS_STOPPED]():
        raise WorkStopped("nobody waits for this conversation any more")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise to JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class Dictionaries:
    """Stands for `dict` in templates, which can call it but reach no attributes of Python's class."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which could reach Python objects."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` may be the name of a value
        for name in (given := dict(*args[1:], **values)):
            Namespace._check(name)
        jinja2.utils.Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may have no {name!r}: it begins with an underscore")


class GenerationBlocks(Extension):
    """Renders {% generation %} blocks as their content. The blocks mark the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        return caller()
