"""Convert StructuredOutputs to the text that llguidance compiles, within limits, and check that it compiles."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from compiled_engine.features.structured.grammars.trials import GrammarTrials
from compiled_engine.process.cores import usable_cores
from compiled_engine.sampling.structured_outputs import StructuredOutputs

# Grammars of at most this many characters do not wait for larger ones.
QUICK_GRAMMAR = 16 << 10
# Longest wait of a request for its grammar, including grammars queued before it.
LONGEST_COMPILE_S = 10.0
# Allowed between two parts of JSON: a space, or a line end and an indentation.
WHITESPACE = r" |\r?\n[ \t]{0,24}"
ANY_OBJECT = '{"type": "object"}'
# Distinguishes Lark from GBNF as llguidance does, but in linear time.
_IS_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|[?!]*+start(?:[.\[{][^\n:]*+)?\s*+:(?!:=))", re.MULTILINE)
# Parts of GBNF: strings, character classes, comments and names. The converter reports unterminated strings.
_GBNF_PART = re.compile(r'"(?:[^"\\]|\\.)*+"|\[(?:[^\]\\]|\\.)*+\]|#[^\n]*+|[\w-]++', re.DOTALL)
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
# Formats that describe a value's use, but do not restrict its text.
_NOTES = {"password", "binary", "byte", "path", "file-path", "directory-path", "json-string", "base64url"}
_NOTES |= {"int32", "int64", "float", "double"}
# Keywords whose value is a schema or a list of schemas, and those whose value is schemas by name.
_BELOW = {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"}
_BELOW |= {"prefixItems", "anyOf", "allOf", "oneOf"}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# Limit, since the converter compares each rule with all others.
MOST_GBNF_RULES = 1000


def mask_threads() -> int:
    """Return the number of threads that fill masks. Most masks take so little time that more threads would wait."""
    return max(1, min(8, usable_cores() // 2))


def grammar_text(given: StructuredOutputs, *, hurried: bool = False) -> str:
    """Return the structured outputs as text in llguidance's format.

    Raises ValueError if the text cannot be compiled within the limits. With `hurried`, the first try of a text may
    raise TakesLong, see GrammarTrials.error.
    """
    text = _text(given)
    if error := _trials().error(text, hurried=hurried):
        raise ValueError(f"structured_outputs: {error}")
    return text


@cache
def _trials() -> GrammarTrials:
    return GrammarTrials()


def _text(given: StructuredOutputs) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if given.regex is not None:
        return LLMatcher.grammar_from_regex(given.regex)
    if given.choice is not None:
        texts = " | ".join(json.dumps(text) for text in given.choice)  # one terminal, as rules allow fewer branches
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
        except Exception as error:  # the converter passes on its parser's exceptions
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
    """Return a part of a GBNF grammar, rewritten for the converter.

    The converter supports only code points of two digits, and renames the rule `root` to `start`.
    """
    part = match[0]
    if part[0] in '"[':
        return _GBNF_ESCAPE.sub(_character, part)
    return "start-of-gbnf" if part == "start" else part


def _character(match: re.Match[str]) -> str:
    """Return the character of a GBNF escape, or an escape if the character itself would have another meaning."""
    digits = match[1] or match[2] or match[3]
    if digits is None or (number := int(digits, 16)) > 0x10FFFF:
        return match[0]
    return chr(number) if number > 0xFF or chr(number).isalnum() else f"\\x{number:02x}"


def _without_notes(schema: Any) -> Any:
    """Return the schema without the keywords that restrict nothing and that the compiler would refuse."""
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
