"""StructuredOutputs: the required format of a request's text."""

from __future__ import annotations

import json as json_text
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

# Limits: bytes of a schema, expression or grammar; nesting depth of JSON, checked before it is parsed.
MAX_BYTES = 128 * 1024
MAX_DEPTH = 64

KINDS = ("json", "regex", "choice", "grammar", "json_object")

# Keywords of JSON schemas whose values are schemas by names that the user chooses, such as "default".
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

# An unterminated string extends to the end of the text, so that no part is read twice.
_STRINGS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKETS = re.compile(r"[\[\]{}]")


@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint on a request's text, of exactly one of five kinds. Generation ends when the text is complete.

    Fields have vLLM's names.

    - json: JSON schema, as a dict or as text; stored as text. Unsupported keywords are refused.
    - regex: regular expression (Rust's syntax, without look-around) for the whole text.
    - choice: texts, one of which is generated.
    - grammar: context-free grammar, in llguidance's Lark or in GBNF.
    - json_object: True for any JSON object.
    - disable_any_whitespace: JSON without whitespace.
    - disable_additional_properties: objects with `properties` in the JSON schema allow no other properties, unless the
      schema sets additionalProperties.
    - whitespace_pattern: regular expression for whitespace in JSON; the default, a space or a line end followed by up
      to 24 characters of indentation, prevents endless whitespace.

    Raises TypeError or ValueError, naming the field and what is allowed. Schemas, expressions and grammars are compiled
    when a request is made.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, got {', '.join(given) or 'none'}"
            )
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool | None):
                raise TypeError(f"structured_outputs.{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if (text := getattr(self, name)) is not None:
                _check_text(f"structured_outputs.{name}", text)
        if self.json is not None:
            schema = _schema_text(self.json)
            object.__setattr__(self, "json", _closed(schema) if self.disable_additional_properties else schema)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @classmethod
    def of(cls, name: str, value: Any) -> StructuredOutputs | None:
        """Return `value` as StructuredOutputs. It may also be a dict of the fields, or None, which stays None.

        name: the parameter's name in errors. Raises TypeError or ValueError for other values.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be StructuredOutputs or a dict with its fields, got {value!r}")
        known = [field.name for field in fields(cls)]
        for key in value:
            if key not in known:
                raise ValueError(f"{name} must not have {str(key)[:100]!r}; allowed: {', '.join(known)}")
        given = {key: item for key, item in value.items() if item is not None}
        return cls(**given)


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a string, got {text!r:.200}")
    if not text:
        raise ValueError(f"{name} must not be empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode: {error.reason}") from error
    if size > MAX_BYTES:
        raise ValueError(f"{name} must have at most {MAX_BYTES} bytes, got {size}")


def _schema_text(schema: Any) -> str:
    name = "structured_outputs.json"
    if not isinstance(schema, str | Mapping):
        raise TypeError(f"{name} must be a JSON schema, as a dict or a string, got {schema!r:.200}")
    if not isinstance(schema, str):
        try:
            schema = json_text.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{name} must be a JSON schema: {error}") from error
    _check_text(name, schema)
    if _depth(schema) > MAX_DEPTH:
        raise ValueError(f"{name} must have at most {MAX_DEPTH} arrays and objects within each other")
    try:
        parsed = json_text.loads(schema)
    except ValueError as error:
        raise ValueError(f"{name} must be valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} must be a JSON object, got {type(parsed).__name__}")
    return schema


def _closed(schema: str) -> str:
    """Return the JSON schema with additionalProperties false in each object that has properties.

    An object that sets additionalProperties keeps its value.
    """

    def close(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("properties"), dict):
                value.setdefault("additionalProperties", False)
            for name, inner in value.items():
                if name in _NAMED_SCHEMAS and isinstance(inner, dict):
                    close([*inner.values()])
                elif name not in ("const", "enum", "default", "examples"):
                    close(inner)
        elif isinstance(value, list):
            for inner in value:
                close(inner)

    parsed = json_text.loads(schema)
    close(parsed)
    return json_text.dumps(parsed, ensure_ascii=False)


def _depth(text: str) -> int:
    """Return the nesting depth of arrays and objects in JSON text."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _choices(choice: Any) -> tuple[str, ...]:
    name = "structured_outputs.choice"
    if not isinstance(choice, list | tuple):
        raise TypeError(f"{name} must be a list of strings, got {choice!r:.200}")
    if not choice:
        raise ValueError(f"{name} must have at least one string, got []")
    for index, text in enumerate(choice):
        _check_text(f"{name}[{index}]", text)
    size = sum(len(text.encode()) for text in choice)
    if size > MAX_BYTES:
        raise ValueError(f"{name} must have at most {MAX_BYTES} bytes in all, got {size}")
    return tuple(choice)
