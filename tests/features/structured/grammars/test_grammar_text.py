"""Forms of answers as grammars: which notation a grammar has, and what a schema only notes."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from compiled_engine.features.structured.grammars.text import grammar_text
from compiled_engine.features.structured.grammars.trials import parser_limits
from compiled_engine.sampling.structured_outputs import StructuredOutputs


class Bytes:
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def accepts(text: str, **form: Any) -> bool:
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
    matcher = LLMatcher(tokenizer, grammar_text(StructuredOutputs(**form)), log_level=0, limits=parser_limits())
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('start: "a"', "a", "b"),
        ('?start: "a"', "a", "b"),
        ('!start : "a" | x\nx: "b"', "b", "c"),
        ("start[max_tokens=5]: /a+/", "aa", "b"),
        ('start: "a::=b"', "a::=b", "a"),
        ('root ::= "a" | start\nstart ::= "start"', "start", "b"),
        ('start ::= "x" # start: y\nroot ::= start [s]', "xs", "x"),
        (r'root ::= "\x41\u00e9" "\U0001F600"', "Aé😀", "x41é😀"),
        (r'root ::= "\u0022\u005c\u000A"', '"\\\n', "u"),
        (r'root ::= "\\x41"', r"\x41", "A"),
        (r"root ::= [\u00e0-\u00ff]+", "éà", "e"),
        (r"root ::= [^\u005d\x5e-]", "a", "^"),
        (r'root ::= [^"\x5D] ["\]]', 'a"', "]]"),
    ],
)
def test_lark_and_gbnf_are_told_apart_and_read(grammar: str, right: str, wrong: str) -> None:
    assert accepts(right, grammar=grammar)
    assert not accepts(wrong, grammar=grammar)


@pytest.mark.parametrize(
    "grammar", [r'root ::= "\uD8"', r'root ::= "\U11000000"', 'root ::= "a', "root ::= [a", "x ::= "]
)
def test_gbnf_that_cannot_be_read(grammar: str) -> None:
    with pytest.raises(ValueError, match="structured_outputs"):
        grammar_text(StructuredOutputs(grammar=grammar))


def test_what_a_schema_only_notes_is_left_out() -> None:
    """Where it is a keyword, and not a property's name or a value."""
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "password"},
            "uniqueItems": {"type": "array", "uniqueItems": False, "items": {"type": "integer", "format": "int64"}},
            "any": {"anyOf": [{"type": "string", "format": "binary"}, {"const": {"format": "path"}}]},
        },
        "required": ["format", "uniqueItems", "any"],
        "additionalProperties": False,
    }
    assert accepts('{"format": "x", "uniqueItems": [1, 1], "any": {"format": "path"}}', json=schema)
    assert accepts('{"format": "x", "uniqueItems": [], "any": "x"}', json=schema)
    assert not accepts('{"format": "x", "uniqueItems": [], "any": {"format": "x"}}', json=schema)


@pytest.mark.parametrize(
    "schema",
    [{"type": "array", "uniqueItems": True}, {"type": "string", "format": "iri"}, {"items": {"format": "regex"}}],
)
def test_what_a_schema_requires_and_cannot_be_followed_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="structured_outputs"):
        grammar_text(StructuredOutputs(json=schema))
