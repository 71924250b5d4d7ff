"""Combine reasoning, tool calls and a requested format into one grammar for an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from compiled_engine.features.structured.grammars.text import WHITESPACE, grammar_text
from compiled_engine.sampling.structured_outputs import StructuredOutputs
from compiled_engine.server.chat_format import ChatFormat
from compiled_engine.server.chat_messages import Tool
from compiled_engine.server.errors import bad_request, require, require_absent, shortened
from compiled_engine.server.long_work import LongWork
from compiled_engine.server.parsers.call_grammars import CallableTool
from compiled_engine.server.parsers.reasoning_grammars import ReasoningRules
from compiled_engine.server.parsers.registry import REASONING_FORMATS

# Types of `response_format`.

TYPES = ("text", "json_object", "json_schema")


async def asked_form(
    checks: LongWork,
    response_format: dict[str, Any] | None,
    given: dict[str, Any] | None,
    name: str = "response_format",
) -> StructuredOutputs | None:
    """Return the format that a request requires, or None for free text.

    `checks` runs the checks of the format. `given` is the field structured_outputs. `name` is the name that the
    request's API has for `response_format`. Raises ApiError 400 if both fields require a format, or if the format is
    invalid or cannot be compiled.
    """
    values = _of_format(response_format, name)
    if given is None:
        return None if values is None else await _checked(checks, name, values)
    if values is not None:
        require_absent("structured_outputs", given, f"where {name} is not of type 'text'")
    return await _checked(checks, "structured_outputs", given)


def _of_format(response_format: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """Convert response_format to fields of StructuredOutputs, or to None for free text.

    The schema is in the field `schema`, either of response_format or of its `json_schema`. `name` is the field's name
    in errors. Raises ApiError 400 for an invalid value.
    """
    kind = "text" if response_format is None else response_format.get("type")
    require(kind in TYPES, f"{name}.type", f"one of {', '.join(map(repr, TYPES))}", kind, param=name)
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described: Any = response_format if "schema" in response_format else response_format.get("json_schema")
    require(isinstance(described, dict), f"{name}.json_schema", "an object with a schema", described, param=name)
    strict, schema = described.get("strict"), described.get("schema")
    require(isinstance(strict, bool | None), f"{name}.json_schema.strict", "a boolean", strict, param=name)
    if schema is None:
        return {"json_object": True}
    of_schema = f"{name}.json_schema.schema"
    require(isinstance(schema, dict), of_schema, "a JSON schema, an object", schema, param=name)
    return {"json": schema}


async def _checked(checks: LongWork, name: str, values: Mapping[str, Any]) -> StructuredOutputs:
    def check() -> StructuredOutputs:
        form = StructuredOutputs.of("structured_outputs", values)
        assert form is not None
        grammar_text(form, hurried=True)
        return form

    try:
        return await checks.run(name, len(msgspec.json.encode(values)), check)
    except (TypeError, ValueError) as error:
        text = str(error).removeprefix("structured_outputs: ").replace("structured_outputs", name)
        raise bad_request(name, shortened(f"{name}: {text}")) from error


ANSWER = "answer"
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call."""

    tools: Sequence[Tool]
    required: bool  # At least one call is required.
    several: bool  # More than one call is allowed.

    @property
    def follows_schemas(self) -> bool:
        """Whether the arguments of at least one tool must follow the tool's schema."""
        return self.required or any(tool.function.strict for tool in self.tools)


async def answer_form(
    checks: LongWork,
    chat: ChatFormat,
    prompt: str,
    use: ToolUse | None,
    asked: StructuredOutputs | None,
    continued: str | None = None,
    budget: int | None = None,
) -> StructuredOutputs | None:
    """Return the grammar of an answer, or None for free text.

    `checks` runs the checks of schemas. `prompt` is the rendered prompt, which shows whether reasoning comes first.
    `use` has the tools that the answer may call, None for none. `asked` is the result of `asked_form`. `continued` is
    the message that the answer continues. `budget` bounds the tokens of reasoning. Raises ApiError 400 for a strict
    tool whose schema is not supported.
    """
    if asked is None and budget is None and (use is None or not use.follows_schemas):
        return None
    tools: list[CallableTool] = []
    if use is not None:
        tools = await checks.run("tools", len(msgspec.json.encode(use.tools)), lambda: _callable(use))
    known = None if chat.reasoning is None else REASONING_FORMATS[chat.reasoning]
    reasoning = None if known is None else known.grammar(prompt, continued, chat.guard.literal, budget)
    if reasoning is None and (not tools or (asked is None and use is not None and not use.follows_schemas)):
        return asked
    reasoning = reasoning or ReasoningRules("", "")
    grammars = [] if asked is None else _named_answer(asked)
    body = _body(chat, use, tools, reasoning, has_answer=bool(grammars))
    rules = [f"start: {reasoning.before}body", *body, reasoning.rules]
    whole = {"grammars": [{"lark_grammar": "\n".join(rules)}, *grammars]}
    return StructuredOutputs(grammar=json.dumps(whole, ensure_ascii=False))


def _body(
    chat: ChatFormat, use: ToolUse | None, tools: Sequence[CallableTool], reasoning: ReasoningRules, *, has_answer: bool
) -> list[str]:
    """Return the grammar rule `body` and the rules that it uses, except those of reasoning.

    The rule describes what follows the initial reasoning: calls, text, or an answer in the requested format.
    has_answer: a format is requested; its grammar is named `answer`.
    """
    answer = f"{reasoning.before_text}@{ANSWER}"
    if use is None or not tools:
        return [f"body: {answer}"] if has_answer else ["body: TEXT?", "TEXT: /(?s:.+)/"]
    assert chat.tools is not None
    found = chat.tools.grammar(tools, chat.guard.literal, chat.tool_template or chat.template, use.several)
    before = reasoning.before_text if chat.tools.reasoning is None else reasoning.before_message
    if use.required:
        return [f"body: {before}calls", found.calls, found.shared]
    if has_answer:
        return [f"body: {before}calls | {answer}", found.calls, found.shared]
    free = f"TEXT? ({before}free)?" if reasoning.before_message else f"{before}free"
    return [f"body: {free}", found.free, found.calls, found.shared]


def _named_answer(asked: StructuredOutputs) -> list[dict[str, Any]]:
    """Return the grammars of a requested format. The first is named `answer`, to which the rules of `_body` refer."""
    first, *others = json.loads(grammar_text(asked))["grammars"]
    return [{**first, "name": ANSWER}, *others]


def _callable(use: ToolUse) -> list[CallableTool]:
    """Return the tools with the schemas that their arguments must follow.

    A tool's own schema is enforced if the tool is strict or a call is required. Otherwise its arguments may be any
    object. If the schema is not supported, a strict tool raises ApiError 400, and any other tool allows any object.
    """
    found: list[CallableTool] = []
    for index, tool in enumerate(use.tools):
        schema = tool.function.parameters or ANY_ARGUMENTS
        if not (use.required or tool.function.strict):
            schema = ANY_ARGUMENTS
        try:
            grammar_text(StructuredOutputs(json=schema), hurried=True)
        except (TypeError, ValueError) as error:
            if tool.function.strict:
                name = f"tools[{index}].function.parameters"
                raise bad_request(name, shortened(f"{name}: {error}")) from error
            schema = ANY_ARGUMENTS
        bounded = schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        found.append(CallableTool(tool.function.name, json.dumps(bounded, ensure_ascii=False)))
    return found
