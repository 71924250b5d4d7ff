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
