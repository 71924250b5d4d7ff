"""Kinds (see schema.Kind) of the values of sampling parameters: a check and a JSON schema each.

A check returns the value, with numbers and containers as built-in types. It raises TypeError or ValueError, naming the
parameter, for a value that is not allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from compiled_engine.schema import JsonSchema, Kind

FLOAT32_MAX = 3.4028234663852886e38
# Bounds for parameters stored as float32: values and their reciprocals stay normal numbers, neither zero nor infinite.
SMALLEST_SCALE, LARGEST_SCALE = 1e-37, 1e37


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    if not value:
        raise ValueError(f"{name} must not be empty, got {value!r}")
    return value


def integer(low: int, high: int | None = None, *, or_minus_one: bool = False, or_flag: bool = False) -> Kind:
    """Return a Kind for integers in [low, high], numpy's included. high None: no upper bound.

    With `or_minus_one`, -1 is allowed too; with `or_flag`, bools are allowed too.
    """
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if or_minus_one:
        allowed += ", or -1"

    def check(name: str, value: Any) -> int:
        if type(value) is not int and (not isinstance(value, Integral) or (isinstance(value, bool) and not or_flag)):
            raise TypeError(f"{name} must be {allowed}, got {value!r}")
        plain = int(value)
        inside = plain >= low and (high is None or plain <= high)
        if not inside and not (or_minus_one and plain == -1):
            raise ValueError(f"{name} must be {allowed}, got {value!r}")
        return plain

    bounds = {"minimum": -1 if or_minus_one else low} | ({} if high is None else {"maximum": high})
    return Kind(check, {"type": "integer", **bounds})


def number(low: float, high: float, *, above_low: bool = False) -> Kind:
    """Return a Kind for finite numbers in [low, high]; with `above_low`, in (low, high]."""
    allowed = f"a finite number {'>' if above_low else '>='} {low:g} and <= {high:g}"

    def check(name: str, value: Any) -> float:
        if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
            raise TypeError(f"{name} must be {allowed}, got {value!r}")
        try:
            plain = float(value)
        except OverflowError:
            plain = math.inf
        if not low <= plain <= high or (above_low and plain == low):
            raise ValueError(f"{name} must be {allowed}, got {value!r}")
        return plain

    return Kind(check, {"type": "number", "exclusiveMinimum" if above_low else "minimum": low, "maximum": high})


def optional(kind: Kind) -> Kind:
    """Return a Kind whose check allows None besides the values of `kind`; the JSON schema is that of `kind`."""

    def check_unless_none(name: str, value: Any) -> Any:
        return None if value is None else kind.check(name, value)

    return Kind(check_unless_none, kind.schema)


def tuple_of(kind: Kind, *, may_be_empty: bool = True) -> Kind:
    """Return a Kind for lists and tuples whose items `kind` allows. Its check returns a tuple; empty for None."""

    def check_items(name: str, value: Any) -> tuple[Any, ...]:
        items = _items(name, value)
        if not items and not may_be_empty:
            raise ValueError(f"{name} must not be empty, got {value!r}")
        return tuple(kind.check(f"{name}[{index}]", item) for index, item in enumerate(items))

    return Kind(check_items, _array(kind, may_be_empty=may_be_empty))


def list_of(kind: Kind) -> Kind:
    """Return a Kind for lists and tuples whose items `kind` allows. Its check returns a new list; empty for None."""

    def check_items(name: str, value: Any) -> list[Any]:
        return [kind.check(f"{name}[{index}]", item) for index, item in enumerate(_items(name, value))]

    return Kind(check_items, _array(kind))


def _array(kind: Kind, *, may_be_empty: bool = True) -> JsonSchema:
    return {"type": "array", "items": kind.schema} | ({} if may_be_empty else {"minItems": 1})


def _token_ids(name: str, value: Any) -> list[int]:
    items = _items(name, value)
    if (
        set(map(type, items)) <= {int} and min(items, default=0) >= 0
    ):  # fast, as a list may be as long as the vocabulary
        return list(items)
    checked: list[int] = list_of(TOKEN_ID).check(name, items)
    return checked


def _some_token_ids(name: str, value: Any) -> list[int]:
    checked = _token_ids(name, value)
    if not checked:
        raise ValueError(f"{name} must have at least one token id, got {value!r}")
    return checked


def _items(name: str, value: Any) -> list[Any] | tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name} must be a list or a tuple, got {value!r}")
    return value


def _arguments(name: str, value: Any) -> dict[str, Any] | None:
    """Return a copy of `value`, a mapping of names to JSON values or None. Raises TypeError or ValueError otherwise."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict of names to values, got {value!r}")
    return {_text(f"{name} key", key): json_value(f"{name}[{key!r}]", item) for key, item in value.items()}


def json_value(name: str, value: Any) -> Any:
    """Return a copy of a JSON value. An integer of more than 64 bits becomes a float, as in most languages' JSON.

    name: the value's name in errors. Raises TypeError for other values, and ValueError for an integer that is too large
    for a float and for an empty key.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"{name} must be within the range of a float, got a larger integer") from error
    if value is None or isinstance(value, str | int | float):  # a bool is an int
        return value
    if isinstance(value, list | tuple):
        return [json_value(f"{name}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_text(f"{name} key", key): json_value(f"{name}[{key!r}]", item) for key, item in value.items()}
    raise TypeError(f"{name} must be a JSON value (string, number, bool, None, list or dict), got {value!r}")


def having(method: str) -> Kind:
    """Return a Kind for objects that have a method with the name `method`. Its JSON schema is empty."""

    def check(name: str, value: Any) -> Any:
        if isinstance(value, type) or not callable(getattr(value, method, None)):
            raise TypeError(f"{name} must be an object with a method {method!r}, got {value!r}")
        return value

    return Kind(check, {})


def _text_or_texts(name: str, value: Any) -> list[str]:
    checked: list[str] = list_of(TEXT).check(name, [value] if isinstance(value, str) else value)
    return checked


def _seed(name: str, value: Any) -> int | None:
    checked: int | None = optional(integer(-(2**63), 2**64 - 1)).check(name, value)
    return None if checked == -1 else checked


def _token_biases(name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be a dict of token id to bias, got {value!r}")
    bias = number(-FLOAT32_MAX, FLOAT32_MAX)
    return {
        TOKEN_ID.check(f"{name} key", int(key) if isinstance(key, str) and key.isdecimal() else key): bias.check(
            f"{name}[{key!r}]", item
        )
        for key, item in value.items()
    } or None


FLAG = Kind(_flag, {"type": "boolean"})
TEXT = Kind(_text, {"type": "string", "minLength": 1})
TEXT_OR_TEXTS = Kind(_text_or_texts, {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT.schema}]})
TOKEN_ID = integer(0)
# Lists or tuples of non-negative integers, copied to lists. None is an empty list; SOME_TOKEN_IDS must not be empty.
TOKEN_IDS = Kind(_token_ids, _array(TOKEN_ID))
SOME_TOKEN_IDS = Kind(_some_token_ids, _array(TOKEN_ID, may_be_empty=False))
# A 64-bit seed, signed or not; None, or its synonym -1, for no seed.
SEED = Kind(_seed, {"type": "integer"})
# A dict of token ids (integers, or their decimal digits) to finite numbers; an empty dict becomes None.
TOKEN_BIASES = Kind(_token_biases, {"type": "object"})
ARGUMENTS = Kind(_arguments, {"type": "object"})
