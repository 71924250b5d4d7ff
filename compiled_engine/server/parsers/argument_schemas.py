"""Convert arguments that a model writes as text to JSON, by the types that the tool's schema allows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

STRING = frozenset({"string"})
CONTAINERS = frozenset({"object", "array"})
ANY_TYPE = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
NULLS = ("null", "None")
BRANCHES = ("allOf", "anyOf", "oneOf")


class ArgumentSchemas:
    """Finds the schemas of a tool's arguments in the tool's schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.root = schema
        # The schemas of each argument; several if branches of the schema define it more than once.
        self.properties: dict[str, list[Any]] = {}
        for part in _parts(schema, schema, BRANCHES):
            for name, given in _mapping(part.get("properties")).items():
                self.properties.setdefault(name, []).append(given)
        always = list(_parts(schema, schema, ("allOf",)))
        required = [part.get("required") for part in always]
        self.required = {name for names in required if isinstance(names, list) for name in names if type(name) is str}
        # No other arguments are allowed.
        self.closed = any(part.get("additionalProperties") is False for part in always)

    def of(self, name: str) -> list[Any]:
        """Return the schemas of the argument `name`. A value of the argument must satisfy at least one of them."""
        return self.properties.get(name) or [_mapping(self.root.get("additionalProperties"))]

    def types(self, name: str) -> frozenset[str]:
        """Return the JSON types that the argument `name` may have. "number" includes "integer".

        If the argument's schema states no type, all types are returned.
        """
        known: dict[str, frozenset[str]] = {}
        try:
            return frozenset[str]().union(*(_types(each, self.root, known) for each in self.of(name))) or ANY_TYPE
        except RecursionError:  # thousands of nested references or branches
            return ANY_TYPE

    def branches(self, name: str) -> list[Mapping[str, Any]]:
        """Return alternative schemas of the argument `name`. A value must satisfy at least one of them.

        References and branches are resolved, so that each schema has at most one type. Schemas with const or enum, or
        with an allOf of several schemas, are kept as they are.
        """
        found: list[Mapping[str, Any]] = []
        seen: set[str] = set()
        waiting = list(reversed(self.of(name)))
        while waiting:
            schema = _mapping(waiting.pop())
            reference, kinds = schema.get("$ref"), schema.get("type")
            below = next((schema[key] for key in BRANCHES if isinstance(schema.get(key), list)), None)
            if "const" in schema or isinstance(schema.get("enum"), list):
                found.append(schema)
            elif isinstance(reference, str):
                if reference not in seen:
                    seen.add(reference)
                    waiting.append(referred(self.root, reference))
            elif below and ("allOf" not in schema or len(below) == 1):
                waiting += reversed(below)
            elif isinstance(kinds, list):
                waiting += [{**schema, "type": kind} for kind in reversed(kinds) if isinstance(kind, str)]
            else:
                found.append(schema)
        return found


def json_of(text: str, types: frozenset[str]) -> str:
    """Return an argument's text as JSON of one of the JSON types `types`.

    The type "string" is tried last. Text that fits no type becomes a JSON string.
    """
    if "string" not in types:
        text = text.strip()
    if text in NULLS and ("null" in types or "string" not in types):
        return "null"
    seen = text.strip()
    if "boolean" in types and seen.lower() in ("true", "false"):
        return seen.lower()
    if types & {"integer", "number"} and _is_number(seen, whole="number" not in types):
        return seen
    if types & CONTAINERS and (written := _container(seen, types)) is not None:
        return written
    return json.dumps(text, ensure_ascii=False)


def may_be_null(text: str) -> bool:
    """Return whether the text is "null" or "None", or the beginning of one of them."""
    return any(null.startswith(text) for null in NULLS)


def referred(root: Mapping[str, Any], reference: str) -> Any:
    """Return the schema in the document `root` that a reference such as #/$defs/name points to; {} if none."""
    found: Any = root
    path = reference.removeprefix("#")
    for name in path.split("/")[1:] if path != reference else [""]:
        key = name.replace("~1", "/").replace("~0", "~")
        found = _mapping(found).get(key)
    return {} if found is None else found


def _is_number(text: str, *, whole: bool) -> bool:
    value = _loaded(text)
    if isinstance(value, float):
        return math.isfinite(value) and (value.is_integer() or not whole)
    return isinstance(value, int) and not isinstance(value, bool)


def _container(text: str, types: frozenset[str]) -> str | None:
    """Return the text if it is a JSON object or array of an allowed type, otherwise None."""
    kinds = {"{": "object", "[": "array"}
    return text if kinds.get(text[:1]) in types and _loaded(text) is not None else None


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(text: str) -> Any:
    """Reject NaN and infinities, which are not JSON."""
    raise ValueError(text)


def _parts(schema: Any, root: Mapping[str, Any], branches: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, and recursively the schemas that it references or lists under the keys `branches`.

    References point into the document `root`. Each is followed once.
    """
    seen: set[str] = set()
    waiting = [schema]
    while waiting:
        part = _mapping(waiting.pop())
        yield part
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            waiting.append(referred(root, reference))
        for key in reversed(branches):
            if isinstance(part.get(key), list):
                waiting += reversed(part[key])


def _types(schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[str]]) -> frozenset[str]:
    """Return the JSON types that a schema allows. Its references point into the document `root`.

    `known` caches the types by reference, and is extended here.
    """
    schema, found = _mapping(schema), ANY_TYPE
    given = schema.get("type")
    names = {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
    if names & ANY_TYPE:
        found &= names | ({"integer"} if "number" in names else set())
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found &= {_type_of(value) for value in values}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = ANY_TYPE  # the result for a reference to itself
            known[reference] = _types(referred(root, reference), root, known)
        found &= known[reference]
    for key in BRANCHES:
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            each = [_types(branch, root, known) for branch in branches]
            found &= frozenset.intersection(*each) if key == "allOf" else frozenset.union(*each)
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def _mapping(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else {}
