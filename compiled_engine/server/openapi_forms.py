"""Forms of answers in the OpenAPI document: such as any server takes, of which there are more."""

from __future__ import annotations

from typing import Any

NULL: dict[str, Any] = {"type": "null"}
SCHEMA = {
    "type": "object",
    "description": "A JSON schema. Keywords that are not supported are refused.",
    "properties": {"type": {"enum": ["object", "array", "string", "integer", "number", "boolean", "null"]}},
    "required": ["type"],
    "additionalProperties": False,
}
FORMS = {
    "json": SCHEMA,
    "regex": {"type": "string", "description": "In the syntax of Rust.", "pattern": "^[a-z]{1,9}$"},
    "choice": {
        "type": "array",
        "minItems": 1,
        "maxItems": 64,
        "items": {"type": "string", "pattern": "^[a-z ]{1,9}$"},
    },
    "grammar": {"type": "string", "description": "Lark or GBNF.", "pattern": '^start: "[a-z]{1,9}"$'},
    "json_object": {"const": True},
}
STRUCTURED = {
    "anyOf": [
        *(
            {"type": "object", "required": [name], "properties": {name: form}, "additionalProperties": False}
            for name, form in FORMS.items()
        ),
        NULL,
    ]
}


def _format(kind: str, **further: Any) -> dict[str, Any]:
    return {"type": "object", "required": ["type", *further], "properties": {"type": {"const": kind}, **further}}


TEXT = {"anyOf": [_format("text"), NULL]}
DESCRIBED = {
    "type": "object",
    "required": ["schema"],
    "properties": {"name": {"type": "string"}, "schema": SCHEMA, "strict": {"type": ["boolean", "null"]}},
}
FORMATS = {"anyOf": [*TEXT["anyOf"], _format("json_object"), _format("json_schema", json_schema=DESCRIBED)]}
# Fields that may leave a form no token to go on with, or that go on where it ends.
NOT_BESIDE_FORMS = ("allowed_token_ids", "min_tokens", "bad_words", "bad_words_token_ids", "ignore_eos")


def bound_forms(request: dict[str, Any]) -> None:
    """Complete the schema of a request in place."""
    fields = request["properties"]
    fields["structured_outputs"] = STRUCTURED
    no_form: dict[str, Any] = {"structured_outputs": NULL}
    if "response_format" in fields:
        fields["response_format"] = FORMATS
        no_form["response_format"] = TEXT
    nothing_more = {"properties": dict.fromkeys(NOT_BESIDE_FORMS, NULL)}
    conditions = [{"anyOf": [{"properties": no_form}, nothing_more]}]
    conditions += [{"anyOf": [{"properties": {name: value}} for name, value in no_form.items()]}]
    request.setdefault("allOf", []).extend(conditions)


def tool_choices(*, has_tools: bool) -> dict[str, Any]:
    """has_tools: whether requests may give tools. One of them has to be there to be required."""
    choices: dict[str, Any] = {"enum": ["auto", "none", None]}
    if not has_tools:
        return choices
    named = {"type": "object", "required": ["type"], "properties": {"type": {"const": "function"}}}
    return {"anyOf": [choices, {"const": "required"}, named]}
