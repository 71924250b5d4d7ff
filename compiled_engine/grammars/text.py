"""Translate StructuredOutputs to the text that llguidance compiles, within limits, and check that it compiles."""

from __future__ import annotations

import json
import os
import re
from functools import cache

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
_IS_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
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
            return LLMatcher.grammar_from_lark(gbnf_to_lark(given.grammar))
        except Exception as error:  # the converter raises what its parser does
            raise ValueError(f"structured_outputs.grammar cannot be read: {error}") from error
    schema = ANY_OBJECT if given.json is None else given.json
    assert isinstance(schema, str)
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": not given.disable_any_whitespace,
            "whitespace_pattern": given.whitespace_pattern or (None if given.disable_any_whitespace else WHITESPACE),
        },
    )
