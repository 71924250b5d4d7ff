"""Kinds of values of sampling parameters: what they take, keep and say of themselves in JSON."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from compiled_engine.sampling.value_checks import (
    ARGUMENTS,
    FLAG,
    SOME_TOKEN_IDS,
    TEXT,
    TEXT_OR_TEXTS,
    TOKEN_BIASES,
    TOKEN_ID,
    TOKEN_IDS,
    having,
    integer,
    json_value,
    list_of,
    number,
    optional,
    tuple_of,
)

LARGEST = 3.4028234663852886e38  # in float32
TOKEN_ID_SCHEMA = {"type": "integer", "minimum": 0}


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (FLAG, {"type": "boolean"}),
        (TEXT, {"type": "string", "minLength": 1}),
        (integer(2), {"type": "integer", "minimum": 2}),
        (integer(2, 9), {"type": "integer", "minimum": 2, "maximum": 9}),
        (integer(0, or_minus_one=True), {"type": "integer", "minimum": -1}),
        (integer(1, or_flag=True), {"type": "integer", "minimum": 1}),
        (number(0, 2), {"type": "number", "minimum": 0, "maximum": 2}),
        (number(0, 1, above_low=True), {"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        (optional(integer(3)), {"type": "integer", "minimum": 3}),
        (TOKEN_IDS, {"type": "array", "items": TOKEN_ID_SCHEMA}),
        (SOME_TOKEN_IDS, {"type": "array", "items": TOKEN_ID_SCHEMA, "minItems": 1}),
        (list_of(FLAG), {"type": "array", "items": {"type": "boolean"}}),
        (tuple_of(FLAG), {"type": "array", "items": {"type": "boolean"}}),
        (tuple_of(FLAG, may_be_empty=False), {"type": "array", "items": {"type": "boolean"}, "minItems": 1}),
        (
            TEXT_OR_TEXTS,
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "minLength": 1}}]},
        ),
        (having("allowed"), {}),
        (TOKEN_BIASES, {"type": "object"}),
        (ARGUMENTS, {"type": "object"}),
    ],
)
def test_the_schema_of_a_kind(kind: Any, schema: dict[str, Any]) -> None:
    assert kind.schema == schema


@pytest.mark.parametrize(
    ("kind", "given", "kept"),
    [
        (integer(0, or_flag=True), True, 1),
        (integer(0, or_flag=True), False, 0),
        (integer(0, or_flag=True), np.int8(3), 3),
        (integer(3, or_minus_one=True), -1, -1),
        (TOKEN_IDS, (0,), [0]),
        (TOKEN_IDS, [np.int64(0), 7], [0, 7]),
        (SOME_TOKEN_IDS, [0], [0]),
        (TOKEN_BIASES, {0: LARGEST, "12": -LARGEST}, {0: LARGEST, 12: -LARGEST}),
        (TOKEN_BIASES, None, None),
        (tuple_of(TOKEN_ID), None, ()),
        (list_of(TOKEN_ID), None, []),
    ],
)
def test_what_is_kept(kind: Any, given: Any, kept: Any) -> None:
    found = kind.check("it", given)
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize("bias", [3.5e38, -3.5e38, 1e39])
def test_biases_are_float32(bias: float) -> None:
    with pytest.raises(ValueError, match=r"it\[1\] must be a finite number"):
        TOKEN_BIASES.check("it", {1: bias})


def test_an_object_with_a_method_is_kept_as_it_is() -> None:
    class Mask:
        allowed: Callable[..., None] = print

    mask = Mask()
    assert having("allowed").check("it", mask) is mask
    for wrong in (Mask, object(), None):
        with pytest.raises(TypeError, match="it must be an object with a method 'allowed'"):
            having("allowed").check("it", wrong)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        (True, True),
        ("a", "a"),
        (1.5, 1.5),
        (2**64 - 1, 2**64 - 1),
        (-(2**63), -(2**63)),
        (2**64, 2.0**64),
        (-(2**63) - 1, -(2.0**63)),
        ((1, [2, (3,)]), [1, [2, [3]]]),
        (MappingProxyType({"a": MappingProxyType({"b": (1,)})}), {"a": {"b": [1]}}),
    ],
    ids=str,
)
def test_json_values(given: Any, kept: Any) -> None:
    found = json_value("it", given)
    assert found == kept
    assert type(found) is type(kept)
    assert ARGUMENTS.check("it", {"x": given}) == {"x": kept}


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (10**400, ValueError, "it must be within the range of a float, got a larger integer"),
        (object(), TypeError, "it must be a JSON value"),
        ({1, 2}, TypeError, "it must be a JSON value"),
        ([1, {"a": b"b"}], TypeError, r"it\[1\]\['a'\] must be a JSON value"),
        ({"a": {1: 2}}, TypeError, r"it\['a'\] key must be a string, got 1"),
        ({"": 2}, ValueError, "it key must not be empty"),
    ],
)
def test_what_is_no_json_value(given: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        json_value("it", given)
