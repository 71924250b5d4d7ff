"""Masks within strings are those that the library makes, and which schemas have such strings."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer, TokenizerWrapper
from random_schemas import random_schema

from compiled_engine.features.structured.grammars.compiler import GrammarCompiler
from compiled_engine.features.structured.grammars.constraint import fill_masks
from compiled_engine.features.structured.grammars.string_masks import StringMasks, StringTokens, probe_for
from compiled_engine.features.structured.grammars.text import WHITESPACE, grammar_text
from compiled_engine.features.structured.grammars.vocabulary import GrammarVocabulary
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.sampling.structured_outputs import StructuredOutputs
from compiled_engine.sampling.token_mask import num_words

VOCAB_SIZE = 4096


@pytest.fixture(scope="module")
def compiler(bundled_tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    assert bundled_tokenizer.eos_token_id is not None
    vocabulary = GrammarVocabulary(bundled_tokenizer.to_json(), VOCAB_SIZE, frozenset({bundled_tokenizer.eos_token_id}))
    compiler = GrammarCompiler(vocabulary)
    yield compiler
    compiler.close()


def grammar(schema: dict[str, Any], **more: Any) -> str:
    return grammar_text(StructuredOutputs(json=schema, **more))


def compare(compiler: GrammarCompiler, schema: dict[str, Any], rng: random.Random, most: int, eos: int) -> int:
    """Write a text of random tokens, mostly long ones; return how many masks were known without the matcher."""
    compiled = compiler.compile(grammar(schema))
    one, other = compiler.constraint(compiled), compiler.constraint(compiled)
    other.strings = None
    words_MW = np.zeros((2, num_words(VOCAB_SIZE)), np.int32)
    token_ids: list[int] = []
    known = 0
    with ThreadPoolExecutor(1) as thread:
        for _ in range(most):
            words_MW[:] = rng.getrandbits(31)
            assert fill_masks([(one, token_ids), (other, token_ids)], words_MW, thread).result() == {}
            assert (words_MW[0] == words_MW[1]).all(), token_ids
            assert one.strings is not None
            known += one.strings.fill(words_MW[0].copy()) and bool(token_ids)
            allowed = np.flatnonzero(np.unpackbits(words_MW[1].view(np.uint8), bitorder="little"))
            token_ids = [int(rng.choice(allowed))]
            if token_ids == [eos]:
                break
    return known


@pytest.mark.parametrize("seed", range(12))
def test_masks_are_those_of_the_library(compiler: GrammarCompiler, bundled_tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    eos = bundled_tokenizer.eos_token_id
    assert eos is not None
    for _ in range(8):
        schema = {"type": "array", "items": random_schema(rng), "minItems": 2}
        if probe_for(grammar(schema), WHITESPACE) is not None:
            compare(compiler, schema, rng, 120, eos)


@pytest.mark.parametrize(
    "string",
    [
        {"type": "string"},
        {"type": "string", "maxLength": 9},
        {"type": "string", "minLength": 30},
        {"type": "string", "minLength": 5, "maxLength": 300},
        {"anyOf": [{"type": "string", "maxLength": 60}, {"type": "null"}, {"enum": [1, 2]}]},
    ],
)
def test_within_a_string_most_masks_are_known(
    compiler: GrammarCompiler, bundled_tokenizer: Tokenizer, string: dict[str, Any]
) -> None:
    """Strings of any length, whose end is one of many tokens, go on for long."""
    eos = bundled_tokenizer.eos_token_id
    assert eos is not None
    schema = {"type": "array", "items": string, "minItems": 50}
    assert compare(compiler, schema, random.Random(1), 300, eos) > 60


def test_a_vocabulary_that_cannot_write_the_probe_has_none() -> None:
    class Ascii:
        eos_token_id = 128
        bos_token_id = None
        special_token_ids = (128,)
        tokens = (*(bytes([byte]) for byte in range(128)), b"<end>")

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    tokens = StringTokens(LLTokenizer(TokenizerWrapper(Ascii()), eos_token=128), 129)
    assert StringMasks.of(tokens, "é") is None
    assert StringMasks.of(tokens, None) is None
    assert StringMasks.of(tokens, "z") is not None


TEXT = {"type": "string", "maxLength": 5}


def of(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": value}, "additionalProperties": False, **more}


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        (of(TEXT), True),
        (of({"enum": ["é", "ñ"]}), True),  # another probe is left
        (of({"enum": list("éñжяλ中の가")}), False),
        (of({"$ref": "#/$defs/X"}, **{"$defs": {"X": TEXT}}), True),
        (of({"$ref": "#/$defs/X"}, **{"$defs": {"X": {"type": "object"}}}), False),
        (of({"type": "string", "pattern": "^(ab|[c-e]{2})+$"}), True),
        (of({"type": "string", "pattern": "^a|b$"}), False),
        (of({"type": "string", "pattern": "ab"}), False),
        (of({"type": "string", "pattern": "^a.b$"}), False),
        (of({"type": "string", "pattern": "^[^a]$"}), False),
        (of({"type": "string", "format": "date"}), False),
        ({"type": "object", "properties": {"a": TEXT}}, False),  # other keys are strings too
        (of({"anyOf": [TEXT, {"type": "integer"}]}), True),
        (of({"anyOf": [TEXT, {"enum": ["abcdefgh"]}]}), False),
        (of({"anyOf": [{"type": "array", "items": TEXT}, {"type": "array", "items": {"type": "string"}}]}), False),
        (of({"type": ["string", "null"]}), False),
        (of(True), False),
        ({"type": "array", "prefixItems": [TEXT]}, False),
    ],
)
def test_which_schemas_have_such_strings(schema: dict[str, Any], plain: bool) -> None:
    assert (probe_for(grammar(schema), WHITESPACE) is not None) == plain


def test_other_grammars_have_none() -> None:
    for given in ({"regex": "a*"}, {"choice": ["a"]}, {"grammar": 'start: "x"'}, {"json_object": True}):
        assert probe_for(grammar_text(StructuredOutputs(**given)), WHITESPACE) is None
    assert probe_for(grammar(of(TEXT), whitespace_pattern="[é ]*"), WHITESPACE) is None
    no_options = {"grammars": [{"json_schema": of(TEXT) | {"x-guidance": []}}]}
    assert probe_for(json.dumps(no_options), WHITESPACE) is None
    assert (
        probe_for(json.dumps({"grammars": [{"json_schema": of(TEXT), "lark_grammar": "start: A"}]}), WHITESPACE) is None
    )
