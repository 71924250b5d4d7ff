"""Forms of answers in the OpenAPI document. Whether one can be compiled no schema can say."""

from __future__ import annotations

from typing import Any

NULL: dict[str, Any] = {"type": "null"}
SCHEMA = {"type": "object", "description": "A JSON schema. Keywords that are not supported are refused."}
TEXT_OF_FORM: dict[str, Any] = {"type": "string", "minLength": 1}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"anyOf": [SCHEMA, {**TEXT_OF_FORM, "description": "The same as text."}]},
    "regex": {**TEXT_OF_FORM, "description": "In the syntax of Rust."},
    "choice": {"type": "array", "minItems": 1, "items": TEXT_OF_FORM},
    "grammar": {**TEXT_OF_FORM, "description": "Lark or GBNF."},
    "json_object": {"const": True},
}
ABSENT = {name: NULL if name != "json_object" else {"enum": [False, None]} for name in FORMS}
WHITESPACE = {
    "disable_any_whitespace": {"type": ["boolean", "null"]},
    "whitespace_pattern": {"anyOf": [TEXT_OF_FORM, NULL]},
}


def _form(name: str) -> dict[str, Any]:
    """One form, and none of the others."""
    fields = {**ABSENT, **WHITESPACE, name: FORMS[name]}
    return {"type": "object", "required": [name], "properties": fields, "additionalProperties": False}


STRUCTURED = {"anyOf": [*map(_form, FORMS), NULL]}


def _format(kind: str, **further: Any) -> dict[str, Any]:
    return {"type": "object", "required": ["type", *further], "properties": {"type": {"const": kind}, **further}}


TEXT = {"anyOf": [_format("text"), NULL]}
STRICT = {"type": ["boolean", "null"]}
DESCRIBED = {"type": "object", "properties": {"schema": {"anyOf": [SCHEMA, NULL]}, "strict": STRICT}}
FORMATS = {"anyOf": [*TEXT["anyOf"], _format("json_object"), _format("json_schema", json_schema=DESCRIBED)]}


def bound_forms(request: dict[str, Any]) -> None:
    """Complete the schema of a request in place."""
    fields = request["properties"]
    fields["structured_outputs"] = STRUCTURED
    if "response_format" in fields:
        fields["response_format"] = FORMATS
        one = [{"properties": {"structured_outputs": NULL}}, {"properties": {"response_format": TEXT}}]
        request.setdefault("allOf", []).append({"anyOf": one})


def tool_choices(*, has_tools: bool) -> dict[str, Any]:
    """has_tools: whether requests may give tools. One of them has to be there to be required."""
    choices: dict[str, Any] = {"enum": ["auto", "none", None]}
    if not has_tools:
        return choices
    named = {"type": "object", "required": ["type"], "properties": {"type": {"const": "function"}}}
    return {"anyOf": [choices, {"const": "required"}, named]}
