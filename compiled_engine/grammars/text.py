"""Translate StructuredOutputs to the text that llguidance compiles, within limits, and check that it compiles."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from typing import Any

from compiled_engine.grammars.trials import GrammarTrials
from compiled_engine.sampling.structured_outputs import StructuredOutputs

# Characters up to which a grammar waits for no larger one.
QUICK_GRAMMAR = 16 << 10
# A request waits at most this long for its grammar, grammars before it included.
LONGEST_COMPILE_S = 10.0
# Between any two parts of JSON: a space, or a line end and an indentation.
WHITESPACE = r" |\r?\n[ \t]{0,24}"
ANY_OBJECT = '{"type": "object"}'
# The distinction of Lark and GBNF is llguidance's, but each line is read once.
_IS_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|[?!]*+start(?:[.\[{][^\n:]*+)?\s*+:(?!:=))", re.MULTILINE)
# Parts of GBNF: texts and classes of characters, comments, names. An unterminated text is the converter's error.
_GBNF_PART = re.compile(r'"(?:[^"\\]|\\.)*+"|\[(?:[^\]\\]|\\.)*+\]|#[^\n]*+|[\w-]++', re.DOTALL)
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
# Formats that say what a value is used for, and nothing about its text.
_NOTES = {"password", "binary", "byte", "path", "file-path", "directory-path", "json-string", "base64url"}
_NOTES |= {"int32", "int64", "float", "double"}
# Keywords below which a schema has schemas: one, a list of them, or several by name.
_BELOW = {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"}
_BELOW |= {"prefixItems", "anyOf", "allOf", "oneOf"}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# The converter compares each of these rules with the others.
MOST_GBNF_RULES = 1000


def mask_threads() -> int:
    """Threads that fill masks: few masks take long, so more would wait for each other rather than help."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def grammar_text(given: StructuredOutputs, *, hurried: bool = False) -> str:
    """Raises ValueError if it cannot be compiled, or takes more than a grammar may; TakesLong as GrammarTrials.error
    does."""
    text = _text(given)
    if error := _trials().error(text, hurried=hurried):
        raise ValueError(f"structured_outputs: {error}")
    return text


@cache
def _trials() -> GrammarTrials:
    """Those of this process."""
    return GrammarTrials()


def _text(given: StructuredOutputs) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if given.regex is not None:
        return LLMatcher.grammar_from_regex(given.regex)
    if given.choice is not None:
        texts = " | ".join(json.dumps(text) for text in given.choice)  # as one terminal: rules may have fewer branches
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    if given.grammar is not None:
        if given.grammar.lstrip().startswith("{"):
            return given.grammar
        if _IS_LARK.search(given.grammar):
            return LLMatcher.grammar_from_lark(given.grammar)
        if (count := given.grammar.count("::=")) > MOST_GBNF_RULES:
            raise ValueError(
                f"structured_outputs.grammar must have at most {MOST_GBNF_RULES} rules in GBNF, got {count}"
            )
        try:
            return LLMatcher.grammar_from_lark(gbnf_to_lark(_GBNF_PART.sub(_gbnf_part, given.grammar)))
        except Exception as error:  # the converter raises what its parser does
            raise ValueError(f"structured_outputs.grammar cannot be read: {error}") from error
    schema = ANY_OBJECT if given.json is None else given.json
    assert isinstance(schema, str)
    if '"uniqueItems"' in schema or '"format"' in schema:
        schema = json.dumps(_without_notes(json.loads(schema)), ensure_ascii=False)
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": not given.disable_any_whitespace,
            "whitespace_pattern": given.whitespace_pattern or (None if given.disable_any_whitespace else WHITESPACE),
        },
    )


def _gbnf_part(match: re.Match[str]) -> str:
    """A part of GBNF as the converter understands it: it knows code points of two digits only, and gives the rule
    `root` the name `start`."""
    part = match[0]
    if part[0] in '"[':
        return _GBNF_ESCAPE.sub(_character, part)
    return "start-of-gbnf" if part == "start" else part


def _character(match: re.Match[str]) -> str:
    """The character of an escape in GBNF, unless it means something else when it is written as it is."""
    digits = match[1] or match[2] or match[3]
    if digits is None or (number := int(digits, 16)) > 0x10FFFF:
        return match[0]
    return chr(number) if number > 0xFF or chr(number).isalnum() else f"\\x{number:02x}"


def _without_notes(schema: Any) -> Any:
    """The schema without keywords that require nothing, which the compiler would refuse."""
    if isinstance(schema, list):
        return [_without_notes(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        if (name == "uniqueItems" and value is False) or (name == "format" and value in _NOTES):
            continue
        if name in _BY_NAME and isinstance(value, dict):
            kept[name] = {each: _without_notes(below) for each, below in value.items()}
        else:
            kept[name] = _without_notes(value) if name in _BELOW else value
    return kept
