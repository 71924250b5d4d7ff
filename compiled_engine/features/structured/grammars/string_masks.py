"""Derives masks inside JSON strings that are bounded only in length, from the mask at the string's beginning."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from compiled_engine.sampling.token_mask import num_words

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Keywords without effect on values.
_NOTES = frozenset({"title", "description", "default", "examples", "$schema", "$comment", "deprecated"})
_KEYS = {
    "object": frozenset({"type", "properties", "required", "additionalProperties"}),
    "array": frozenset({"type", "items", "minItems", "maxItems"}),
    "string": frozenset({"type", "minLength", "maxLength"}),
    "integer": frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset({"type"}),
    "null": frozenset({"type"}),
}
_DEFINITION = re.compile(r"#/\$defs/[^/]+")
# Matches anchored patterns of ASCII characters and classes only; unambiguous and possessive, so in linear time.
_NARROW = re.compile(
    r"\^(?:[A-Za-z0-9 _:@,-]|\[[A-Za-z0-9 _-]+\]|\((?:\?:)?+|[)|]|\{\d+(?:,\d*)?\}|[?*+])*+\$", re.ASCII
)
PROBES = "éñжяλ中の가"


def probe_for(grammar: str, whitespace: str) -> str | None:
    """Return a character that is allowed only inside strings that are bounded by their length alone, or None.

    No key, constant or pattern of the schema contains the character. The result is None if the grammar is not a schema
    with known keywords only, if two kinds of strings may begin at the same place, or if objects allow other keys.
    `grammar` is in llguidance's format. `whitespace` is the pattern allowed between two parts.
    """
    given = json.loads(grammar) if grammar.startswith("{") else None
    match given:
        case {"grammars": [{"lark_grammar": str()}]}:
            return None
        case {"grammars": [{"json_schema": {**schema}}]}:
            options: Any = schema.pop("x-guidance", {})
            definitions = schema.pop("$defs", {})
        case _:
            return None
    if not isinstance(options, dict):  # llguidance also accepts other types
        return None
    if options.get("whitespace_pattern") not in (None, whitespace):
        return None
    if not isinstance(definitions, dict) or not all(map(_is_plain, [schema, *definitions.values()])):
        return None
    text = json.dumps([schema, definitions], ensure_ascii=False)
    return next((probe for probe in PROBES if probe not in text), None)


def _is_plain(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    keys = schema.keys() - _NOTES
    kind = schema.get("type")
    if "$ref" in keys:
        return keys == {"$ref"} and _DEFINITION.fullmatch(str(schema["$ref"])) is not None
    if "enum" in keys or "const" in keys:
        return len(keys - {"type"}) == 1 and not isinstance(kind, list)
    if "anyOf" in keys:
        branches = schema["anyOf"]
        return keys == {"anyOf"} and all(map(_is_plain, branches)) and sum(map(_may_hold_text, branches)) <= 1
    if not isinstance(kind, str):
        return False
    if "pattern" in keys:
        return keys == {"type", "pattern"} and kind == "string" and _is_narrow(str(schema["pattern"]))
    if not keys <= _KEYS.get(kind, frozenset()):
        return False
    if kind == "object":
        properties = schema.get("properties", {})
        return schema.get("additionalProperties") is False and all(map(_is_plain, properties.values()))
    return kind != "array" or _is_plain(schema.get("items"))


def _may_hold_text(schema: dict[str, Any]) -> bool:
    if "enum" in schema or "const" in schema:
        return '"' in json.dumps(schema.get("enum", schema.get("const")))
    return schema.get("type") not in ("integer", "number", "boolean", "null")


def _is_narrow(pattern: str) -> bool:
    """Return True if the pattern is simple enough to see that it only matches ASCII, otherwise False."""
    if not _NARROW.fullmatch(pattern):
        return False
    depth = 0
    for character in re.sub(r"\[[^\]]*\]", "", pattern):
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return False
    return True


_PLAIN = re.compile(r'[^"\\\x00-\x1f\x7f]+')
_OF_STRING = re.compile(rb'(?:[^"\\]|\\u[0-9A-Fa-f]{0,4}|\\.)*\\?', re.DOTALL)
_ESCAPE = re.compile(rb"\\(?:u[0-9A-Fa-f]{0,4}|.)?", re.DOTALL)
# A string's room is measured up to this many characters more than the longest token; if that is not enough, it is
# measured again later.
_FURTHER = 64


class StringTokens:
    """The lengths of a vocabulary's tokens within a JSON string.

    `lengths` has the number of characters of each token that continues the string without escapes, and 0 for other
    tokens.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        tokens = [tokenizer.decode_bytes([token_id]) for token_id in range(min(vocab_size, tokenizer.vocab_size))]
        self.lengths = [_plain_length(token) for token in tokens]
        taken = [length or _taken(token) for length, token in zip(self.lengths, tokens, strict=True)]
        self._taken_V = np.zeros(32 * num_words(vocab_size), np.int32)
        self._taken_V[: len(taken)] = taken
        self.longest = max(taken)
        self._within: dict[int, np.ndarray] = {}

    def within(self, room: int) -> np.ndarray:
        """Return a mask of the tokens that add at most `room` characters to the string in which they begin."""
        room = min(room, self.longest)
        if room not in self._within:
            self._within[room] = np.packbits(self._taken_V <= room, bitorder="little").view(np.int32)
        return self._within[room]


@dataclass
class _Open:
    """State of an unterminated JSON string."""

    words_W: np.ndarray  # token mask at or after its beginning
    room: int  # characters left
    at_least: bool  # room is a lower bound


class StringMasks:
    """Derives the token masks of one request inside strings that are bounded only in length.

    `probe` has the token ids of a character that is only allowed in such strings, and `quote` the token ids of the
    closing quote.
    """

    def __init__(self, tokens: StringTokens, probe: list[int], quote: list[int]) -> None:
        self._tokens, self._probe, self._quote = tokens, probe, quote
        self._open: _Open | None = None

    @classmethod
    def of(cls, tokens: StringTokens, probe: str | None) -> StringMasks | None:
        """Return the StringMasks of a request; None without a probe, or if the vocabulary cannot write the probe."""
        if probe is None:
            return None
        written = [tokens.tokenizer.greedy_tokenize(text) for text in (probe, '"')]
        if [tokens.tokenizer.decode_bytes(each) for each in written] != [probe.encode(), b'"']:
            return None
        return cls(tokens, *written)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Update the state with generated tokens."""
        for token_id in token_ids:
            if self._open is None:
                return
            length = self._tokens.lengths[token_id]
            self._open.room -= length
            if not length or self._open.room < (self._tokens.longest if self._open.at_least else 0):
                self._open = None

    def fill(self, words_W: np.ndarray) -> bool:
        """Write the mask if it follows from the mask that `note` stored. Return whether it was written."""
        if self._open is None:
            return False
        np.bitwise_and(self._open.words_W, self._tokens.within(self._open.room), out=words_W)
        return True

    def note(self, words_W: np.ndarray, matcher: LLMatcher) -> None:
        """Store the matcher's mask `words_W` if the text is inside a bounded string that may end here."""
        word, bit = divmod(self._probe[0], 32)
        if not words_W[word] >> bit & 1 or not matcher.validate_tokens(self._quote):
            return
        most = self._tokens.longest + _FURTHER
        room = matcher.validate_tokens(self._probe * most) // len(self._probe)
        if room:
            self._open = _Open(words_W.copy(), room, room == most)


def _plain_length(token: bytes) -> int:
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return 0
    return len(text) if _PLAIN.fullmatch(text) else 0


def _taken(token: bytes) -> int:
    """Return the number of characters that a token adds to the string in which it begins."""
    found = _OF_STRING.match(token)
    assert found is not None
    text = _ESCAPE.sub(b"x", found[0])
    return sum(byte & 0xC0 != 0x80 for byte in text)
