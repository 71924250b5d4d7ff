"""Schemas, expressions and grammars that are designed to be expensive or endlessly recursive."""

from __future__ import annotations

from typing import Any

RULES = 12_000
HOSTILE: dict[str, dict[str, Any]] = {
    "rules that lead from one to the next": {
        "grammar": "start: r0\n" + "\n".join(f"r{i}:r{i + 1}" for i in range(RULES)) + f'\nr{RULES}:"b"'
    },
    "twice as many symbols with each rule": {
        "grammar": "start: r0\n" + "\n".join(f"r{i}:r{i + 1} r{i + 1}" for i in range(5000)) + '\nr5000:"b"'
    },
    "references to references": {
        "json": {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3500)} | {"3500": {"type": "string"}},
        }
    },
    "a reference to itself": {"json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}},
    "brackets": {"grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000},
    "brackets in an expression": {"regex": "(" * 60_000 + "a" + ")" * 60_000},
    "repetitions of repetitions": {"regex": "((a{1,100}){1,100}){1,100}[^b]{1,1000}(c|d){5,5000}"},
    "states without end": {"regex": ".*a.{1000}b"},
    "many texts": {"choice": [f"{i:05}" for i in range(20_000)]},
    "many properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 5} for i in range(1500)}}
    },
    "brackets in a pattern": {"json": {"type": "string", "pattern": f"^{'(?:' * 40}a{')' * 40}!$"}},
    "lines without end": {"grammar": "\n" * 131_000 + "x"},
    "many rules of GBNF": {"grammar": "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(3000))},
    "options that are a list": {"grammar": '{"grammars": [{"json_schema": {"type": "object", "x-guidance": []}}]}'},
    "a string that does not end": {"json": '{"' + '\\"' * 60_000},
    "a long string": {"json": {"type": "string", "minLength": 10**9, "maxLength": 10**9}},
}

# These are within every limit of the library, and compile without end or until memory is out.
ENDLESS: dict[str, dict[str, Any]] = {
    "a prime": {"json": {"type": "integer", "multipleOf": 99999989}},
    "two primes": {"json": {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}},
    "a prime within an object": {
        "json": {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 1e7 + 19}}}
    },
    "expressions that contradict each other": {
        "grammar": "start: A\nA: /.*(a.{40}|b.{41}).*c/ & ~/.*d.{40}.*/ & /.*c.{39}c.*/"
    },
}
# The same where a grammar may name special tokens, which only the model's vocabulary can show to be right.
ENDLESS_WITH_TOKENS: dict[str, dict[str, Any]] = {
    "in a comment": {"grammar": f"{ENDLESS['expressions that contradict each other']['grammar']} // <|"},
    "in a description": {"json": ENDLESS["a prime"]["json"] | {"description": "<[0]>"}},
}
