"""Declare the fields of options and parameters, each in one place.

A declared field of a dataclass has a default, a kind of values and a meaning. From these follow: checks of values,
command-line options with help texts, keys of YAML files, environment variables, fields of server requests, and tables
in the documents. Errors for unknown names suggest the nearest known name.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Check = Callable[[str, Any], Any]
"""Takes a field's name and a value, and returns the value to store. Raises TypeError or ValueError with the name, the
value and what is allowed."""

JsonSchema = Mapping[str, Any]

Default = TypeVar("Default")
# Misspelt names, or names with a missing or exchanged word, are above this; names that only share letters are below.
SIMILARITY = 0.75
# A name this many times longer than a known one can never be similar enough.
TOO_LONG = 2 / SIMILARITY - 1


class Kind(NamedTuple):
    """A kind of values that a field may have: a check, and a JSON schema that expresses the check."""

    check: Check
    schema: JsonSchema  # JSON schema; empty for Python objects that JSON cannot express


class Declaration(NamedTuple):
    """A field of a dataclass as declared with `declare`."""

    name: str
    default: Any
    kind: Kind
    # Meaning in Markdown, for command-line help and documents. Begins with a lower-case letter or a value in backticks,
    # without a full stop at the end.
    text: str
    more: str  # further text in the documents, after a number's bounds
    default_is: str  # meaning of a default such as None or "auto"
    flag: str | None  # command-line option, if not derived from the name; None: no option

    @property
    def schema(self) -> JsonSchema:
        """JSON schema of the values. For fields that take either a list or a single value, it is the list's schema."""
        forms = (self.kind.schema, *self.kind.schema.get("anyOf", ()))
        return next((form for form in forms if form.get("type") == "array"), self.kind.schema)

    @property
    def several(self) -> bool:
        """Whether the field's value is a list."""
        return self.schema.get("type") == "array"


def declare(
    default: Default, kind: Kind, text: str, more: str = "", *, default_is: str = "", flag: str | None = ""
) -> Default:
    """Declare a field of a dataclass, see `Declaration`. Type checkers see only the default."""
    metadata = {"kind": kind, "text": text, "more": more, "default_is": default_is, "flag": flag}
    declared: Default = field(default=default, metadata=metadata)
    return declared


def declarations(options: type[Any]) -> tuple[Declaration, ...]:
    """Return the declared fields of a dataclass, in order."""
    return tuple(Declaration(each.name, each.default, **each.metadata) for each in fields(options) if each.metadata)


def check_all(options: Any) -> None:
    """Check the declared fields of a dataclass. None is allowed if it is the default. Raises the errors of `Check`."""
    for each in declarations(type(options)):
        value = getattr(options, each.name)
        if value is not None or each.default is not None:
            each.kind.check(each.name, value)


def require_defaults(options: Any, because: str, *names: str, allowed: str = "") -> None:
    """Raise ValueError if one of the fields `names` differs from its default.

    Such a value has no meaning, or is not supported, together with other options. `because` is the reason, which the
    message states after "but". `allowed` is what is allowed besides the default.
    """
    defaults = {each.name: each.default for each in declarations(type(options))}
    for name in names:
        value, default = getattr(options, name), defaults[name]
        if value != default:
            value = str(value) if isinstance(value, Path) else value
            alternatives = ", ".join(filter(None, (default if isinstance(default, str) else repr(default), allowed)))
            raise ValueError(f"{name} is {value!r}, but {because}; allowed: {alternatives}")


def documented(options: type[Any]) -> str:
    """Return the docstring of a dataclass, followed by a line for each declared field."""
    lines = (f"    {each.name}: {plain(described(each))}." for each in declarations(options))
    return "\n".join([(options.__doc__ or "").rstrip(), "", *lines, "    "])


def described(declaration: Declaration) -> str:
    """Return a field's whole meaning in Markdown: its text, default, bounds and further text."""
    named = declaration.default if declaration.default != () else "by default"
    default = f"{named}: {declaration.default_is}" if declaration.default_is else ""
    return "; ".join(filter(None, (declaration.text, default, bounds(declaration.kind.schema), declaration.more)))


def bounds(schema: JsonSchema) -> str:
    """Return the bounds of a number's schema in words; empty if it has no maximum, and for seeds of 64 bits."""
    most = schema.get("maximum")
    if most is None or most == 2**64 - 1:  # every seed
        return ""
    least = (
        f"above {schema['exclusiveMinimum']}, at most" if "exclusiveMinimum" in schema else f"{schema['minimum']} to"
    )
    return f"{least} {most if isinstance(most, float) else format(most, ',')}"


def plain(markdown: str) -> str:
    """Return Markdown text with each link replaced by its text, and without backticks."""
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", markdown).replace("`", "")


def require(allowed: str, has_type: Callable[[Any], bool], holds: Callable[[Any], bool] = lambda value: True) -> Check:
    """Return a check that returns a valid value unchanged.

    It raises TypeError unless has_type(value), and ValueError unless holds(value). `allowed` describes the valid values
    in errors.
    """

    def check(name: str, value: Any) -> Any:
        if not has_type(value):
            raise TypeError(f"{name} is {value!r}; allowed: {allowed}")
        if not holds(value):
            raise ValueError(f"{name} is {value!r}; allowed: {allowed}")
        return value

    return check


def read_mapping(name: str, value: Any, allowed: str = "a dict") -> Mapping[str, Any]:
    """Return `value`, a mapping or the JSON text of one, as a mapping; an empty mapping for None.

    `name` and `allowed` are for errors: the option's name and what it must be. Raises TypeError or ValueError for other
    values.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{name} is {value!r}; allowed: {allowed} as JSON ({error})") from error
    if not isinstance(value, Mapping | None):
        raise TypeError(f"{name} is {value!r}; allowed: {allowed}, or one as JSON")
    return value or {}


def require_json(name: str, value: Any) -> None:
    """Raise TypeError, which begins with `name`, unless `value` is a mapping that is an object in JSON."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, got {value!r}")
    if not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must have strings as keys, got {value!r}")
    try:
        json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must have values of JSON: {error}") from error


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(least: int = 1, most: int | None = None) -> Kind:
    allowed = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    bounds = {"minimum": least} | ({} if most is None else {"maximum": most})
    check = require(allowed, is_integer, lambda value: value >= least and (most is None or value <= most))
    return Kind(check, {"type": "integer", **bounds})


def number(allowed: str, holds: Callable[[float], bool]) -> Kind:
    """Return a Kind for finite numbers for which `holds` is True.

    `allowed` has the bounds in words, such as "above 0", for errors.
    """

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    has_type = require(f"a number {allowed}", is_number)
    is_inside = require(allowed, is_number, lambda value: math.isfinite(value) and holds(value))
    return Kind(lambda name, value: is_inside(name, has_type(name, value)), {"type": "number"})


def one_of(*names: str) -> Kind:
    check = require(", ".join(names), lambda value: True, lambda value: value in names)
    return Kind(check, {"enum": names})


def text(allowed: str = "text", *, may_be_empty: bool = False) -> Kind:
    check = require(allowed, lambda value: isinstance(value, str), lambda value: may_be_empty or value != "")
    return Kind(check, {"type": "string"})


def path(allowed: str = "the path of a folder", format: str = "path") -> Kind:
    """Return a Kind for paths, as text or Path. `allowed` describes the paths in errors.

    `format` is the format in the JSON schema: "path", or another one for text that need not be a path.
    """
    check = require(allowed, lambda value: isinstance(value, str | Path), lambda value: value != "")
    return Kind(check, {"type": "string", "format": format})


def a_list(
    item: JsonSchema, allowed: str = "", holds: Callable[[Any], bool] = lambda entry: True, *, secret: bool = False
) -> Kind:
    """Return a Kind for tuples whose entries all make `holds` True. `allowed` describes such entries in errors.

    `item` is the JSON schema of an entry. With `secret`, errors do not show entries.
    """
    is_tuple = require("a list", lambda value: isinstance(value, tuple))

    def check(name: str, value: Any) -> Any:
        for entry in is_tuple(name, value):
            if not holds(entry):
                shown = "an entry that is not allowed" if secret else repr(entry)
                raise ValueError(f"{name} has {shown}; allowed: {allowed}")
        return value

    return Kind(check, {"type": "array", "items": item})


def sizes() -> Kind:
    """Return a Kind for tuples of integers that are each at least 1."""
    at_least_1 = {"type": "integer", "minimum": 1}
    return a_list(at_least_1, "integers of at least 1", lambda size: is_integer(size) and size >= 1)


def switch(allowed: str = "True or False") -> Kind:
    return Kind(require(allowed, lambda value: isinstance(value, bool)), {"type": "boolean"})


SWITCH = switch()
TEXTS = a_list({"type": "string"})


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name spelt most like `name`, or None if none is similar enough.

    A name with the same letters in another order is preferred.
    """
    name = name.lower()
    by_lower_case = {other.lower(): other for other in known}
    if len(name) > TOO_LONG * max(map(len, by_lower_case), default=0):
        return None
    exchanged = [other for other in by_lower_case if sorted(other) == sorted(name)]
    found = exchanged or difflib.get_close_matches(name, by_lower_case, n=1, cutoff=SIMILARITY)
    return by_lower_case[found[0]] if found else None


def unknown_name_message(what: str, name: str, known: Iterable[str]) -> str:
    """Return an error message such as "SamplingParams has no field 'temprature'; did you mean 'temperature'?".

    `what` is the text before the name.
    """
    near = nearest(name, known)
    return f"{what} {name!r}" + (f"; did you mean {near!r}?" if near is not None else "")
