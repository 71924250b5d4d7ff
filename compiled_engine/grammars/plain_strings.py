"""Which JSON schemas have strings of which nothing but the length is bounded, and no doubt where one is."""

from __future__ import annotations

import json
import re
from typing import Any

# What says nothing about a value.
_NOTES = frozenset({"title", "description", "default", "examples", "$schema", "$comment", "deprecated"})
_KEYS = {
    "object": frozenset({"type", "properties", "required", "additionalProperties"}),
    "array": frozenset({"type", "items", "minItems", "maxItems"}),
    "string": frozenset({"type", "minLength", "maxLength"}),
    "integer": frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset({"type"}),
    "null": frozenset({"type"}),
}
_DEFINITION = re.compile(r"#/\$defs/[^/]+")
# A pattern for the whole text that has none but ASCII characters and classes of them. There is one way to read each.
_NARROW = re.compile(
    r"\^(?:[A-Za-z0-9 _:@,-]|\[[A-Za-z0-9 _-]+\]|\((?:\?:)?+|[)|]|\{\d+(?:,\d*)?\}|[?*+])*+\$", re.ASCII
)
PROBES = "éñжяλ中の가"


def probe_for(grammar: str, whitespace: str) -> str | None:
    """A character that may come next only where a string is being written whose length alone is bounded: no key,
    constant or pattern of the schema has it. None if the grammar is another than a schema of known keywords, if two
    kinds of strings may begin at one place, or if it is not said that objects have no other keys.

    grammar: as llguidance reads it. whitespace: the pattern that may stand between two parts, or none at all.
    """
    given = json.loads(grammar) if grammar.startswith("{") else None
    match given:
        case {"grammars": [{"lark_grammar": str()}]}:
            return None
        case {"grammars": [{"json_schema": {**schema}}]}:
            options: Any = schema.pop("x-guidance", {})
            definitions = schema.pop("$defs", {})
        case _:
            return None
    if not isinstance(options, dict):  # llguidance reads other forms too
        return None
    if options.get("whitespace_pattern") not in (None, whitespace):
        return None
    if not isinstance(definitions, dict) or not all(map(_is_plain, [schema, *definitions.values()])):
        return None
    text = json.dumps([schema, definitions], ensure_ascii=False)
    return next((probe for probe in PROBES if probe not in text), None)


def _is_plain(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    keys = schema.keys() - _NOTES
    kind = schema.get("type")
    if "$ref" in keys:
        return keys == {"$ref"} and _DEFINITION.fullmatch(str(schema["$ref"])) is not None
    if "enum" in keys or "const" in keys:
        return len(keys - {"type"}) == 1 and not isinstance(kind, list)
    if "anyOf" in keys:
        branches = schema["anyOf"]
        return keys == {"anyOf"} and all(map(_is_plain, branches)) and sum(map(_may_hold_text, branches)) <= 1
    if not isinstance(kind, str):
        return False
    if "pattern" in keys:
        return keys == {"type", "pattern"} and kind == "string" and _is_narrow(str(schema["pattern"]))
    if not keys <= _KEYS.get(kind, frozenset()):
        return False
    if kind == "object":
        properties = schema.get("properties", {})
        return schema.get("additionalProperties") is False and all(map(_is_plain, properties.values()))
    return kind != "array" or _is_plain(schema.get("items"))


def _may_hold_text(schema: dict[str, Any]) -> bool:
    if "enum" in schema or "const" in schema:
        return '"' in json.dumps(schema.get("enum", schema.get("const")))
    return schema.get("type") not in ("integer", "number", "boolean", "null")


def _is_narrow(pattern: str) -> bool:
    """Whether it matches nothing with a character beyond ASCII."""
    if not _NARROW.fullmatch(pattern):
        return False
    depth = 0
    for character in re.sub(r"\[[^\]]*\]", "", pattern):
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return False
    return True
