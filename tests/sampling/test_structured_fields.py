"""Fields of StructuredOutputs: one kind of form, and bounds that hold before anything is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compiled_engine.sampling.structured_outputs import MAX_BYTES, MAX_DEPTH, StructuredOutputs

ONE_OF_EACH: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": "a+",
    "choice": ["a", "b"],
    "grammar": "start: A",
    "json_object": True,
}


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_exactly_one_kind_is_given(kind: str) -> None:
    given = {kind: ONE_OF_EACH[kind]}
    made = StructuredOutputs(**given)
    assert StructuredOutputs.of("form", given) == made == StructuredOutputs.of("form", made)
    assert StructuredOutputs.of("form", given | {"whitespace_pattern": None}) == made
    assert (made.disable_any_whitespace, made.disable_additional_properties) == (False, False)
    for other in ONE_OF_EACH.keys() - {kind}:
        with pytest.raises(ValueError, match=r"must have exactly one of .*, got .*, "):
            StructuredOutputs(**given, **{other: ONE_OF_EACH[other]})
    assert StructuredOutputs(**{"json_object": False} | given) is not None
    assert StructuredOutputs.of("form", None) is None
    with pytest.raises(
        ValueError, match="must have exactly one of json, regex, choice, grammar, json_object, got none"
    ):
        StructuredOutputs(json_object=False)


def test_a_schema_is_kept_as_text() -> None:
    schema = {"const": "é", "type": "string"}
    assert json.loads(str(StructuredOutputs(json=schema).json)) == schema
    assert "é" in str(StructuredOutputs(json=schema).json)
    assert StructuredOutputs(json=' {"type":"string"}').json == ' {"type":"string"}'
    assert StructuredOutputs(choice=["a", "b"]).choice == ("a", "b")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"json": 5}, TypeError, "structured_outputs.json must be a JSON schema, as a dict or a string, got 5"),
        ({"json": ["a"]}, TypeError, "structured_outputs.json must be a JSON schema"),
        ({"json": {"a": float("nan")}}, ValueError, "structured_outputs.json must be a JSON schema: "),
        ({"json": {"a": {1, 2}}}, ValueError, "structured_outputs.json must be a JSON schema: "),
        ({"json": "5"}, ValueError, "structured_outputs.json must be a JSON object, got int"),
        ({"json": ""}, ValueError, "structured_outputs.json must not be empty"),
        ({"regex": "\ud800"}, ValueError, "structured_outputs.regex must be valid Unicode"),
        ({"regex": 5}, TypeError, "structured_outputs.regex must be a string, got 5"),
        ({"grammar": b"a"}, TypeError, "structured_outputs.grammar must be a string"),
        ({"grammar": ""}, ValueError, "structured_outputs.grammar must not be empty"),
        ({"regex": "a", "whitespace_pattern": ""}, ValueError, "structured_outputs.whitespace_pattern must not be"),
        ({"choice": "ab"}, TypeError, "structured_outputs.choice must be a list of strings, got 'ab'"),
        ({"choice": ["a", 5]}, TypeError, r"structured_outputs.choice\[1\] must be a string, got 5"),
        ({"json_object": 1}, TypeError, "structured_outputs.json_object must be True or False, got 1"),
        ({"regex": "a", "disable_any_whitespace": 1}, TypeError, "disable_any_whitespace must be True or False, got 1"),
        ({"regex": "a", "disable_additional_properties": "y"}, TypeError, "disable_additional_properties must be"),
    ],
    ids=str,
)
def test_what_is_no_form(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        StructuredOutputs(**given)
    with pytest.raises(kind, match=message):
        StructuredOutputs.of("form", given)


def test_fields_have_their_names() -> None:
    with pytest.raises(ValueError, match="form must not have 'jsn'; allowed: json, regex, choice, grammar"):
        StructuredOutputs.of("form", {"jsn": {}})
    with pytest.raises(TypeError, match="form must be StructuredOutputs or a dict with its fields, got 5"):
        StructuredOutputs.of("form", 5)


@pytest.mark.parametrize("name", ["regex", "grammar"])
def test_the_bytes_of_a_text(name: str) -> None:
    """Bytes are counted in UTF-8."""
    StructuredOutputs(**{name: "é" * (MAX_BYTES // 2)})
    with pytest.raises(ValueError, match=f"must have at most {MAX_BYTES} bytes, got {MAX_BYTES + 1}"):
        StructuredOutputs(**{name: "é" * (MAX_BYTES // 2) + "a"})


def test_the_bytes_of_all_choices() -> None:
    StructuredOutputs(choice=["é" * (MAX_BYTES // 4), "a" * (MAX_BYTES // 2)])
    with pytest.raises(ValueError, match=f"must have at most {MAX_BYTES} bytes in all, got {MAX_BYTES + 1}"):
        StructuredOutputs(choice=["é" * (MAX_BYTES // 4), "a" * (MAX_BYTES // 2), "b"])


def nested(depth: int) -> str:
    """Nest arrays and objects alternately within an object."""
    opened = "".join('{"a":' if level % 2 == 0 else "[" for level in range(depth))
    closed = "".join("}" if level % 2 == 0 else "]" for level in reversed(range(depth)))
    return f"{opened}1{closed}"


def test_the_depth_of_a_schema() -> None:
    """Brackets in strings do not count, whatever is escaped there, nor do adjacent arrays and objects add up."""
    StructuredOutputs(json=nested(MAX_DEPTH))
    with pytest.raises(ValueError, match=f"at most {MAX_DEPTH} arrays and objects within each other"):
        StructuredOutputs(json=nested(MAX_DEPTH + 1))
    StructuredOutputs(json=json.dumps({"enum": ["[{" * 100, '"[[' * 100, "\\", "[" * 100, []]}))
    StructuredOutputs(json=json.dumps({"enum": [[], {}] * 100}))
    with pytest.raises(ValueError, match="must be valid JSON"):
        StructuredOutputs(json='{"a": "' + "[" * 100)
