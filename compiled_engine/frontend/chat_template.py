"""Chat templates, rendered by jinja2 in a sandbox, with the functions that transformers offers templates.

Templates are untrusted text: they see plain JSON values alone, and none of Python's own objects.
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

# The names under which a message's reasoning is passed; templates read the first.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Ends what is to be continued, while the template runs. Trailing space shows whether the template strips its messages.
MARK = "CONTINUE_FINAL_MESSAGE_TAG "
# The name of is_stopped among a template's variables, and of the filter that asks it: no template can write it.
IS_STOPPED = "is stopped"


def choose_template(own: Templates, given: str | None, tools: Sequence[Any] | None) -> str:
    """The template to use: `given`, which may be the name of one of the tokenizer's `own`, else one of these.

    Raises ValueError if there is none, or several and none of them is the default.
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
    """Render the text of a conversation.

    tools: JSON schemas. continue_final_message: end the text within the last message; a name is that of the field to
    continue. variables: further variables of the template. is_stopped: asked in each pass of a loop and each call of a
    macro.
    Raises WorkStopped once is_stopped says so, and whatever a template may raise.
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
    """Drop fields that are None; give reasoning the names that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    for name in REASONING_FIELDS:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _mark(message: dict[str, Any], field: str, template: str) -> str:
    """Mark the end of a message's field, or of its last part with a text; the text without the mark."""
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
    """Return a tool's JSON schema, made by transformers for a function. Raises ValueError for anything else."""
    if isinstance(tool, dict):
        return tool
    if not callable(tool):
        raise ValueError(f"tools must be JSON schemas or functions, got {tool!r}")
    from transformers.utils import get_json_schema

    return get_json_schema(tool)


def plain(value: Any) -> Any:
    """The value in JSON's types; of any other object only the name of its type."""
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
    """Have each pass of a loop, and each call of a macro, begin with `_stop`: nothing else in a template is endless."""
    repeats: list[nodes.For | nodes.Macro] = [*template.find_all(nodes.For), *template.find_all(nodes.Macro)]
    for repeated in repeats:
        stop = nodes.Filter(nodes.Const(None), IS_STOPPED, [], [], None, None)
        repeated.body.insert(0, nodes.ExprStmt(stop).set_lineno(repeated.lineno))
    return template


@jinja2.pass_context
def _stop(context: Context, value: None) -> None:
    """Raise WorkStopped if nobody waits for the text any more. As a filter it costs less than as a function, which the
    sandbox would check each time."""
    if context.parent[IS_STOPPED]():
        raise WorkStopped("nobody waits for this conversation any more")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML does not allow."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class Dictionaries:
    """Makes dicts for a template, as the class `dict` would, without the attributes that a class has."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Namespace(jinja2.utils.Namespace):
    """Jinja's, which refuses names that begin with an underscore: Python's own objects are behind these."""

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
    """{% generation %} marks what an assistant wrote, for training; here it leaves its content as it is."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        return caller()
