"""Translate StructuredOutputs to the text that llguidance compiles, within limits, and check that it compiles."""

from __future__ import annotations

import atexit
import json
import os
import re
import threading
from collections import OrderedDict
from functools import cache

from compiled_engine.grammars.checks import GrammarChecks
from compiled_engine.grammars.limits import KEPT_GRAMMARS, CompileTime
from compiled_engine.sampling.structured_outputs import StructuredOutputs

# Between any two parts of JSON: a space, or a line end and an indentation.
WHITESPACE = r" |\r?\n[ \t]{0,24}"
ANY_OBJECT = '{"type": "object"}'
# Errors that only the model's own vocabulary shows: whether it has these tokens.
SPECIAL_TOKEN_MARKS = ("<[", "<|")
# The distinction of Lark and GBNF is llguidance's, but each line is read once.
_IS_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
# The converter compares each of these rules with the others.
MOST_GBNF_RULES = 1000


def mask_threads() -> int:
    """Threads that fill masks: few masks take long, so more would wait for each other rather than help."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def grammar_text(given: StructuredOutputs, within: CompileTime | None = None) -> str:
    """Raises ValueError if it cannot be compiled, or takes more than a grammar may; TakesTooLong, which is one, if it
    takes more than it may here."""
    text = _text(given)
    if not needs_vocabulary(text) and (error := _last_errors().of(text, within or CompileTime())):
        raise ValueError(f"structured_outputs: {error}")
    return text


def needs_vocabulary(text: str) -> bool:
    """Return whether a grammar may name special tokens: only the model's vocabulary shows whether it compiles, so it is
    checked in the core."""
    return any(mark in text for mark in SPECIAL_TOKEN_MARKS)


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


class _LastErrors:
    """The errors of the grammars checked last, by their text."""

    def __init__(self, checks: GrammarChecks) -> None:
        self._checks = checks
        self._errors: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, text: str, within: CompileTime) -> str:
        """Return the error of a grammar; empty without one."""
        with self._lock:
            if text in self._errors:
                self._errors.move_to_end(text)
                return self._errors[text]
        error = self._checks.error(text, within)
        with self._lock:
            self._errors[text] = error
            if len(self._errors) > KEPT_GRAMMARS:
                self._errors.popitem(last=False)
        return error


@cache
def _last_errors() -> _LastErrors:
    checks = GrammarChecks()
    atexit.register(checks.close)
    return _LastErrors(checks)
