"""`response_format`, and `structured_outputs`: the form that a request asks its answer to have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from compiled_engine.grammars.text import grammar_text
from compiled_engine.sampling.structured_outputs import StructuredOutputs
from compiled_engine.server.errors import bad_request, shortened, shown
from compiled_engine.server.long_work import LongWork

TYPES = ("text", "json_object", "json_schema")


async def asked_form(
    checks: LongWork,
    response_format: dict[str, Any] | None,
    given: dict[str, Any] | None,
    name: str = "response_format",
) -> StructuredOutputs | None:
    """What one of the two fields asks for; None for any text. name: what the first is called.

    Raises ApiError 400 for both at once, and for what is no form or cannot be compiled.
    """
    values = _of_format(response_format, name)
    if given is None:
        return None if values is None else await _checked(checks, name, values)
    if values is not None:
        raise bad_request("structured_outputs", f"structured_outputs must be absent where {name} is not of type 'text'")
    return await _checked(checks, "structured_outputs", given)


def _of_format(response_format: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """As fields of StructuredOutputs. The Responses API has the schema beside the type, the others below it."""
    kind = "text" if response_format is None else response_format.get("type")
    if kind not in TYPES:
        raise bad_request(name, f"{name}.type must be one of {', '.join(map(repr, TYPES))}, got {shown(kind)}")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described = response_format if "schema" in response_format else response_format.get("json_schema")
    if not isinstance(described, dict):
        raise bad_request(name, f"{name}.json_schema must be an object with a schema, got {shown(described)}")
    strict, schema = described.get("strict"), described.get("schema")
    if not isinstance(strict, bool | None):
        raise bad_request(name, f"{name}.json_schema.strict must be a boolean, got {shown(strict)}")
    if schema is None:
        return {"json_object": True}
    if not isinstance(schema, dict):
        raise bad_request(name, f"{name}.json_schema.schema must be a JSON schema, an object, got {shown(schema)}")
    return {"json": schema}


async def _checked(checks: LongWork, name: str, values: Mapping[str, Any]) -> StructuredOutputs:
    def check() -> StructuredOutputs:
        form = StructuredOutputs.of("structured_outputs", values)
        assert form is not None
        grammar_text(form)
        return form

    try:
        return await checks.run(name, len(msgspec.json.encode(values)), check)
    except (TypeError, ValueError) as error:
        text = str(error).removeprefix("structured_outputs: ").replace("structured_outputs", name)
        raise bad_request(name, shortened(f"{name}: {text}")) from error
