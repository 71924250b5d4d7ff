"""Random JSON schemas whose texts are bounded, and whether a value is one of a schema's."""

from __future__ import annotations

import json
import random
import re
from typing import Any


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return the schema of a random object of this depth, whose strings, arrays and numbers are bounded."""
    names = rng.sample(["name", "id", "tags", "a b", "größe", "x-1", "_", "nested"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice([*kinds, *(["object", "array", "anyOf"] if depth > 0 else [])])
    match kind:
        case "string":
            low = rng.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}
        case "integer":
            low = rng.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 10**6)}
        case "enum":
            return {"enum": rng.sample(["red", "grün", 'a "quote"', 1, 2.5, None, True, [1, 2], {"k": "v"}], 3)}
        case "const":
            return {"const": rng.choice(["only", 7, False])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice([r"^[A-Z]{2}-[0-9]{3}$", r"^(ab|cd){1,3}$"])}
        case "object":
            return random_schema(rng, depth)
        case "array":
            low = rng.randint(0, 2)
            return {"type": "array", "items": _value(rng, depth - 1), "minItems": low, "maxItems": low + 2}
        case "anyOf":
            return {"anyOf": [_value(rng, 0), _value(rng, depth - 1)]}
        case _:
            return {"type": kind}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value satisfies a schema, for the keywords that random_schema uses.

    It is an oracle independent of the library that makes masks.
    """
    if "anyOf" in schema:
        return any(is_valid(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(_equal(value, each) for each in schema["enum"])
    if "const" in schema:
        return _equal(value, schema["const"])
    match schema["type"]:
        case "object":
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and value.keys() <= known.keys()
                and all(name in value for name in schema["required"])
                and all(is_valid(item, known[name]) for name, item in value.items())
            )
        case "array":
            return (
                isinstance(value, list)
                and schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
                and all(is_valid(item, schema["items"]) for item in value)
            )
        case "string":
            if not isinstance(value, str):
                return False
            within = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
            return within and bool(re.search(schema.get("pattern", ""), value))
        case "integer":
            whole = isinstance(value, int) and not isinstance(value, bool)
            return whole and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case _:
            return value is None


def _equal(left: Any, right: Any) -> bool:
    """Return whether JSON values are equal; 1 does not equal True."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
